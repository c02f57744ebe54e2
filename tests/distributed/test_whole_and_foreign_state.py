"""State dicts of plain sharded modules beside torch's own tools: whole tensors, DTensors that
others have split, copies and files, loads into modules below. Two ranks; shards are uneven."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import tempfile
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
from tests.distributed.launch import run_ranks
from tests.distributed.plain import VOCAB, WIDTH, Block, Net, tokens

pytestmark = pytest.mark.once

Values = dict[str, torch.Tensor]

OTHERS = [*list(STRATEGIES)[2:], *list(STRATEGIES)[:2]]
"""Another strategy for each."""

PLAIN = ("temperature", "counter")
"""A 0-d parameter and a buffer, which nobody splits."""


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


def assert_holds(sharded: FullyShardedModel, expected: Values, label: Any = "") -> None:
    found = sharded.full_state_dict()
    assert found.keys() == expected.keys(), label
    for name, value in expected.items():
        assert torch.equal(found[name], value), (label, name)


def batch(rank: int) -> torch.Tensor:
    return tokens(0, 0, rank)


def _whole_tensors(rank: int, world: int) -> None:
    """`full_tensor` and `redistribute` of weights, gradients and moments; both full state dicts."""
    reference = Odd().state_dict()
    for strategy in STRATEGIES:
        sharded = model(strategy)
        torch.manual_seed(5)
        reference = Odd()
        optimizer = fully_shard_optimizer(torch.optim.AdamW(sharded.parameters()))
        for other in range(world):
            (reference(batch(other)) / world).backward()
        sharded(batch(rank)).backward()
        for (name, param), plain in zip(
            sharded.named_parameters(), reference.parameters(), strict=True
        ):
            label = (strategy, name)
            whole = param.full_tensor()
            assert torch.equal(whole, plain.detach().view(whole.shape)), label
            torch.testing.assert_close(param.grad.full_tensor(), plain.grad.view(whole.shape))
            assert torch.equal(param.detach().clone().mul_(2).full_tensor(), whole * 2), label
            for dim in range(param.ndim):
                even = param.redistribute(placements=[Shard(dim)])
                assert type(even) is DTensor and even.placements == (Shard(dim),), label
                assert torch.equal(even.full_tensor(), whole), label
            replica = param.redistribute(placements=[Replicate()])
            assert torch.equal(replica.to_local(), whole), label
            with pytest.raises(ValueError, match="placements is missing"):
                param.redistribute()
        expected = dict(reference.state_dict())
        assert_holds(sharded, expected, strategy)
        Odd().load_state_dict(sharded.full_state_dict(cpu_offload=True))
        for offload in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
            found = get_model_state_dict(sharded, options=options)
            assert found or (offload and rank > 0)  # torch offloads to the first rank
            for key, value in found.items():
                known = expected[key.removeprefix("module.")]
                assert torch.equal(value, known.view(value.shape)), (strategy, key)
        optimizer.step()
        for param in sharded.parameters():
            moment = optimizer.state[param]["exp_avg"]
            torch.testing.assert_close(moment.full_tensor(), 0.1 * param.grad.full_tensor())


def _whole_state_dicts_load(rank: int, world: int) -> None:
    """`set_model_state_dict` writes into local tensors where it takes its rows to be."""
    for strategy in STRATEGIES:
        for seed, from_first in ((1, False), (2, True)):
            sharded, values = model(strategy), other_values(seed)
            given = {f"module.{name}": value for name, value in values.items()}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
            told = given if rank == 0 or not from_first else {}
            set_model_state_dict(sharded, told, options=options)
            assert_holds(sharded, values, (strategy, from_first))
            sharded(batch(rank)).backward()  # with the new weights
            plain = Odd()
            plain.load_state_dict(values)
            torch.testing.assert_close(sharded(batch(rank)), plain(batch(rank)))


def _foreign_dtensors_load(rank: int, world: int) -> None:
    """Split by torch, along any dim or not at all, or by a model with other units: each rank gets
    its own rows. Ours had 2 and 0 rows of the tail where torch's have 1 and 1."""
    mesh = init_device_mesh("cpu", (world,))
    split: tuple[Any, ...] = (Shard(0), Shard(1), Replicate(), Shard(0))
    for strategy, source, placement in zip(STRATEGIES, OTHERS, split, strict=True):
        sharded, values = model(strategy), other_values()
        dims = {name: min(getattr(placement, "dim", 0), v.ndim - 1) for name, v in values.items()}
        given = {
            name: value if name in PLAIN else distribute_tensor(
                value, mesh,
                [Shard(dims[name]) if placement != Replicate() else placement],
            )
            for name, value in values.items()
        }  # fmt: skip
        assert not any(sharded.load_state_dict(given))
        assert_holds(sharded, values, (strategy, placement))
        torch.manual_seed(1)
        one_unit = fully_shard_model(Odd(), data_parallel_sharding_strategy=source)
        values = one_unit.full_state_dict()
        sharded.load_state_dict(one_unit.state_dict())
        assert_holds(sharded, values, (strategy, source))


def _refused_before_anything_is_written(rank: int, world: int) -> None:
    """Whose rows nobody knows. On the first rank alone they could be torch's."""
    mesh = init_device_mesh("cpu", (world,))
    for strategy in STRATEGIES:
        sharded, values = model(strategy), other_values()
        before = sharded.full_state_dict()
        rows = 10 if rank == 0 else 8
        local = DTensor.from_local(
            torch.ones(rows, WIDTH), mesh, [Shard(0)], shape=(VOCAB, WIDTH), stride=(WIDTH, 1)
        )
        with pytest.raises(ValueError, match=r"module.head.weight \(1 in all\): a DTensor that"):
            sharded.load_state_dict({**values, "head.weight": local})
        assert_holds(sharded, before, strategy)
        with pytest.raises(ValueError, match=r"head.weight: a list, expected a tensor"):
            sharded.load_state_dict({**values, "head.weight": [1.0]})
        assert_holds(sharded, before, strategy)


def _moments_load(rank: int, world: int) -> None:
    """Whole, split by torch, or by a model with other units: each rank gets its own rows, in an
    optimizer that has stepped and in one that has not. What nobody knows the rows of, or has
    another shape, is refused before anything is written."""
    mesh = init_device_mesh("cpu", (world,))
    forms: tuple[Any, ...] = (Shard(0), Shard(1), Replicate(), None)
    for strategy, source in zip(STRATEGIES, OTHERS, strict=True):
        for stepped, form in itertools.product((False, True), forms):
            sharded = model(strategy)
            optimizer = fully_shard_optimizer(torch.optim.SGD(sharded.parameters(), 0.1, 0.9))
            if stepped:
                sharded(batch(rank)).backward()
                optimizer.step()
            given, expected = optimizer.state_dict(), []
            for number, param in enumerate(sharded.parameters()):
                torch.manual_seed(number)
                whole = value = torch.randn(param.shape)
                expected.append(whole)
                if form is not None:
                    dim = min(getattr(form, "dim", 0), whole.ndim - 1)
                    split = form if form == Replicate() else Shard(dim)
                    value = distribute_tensor(whole, mesh, [split])
                given["state"][number] = {"momentum_buffer": value}
            optimizer.load_state_dict(given)
            _assert_moments(sharded, optimizer, expected, (strategy, stepped, form))
            rows, label = 10 if rank == 0 else 8, (strategy, stepped, form, "refused")
            unknown = DTensor.from_local(
                torch.ones(rows, WIDTH), mesh, [Shard(0)], shape=(VOCAB, WIDTH), stride=(WIDTH, 1)
            )
            of_head = [tuple(p.shape) for p in sharded.parameters()].index((VOCAB, WIDTH), 1)
            for value, text in (
                (unknown, r"momentum_buffer of parameter \d+ \(1 in all\): a DTensor that"),
                (torch.ones(3, 2), r"momentum_buffer of parameter \d+: \(3, 2\) for \(19, 10\)"),
            ):
                other = {n: {"momentum_buffer": v * 2} for n, v in enumerate(expected)}
                other[of_head] = {"momentum_buffer": value}
                with pytest.raises(ValueError, match=text):
                    optimizer.load_state_dict({**given, "state": other})
                _assert_moments(sharded, optimizer, expected, label)
        one_unit = fully_shard_model(Odd(), data_parallel_sharding_strategy=source)
        theirs = fully_shard_optimizer(torch.optim.SGD(one_unit.parameters(), 0.1, 0.9))
        one_unit(batch(rank)).backward()
        theirs.step()
        whole_ones = [
            theirs.state[param]["momentum_buffer"].full_tensor() for param in one_unit.parameters()
        ]
        optimizer.load_state_dict(theirs.state_dict())
        _assert_moments(sharded, optimizer, whole_ones, (strategy, source))
        optimizer.zero_grad()
        sharded(batch(rank)).backward()
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


def _keys_are_told(rank: int, world: int) -> None:
    """What `load_state_dict` returns is what torch's does for the whole module."""
    sharded, values = model("optim_grads_params"), other_values()
    assert tuple(sharded.load_state_dict(values)) == ([], [])
    given = {name: value for name, value in values.items() if "head" not in name}
    given["other"] = torch.ones(1)
    given.pop("counter")
    missing, unexpected = sharded.load_state_dict(given, strict=False)
    plain = Odd().load_state_dict(given, strict=False)
    assert [name.removeprefix("module.") for name in missing] == plain.missing_keys
    assert unexpected == plain.unexpected_keys == ["other"]
    inner = sharded.module.load_state_dict(given, strict=False)
    assert inner == plain


def _modules_below_load(rank: int, world: int) -> None:
    """Plain tensors into any module, also after an evaluation, which leaves the unsharded
    parameters shown: they were written, and lost with the next gather."""
    for strategy in STRATEGIES:
        for dtype in (torch.float32, torch.bfloat16):
            sharded, values = model(strategy, dtype), other_values()
            expected = sharded.full_state_dict()
            with torch.no_grad():
                sharded(batch(rank))
            for name in ("blocks.1.up", "blocks.0", "head"):
                part = {
                    key.removeprefix(f"{name}."): value
                    for key, value in values.items()
                    if key.startswith(f"{name}.")
                }
                found = sharded.get_submodule(f"module.{name}").load_state_dict(part)
                assert not any(found), found
                expected |= {f"{name}.{key}": value for key, value in part.items()}
            assert_holds(sharded, expected, (strategy, dtype))
            plain = Odd()
            plain.load_state_dict(expected)
            with torch.no_grad():
                torch.testing.assert_close(sharded(batch(rank)), plain.to(dtype)(batch(rank)))
            head = sharded.module.head
            with pytest.raises(RuntimeError, match=r"weight: shape \(3, 2\), expected \(19, 10\)"):
                head.load_state_dict({"weight": torch.ones(3, 2)})
            with pytest.raises(ValueError, match="assign=True"):
                head.load_state_dict({"weight": values["head.weight"]}, assign=True)
            assert_holds(sharded, expected, (strategy, dtype))


def _copies_and_files(rank: int, world: int) -> None:
    """Copies are of this rank's rows, not of its flat buffers, and load again."""
    for strategy in STRATEGIES:
        sharded, values = model(strategy), other_values()
        sharded.load_state_dict(values)
        best = copy.deepcopy(sharded.state_dict())
        file = io.BytesIO()
        torch.save(sharded.state_dict(), file)
        rows = sum(value.to_local().nbytes for value in best.values() if isinstance(value, DTensor))
        assert len(file.getvalue()) < rows + 2500 * len(best), strategy
        file.seek(0)
        kept = {
            "deepcopy": best,
            "torch.load": torch.load(file),
            "pickle": pickle.loads(pickle.dumps(sharded.state_dict())),
        }
        for label, state in kept.items():
            sharded.load_state_dict(other_values(11))
            assert sharded.load_state_dict(state) == ([], [])
            assert_holds(sharded, values, (strategy, label))
        optimizer = fully_shard_optimizer(torch.optim.AdamW(sharded.parameters()))
        sharded(batch(rank)).backward()
        optimizer.step()
        device_buffer = copy.deepcopy(optimizer.state_dict())
        moments = [optimizer.state[p]["exp_avg"].full_tensor() for p in sharded.parameters()]
        optimizer.step()
        optimizer.load_state_dict(device_buffer)
        for param, moment in zip(sharded.parameters(), moments, strict=True):
            assert torch.equal(optimizer.state[param]["exp_avg"].full_tensor(), moment)


def _modules_are_not_copied(rank: int, world: int) -> None:
    sharded = model("optim_grads_params")
    for copied in (copy.deepcopy, AveragedModel, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"FullyShardedModel: .* save model.state_dict\(\)"):
            copied(sharded)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="a parameter of a sharded model"):
            copied(sharded.module.head.weight)
    sharded(batch(rank)).backward()


def _weights_replaced_afterwards(rank: int, world: int) -> None:
    """What `tie_weights()` of other libraries, or an assignment, does was undone in silence when
    the other identity was shown next."""
    for strategy in STRATEGIES:
        sharded = model(strategy)
        own = sharded.module.head.weight
        sharded.module.head.weight = sharded.module.embedding.weight
        with pytest.raises(RuntimeError, match="parameter head.weight was replaced or removed"):
            sharded(batch(rank))
        sharded.module.head.weight = own
        del sharded.module.blocks[1].up.weight
        with pytest.raises(RuntimeError, match="parameter blocks.1.up.weight was replaced"):
            sharded(batch(rank))
        sharded = model(strategy)
        weights = {name: value * 2 for name, value in sharded.module.named_parameters()}
        with pytest.raises(RuntimeError, match=r"was replaced .*functional_call"):
            torch.func.functional_call(sharded.module, weights, (batch(rank),))
        sharded(batch(rank)).backward()
        for convert in (lambda m: m.to(torch.bfloat16), lambda m: m._apply(lambda t: t.half())):
            for module in (sharded, sharded.module, sharded.module.blocks[0]):
                with pytest.raises(RuntimeError, match="convert the module before wrapping it"):
                    convert(module)
        assert sharded.to("cpu").float() is sharded
        sharded.zero_grad()
        sharded(batch(rank)).backward()


def _dcp(rank: int, world: int) -> None:
    """torch DCP: saved by one strategy, loaded in place by another."""
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    for strategy, other in zip(STRATEGIES, OTHERS, strict=True):
        source, values = model(strategy), other_values()
        source.load_state_dict(values)
        folder = Path(folders[0]) / strategy
        dcp.save(get_model_state_dict(source), checkpoint_id=folder)
        sharded = model(other)
        state = get_model_state_dict(sharded)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(sharded, state)
        assert_holds(sharded, values, (strategy, other))


def _all(rank: int, world: int) -> None:
    for check in (
        _whole_tensors, _whole_state_dicts_load, _foreign_dtensors_load,
        _refused_before_anything_is_written, _moments_load, _keys_are_told, _modules_below_load,
        _copies_and_files, _modules_are_not_copied, _weights_replaced_afterwards, _dcp,
    ):  # fmt: skip
        try:
            check(rank, world)
        except BaseException as error:
            raise AssertionError(f"{check.__name__}: {error}") from error


def test_state_dicts_beside_torchs_own_tools() -> None:
    """Each in a process group that the last one left as it was."""
    run_ranks(_all, 2)
