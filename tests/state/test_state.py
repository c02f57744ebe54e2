"""State dicts of plain sharded modules beside torch's own tools: whole tensors, DTensors that
others have split, copies and files, loads into modules below. Two ranks; shards are uneven. And
weights of Megatron models, one at a time, as their modules would have them."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.plain.fully_shard import FullyShardedModel
from megatron_fsdp_adapter.state.module_weights import ModuleWeight
from tests.lib.gpt.checks import check_same_bits
from tests.lib.gpt.gpt import Case, build_trainer, init_megatron
from tests.lib.plain.plain import VOCAB, WIDTH, Block, Net, tokens
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "state/sharded_state_dict.py",
    "state/model_state.py",
    "state/module_weights.py",
    "core/dtensor/uneven.py",
)

Values = dict[str, torch.Tensor]

OTHERS = dict(zip(STRATEGIES, [*list(STRATEGIES)[2:], *list(STRATEGIES)[:2]], strict=True))
"""Another strategy for each."""

ENDS = tuple(STRATEGIES)[::3]
"""Nothing is sharded, or everything."""

PLAIN = ("temperature", "counter")
"""A 0-d parameter and a buffer, which are not split."""


class Odd(Net):
    """With a last weight of two rows, which our shards cut into 2 and 0 rows and torch into 1 and
    1, a 0-d parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.tail = nn.Linear(VOCAB, 2, bias=False)
        self.register_buffer("counter", torch.tensor([3.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.embedding(tokens))
        return self.tail(self.head(hidden)).square().mean() * self.temperature


def model(strategy: str, dtype: torch.dtype = torch.float32) -> FullyShardedModel:
    torch.manual_seed(5)
    return fully_shard_model(
        Odd().to(dtype), None, [Block], data_parallel_sharding_strategy=strategy
    )


def other_values(seed: int = 9) -> Values:
    """Random values under the module's own names, equal on all ranks."""
    torch.manual_seed(seed)
    return {name: torch.randn_like(value) for name, value in Odd().state_dict().items()}


def batch() -> torch.Tensor:
    return tokens(0, 0, dist.get_rank())


def split(value: torch.Tensor, form: Any) -> torch.Tensor:
    """By torch, along a dim that the value has, or on all ranks; None leaves it as it is."""
    if form is None:
        return value
    if form != Replicate():
        form = Shard(min(form.dim, value.ndim - 1))
    return distribute_tensor(value, init_device_mesh("cpu", (dist.get_world_size(),)), [form])


def of_unknown_rows() -> DTensor:
    """Of the head's shape. On the first rank alone its rows could be torch's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.ones(8 if dist.get_rank() else 10, WIDTH)
    return DTensor.from_local(rows, mesh, [Shard(0)], shape=(VOCAB, WIDTH), stride=(WIDTH, 1))


def _whole_tensors(strategy: str, root: Path) -> None:
    """`redistribute` and `full_tensor` of weights; both full state dicts."""
    sharded = model(strategy)
    torch.manual_seed(5)
    expected = dict(Odd().state_dict())
    for name, param in sharded.named_parameters():
        whole = expected[name.removeprefix("module.")].view(param.shape)
        for form in (*map(Shard, range(param.ndim)), Replicate()):
            even = param.redistribute(placements=[form])
            assert type(even) is DTensor, name
            assert even.placements == (form,), name
            assert torch.equal(even.full_tensor(), whole), name
        with pytest.raises(ValueError, match="placements is missing"):
            param.redistribute()
    check_same_bits(sharded.full_state_dict(), expected, "gathered")
    Odd().load_state_dict(sharded.full_state_dict(cpu_offload=True))
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        found = get_model_state_dict(sharded, options=options)
        assert found or (offload and dist.get_rank() > 0)  # torch offloads to the first rank
        known = {key: expected[key.removeprefix("module.")] for key in found}
        check_same_bits(found, known, f"{offload=}")


def _whole_state_dicts_load(strategy: str, root: Path) -> None:
    """`set_model_state_dict` writes into local tensors where it takes its rows to be."""
    for seed, from_first in ((1, False), (2, True)):
        sharded = model(strategy)
        values = other_values(seed)
        given = {f"module.{name}": value for name, value in values.items()}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        told = given if dist.get_rank() == 0 or not from_first else {}
        set_model_state_dict(sharded, told, options=options)
        check_same_bits(sharded.full_state_dict(), values, f"{from_first}")
        sharded(batch()).backward()  # with the new weights
        plain = Odd()
        plain.load_state_dict(values)
        torch.testing.assert_close(sharded(batch()), plain(batch()))


def momentum(sharded: FullyShardedModel, steps: bool) -> Any:
    """An optimizer with a buffer for each parameter, which may have stepped."""
    optimizer = fully_shard_optimizer(torch.optim.SGD(sharded.parameters(), 0.1, 0.9))
    if steps:
        sharded(batch()).backward()
        optimizer.step()
    return optimizer


def _foreign_values_load(strategy: str, root: Path) -> None:
    """Weights and moments that are whole, split by torch, along any dim or not at all, or by a
    model with other units: each rank gets its own rows, in an optimizer that has stepped and in one
    that has not. Ours had 2 and 0 rows of the tail where torch's have 1 and 1. What no rank knows
    the rows of, or has another shape, is refused before anything is written."""
    for steps, form in itertools.product((False, True), (None, Shard(0), Shard(1), Replicate())):
        sharded = model(strategy)
        values = other_values()
        optimizer = momentum(sharded, steps)
        whole = {n: v if n in PLAIN else split(v, form) for n, v in values.items()}
        assert not any(sharded.load_state_dict(whole))
        check_same_bits(sharded.full_state_dict(), values, f"{form}")
        moments = [torch.randn(param.shape) for param in sharded.parameters()]
        given = optimizer.state_dict()
        given["state"] = {n: {"momentum_buffer": split(v, form)} for n, v in enumerate(moments)}
        optimizer.load_state_dict(given)
        _assert_moments(sharded, optimizer, moments, (steps, form))
    one_unit = fully_shard_model(Odd(), data_parallel_sharding_strategy=OTHERS[strategy])
    theirs = momentum(one_unit, True)
    values = one_unit.full_state_dict()
    moments = [theirs.state[p]["momentum_buffer"].full_tensor() for p in one_unit.parameters()]
    sharded.load_state_dict(one_unit.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    _assert_moments(sharded, optimizer, moments, "one unit")
    twice = {name: value * 2 for name, value in values.items()}
    others = {n: {"momentum_buffer": v * 2} for n, v in enumerate(moments)}
    of_head = [tuple(param.shape) for param in sharded.parameters()].index((VOCAB, WIDTH), 1)

    def with_head(value: torch.Tensor) -> dict[str, Any]:
        return {**given, "state": {**others, of_head: {"momentum_buffer": value}}}

    for load, wrong, said in (
        (
            sharded.load_state_dict,
            {**twice, "head.weight": of_unknown_rows()},
            r"module.head.weight \(1 in all\) are DTensors without chunks",
        ),
        (
            sharded.load_state_dict,
            {**twice, "head.weight": [1.0]},
            r"head.weight: a list, expected a tensor",
        ),
        (
            optimizer.load_state_dict,
            with_head(of_unknown_rows()),
            r"momentum_buffer of parameter \d+ \(1 in all\) are DTensors with",
        ),
        (
            optimizer.load_state_dict,
            with_head(torch.ones(3, 2)),
            r"momentum_buffer of parameter \d+: \(3, 2\) for \(19, 10\)",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            load(wrong)
        check_same_bits(sharded.full_state_dict(), values, said)
        _assert_moments(sharded, optimizer, moments, said)
    optimizer.zero_grad()
    sharded(batch()).backward()
    optimizer.step()


def _assert_moments(
    sharded: FullyShardedModel, optimizer: Any, expected: list[torch.Tensor], label: Any
) -> None:
    """As shown, and as the step reads them."""
    for param, whole in zip(sharded.parameters(), expected, strict=True):
        moment = optimizer.state[param]["momentum_buffer"]
        assert torch.equal(moment.full_tensor(), whole), label
        read = optimizer._fsdp_shards.state[param._local_tensor]["momentum_buffer"]
        assert read.data_ptr() == moment._local_tensor.data_ptr(), label


def _keys_are_told(strategy: str, root: Path) -> None:
    """What `load_state_dict` returns is what torch's does for the whole module."""
    sharded = model(strategy)
    values = other_values()
    given = {name: value for name, value in values.items() if "head" not in name}
    given["other"] = torch.ones(1)
    given.pop("counter")
    missing, unexpected = sharded.load_state_dict(given, strict=False)
    plain = Odd().load_state_dict(given, strict=False)
    assert [name.removeprefix("module.") for name in missing] == plain.missing_keys
    assert unexpected == plain.unexpected_keys == ["other"]
    assert sharded.module.load_state_dict(given, strict=False) == plain


def _modules_below_load(strategy: str, root: Path) -> None:
    """Plain tensors into any module, also after an evaluation, which leaves the raw parameters
    shown: they were written, and lost with the next gather."""
    for dtype in (torch.float32, torch.bfloat16):
        sharded = model(strategy, dtype)
        values = other_values()
        expected = sharded.full_state_dict()
        with torch.no_grad():
            sharded(batch())
        for name in ("blocks.1.up.", "blocks.0.", "head."):
            part = {k.removeprefix(name): v for k, v in values.items() if k.startswith(name)}
            below = sharded.get_submodule(f"module.{name[:-1]}")
            assert not any(below.load_state_dict(part))
            expected |= {f"{name}{key}": value for key, value in part.items()}
        check_same_bits(sharded.full_state_dict(), expected, f"{dtype}")
        plain = Odd()
        plain.load_state_dict(expected)
        with torch.no_grad():
            torch.testing.assert_close(sharded(batch()), plain.to(dtype)(batch()))
        head = sharded.module.head
        with pytest.raises(RuntimeError, match=r"weight: shape \(3, 2\), expected \(19, 10\)"):
            head.load_state_dict({"weight": torch.ones(3, 2)})
        with pytest.raises(ValueError, match="assign=True"):
            head.load_state_dict({"weight": values["head.weight"]}, assign=True)
        check_same_bits(sharded.full_state_dict(), expected, f"{dtype}")


def _copies_and_files(strategy: str, root: Path) -> None:
    """Copies are of this rank's rows, not of its flat buffers, and load again. Modules are not
    copied."""
    sharded = model(strategy)
    values = other_values()
    sharded.load_state_dict(values)
    best = copy.deepcopy(sharded.state_dict())
    file = io.BytesIO()
    torch.save(sharded.state_dict(), file)
    rows = sum(value.to_local().nbytes for value in best.values() if isinstance(value, DTensor))
    assert len(file.getvalue()) < rows + 2500 * len(best)
    file.seek(0)
    pickled = pickle.loads(pickle.dumps(sharded.state_dict()))
    for state in (best, torch.load(file), pickled):
        sharded.load_state_dict(other_values(11))
        assert sharded.load_state_dict(state) == ([], [])
        check_same_bits(sharded.full_state_dict(), values, "read again")
    of_model = r"FullyShardedModel: .* save model.state_dict\(\)"
    weight = sharded.module.head.weight
    of_weight = "a parameter of a sharded model"
    for copied, thing, said in (
        (copy.deepcopy, sharded, of_model),
        (AveragedModel, sharded, of_model),
        (pickle.dumps, sharded, of_model),
        (copy.deepcopy, weight, of_weight),
        (pickle.dumps, weight, of_weight),
    ):
        with pytest.raises(RuntimeError, match=said):
            copied(thing)


def _weights_replaced_afterwards(strategy: str, root: Path) -> None:
    """What `tie_weights()` of other libraries, or an assignment, does was undone in silence when
    the other identity was shown next."""
    sharded = model(strategy)
    own = sharded.module.head.weight
    sharded.module.head.weight = sharded.module.embedding.weight
    with pytest.raises(RuntimeError, match="parameter head.weight was replaced or removed"):
        sharded(batch())
    sharded.module.head.weight = own
    del sharded.module.blocks[1].up.weight
    with pytest.raises(RuntimeError, match="parameter blocks.1.up.weight was replaced"):
        sharded(batch())
    sharded = model(strategy)
    weights = {name: value * 2 for name, value in sharded.module.named_parameters()}
    with pytest.raises(RuntimeError, match=r"was replaced .*functional_call"):
        torch.func.functional_call(sharded.module, weights, (batch(),))
    sharded(batch()).backward()


def _dcp(strategy: str, root: Path) -> None:
    """torch DCP: saved by one strategy, loaded in place by another."""
    source = model(strategy)
    values = other_values()
    source.load_state_dict(values)
    dcp.save(get_model_state_dict(source), checkpoint_id=root)
    sharded = model(OTHERS[strategy])
    state = get_model_state_dict(sharded)
    dcp.load(state, checkpoint_id=root)
    set_model_state_dict(sharded, state)
    check_same_bits(sharded.full_state_dict(), values, "by another strategy")


@pytest.mark.parametrize(
    "check",
    (
        _whole_tensors,
        _whole_state_dicts_load,
        _foreign_values_load,
        _keys_are_told,
        _modules_below_load,
        _copies_and_files,
        _weights_replaced_afterwards,
        _dcp,
    ),
)
@pytest.mark.parametrize(
    "strategy", (*ENDS, *(pytest.param(s, marks=pytest.mark.full) for s in list(STRATEGIES)[1:3]))
)
@on_ranks(2)
def test_state_dicts_beside_torchs_own_tools(root: Path, strategy: str, check: Any) -> None:
    """Each in a process group that the last one left as it was."""
    check(strategy, root)


# Weights of a Megatron model, read and written one at a time.

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, swiglu=True)


@pytest.mark.parametrize(
    ("world", "instances", "outer"), [(2, 1, "no_shard"), (4, 2, "no_shard"), (4, 2, "optim")]
)
@on_ranks()
def test_whole_values_of_a_weight_go_in_and_out_bit_for_bit(
    world: int, instances: int, outer: str
) -> None:
    """Another dtype is a cast. With an outer axis that splits shards or does not, too."""
    number = {"num_distributed_optimizer_instances": instances}
    device = init_megatron(**number)
    for strategy in STRATEGIES:
        ddp = {**number, "outer_dp_sharding_strategy": outer}
        trainer = build_trainer(CASE, strategy, device, ddp=ddp)
        engine = trainer.wrapper.engine
        inner = trainer.wrapper.module
        before = _tensors_of(inner)
        torch.manual_seed(4)  # the same values on all ranks
        values = {name: torch.randn(value.shape) for name, value in before.items()}
        for pair in engine.pairs:
            weight = ModuleWeight(pair, engine)
            name = pair.managed.fqns[0]
            assert weight.shape == pair.unsharded.shape
            assert weight.dtype == pair.unsharded.dtype
            assert torch.equal(weight.gather(), before[name])
            weight.data.copy_(values[name].double())
            assert torch.equal(weight.gather(), values[name])
            assert torch.equal(weight.gather(torch.bfloat16), values[name].bfloat16())
        engine.main_weights_changed(loaded=True)
        check_same_bits(_tensors_of(inner), values, strategy)


def _tensors_of(inner: Any) -> dict[str, torch.Tensor]:
    """Without what Transformer Engine's modules would pickle."""
    return {k: v for k, v in inner.full_state_dict().items() if isinstance(v, torch.Tensor)}
