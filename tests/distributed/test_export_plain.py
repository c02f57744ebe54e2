"""Exports of plain sharded modules: every tensor is that of the whole model, bit for bit, in every
strategy and mixture of axes, a bounded number of units at a time, and training goes on as if there
had been none."""

from __future__ import annotations

import itertools
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import (
    export_shards,
    export_weights,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.buffer import FlatBuffer
from megatron_fsdp_adapter.plain.fully_shard import FullyShardedModel
from megatron_fsdp_adapter.sharding import unit_copies
from tests.distributed.launch import run_ranks
from tests.distributed.plain import Block, Net, tokens

pytestmark = pytest.mark.once


class Tied(Net):
    """With a tied head, a frozen norm, a frozen table of integers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.blocks[1].norm.requires_grad_(False)
        codes = torch.arange(250, 272, dtype=torch.int32).view(11, 2)  # bf16 rounds some
        self.blocks[0].codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("counter", torch.tensor([3, 4]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def sharded(strategy: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(5)
    model = fully_shard_model(
        Tied().to(dtype), options.pop("mesh", None), [Block],
        data_parallel_sharding_strategy=strategy, **options,
    )
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))


def train(model: FullyShardedModel, optimizer: Any, step: int) -> None:
    model(tokens(step, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def expected(model: FullyShardedModel, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """A whole-model gather. Weights that are tied come once."""
    whole = model.full_state_dict()
    whole.pop("head.weight")
    return {
        name: value if dtype is None or not value.is_floating_point() else value.to(dtype)
        for name, value in whole.items()
    }


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], why: str) -> None:
    assert found.keys() == wanted.keys(), why
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, (why, name)
        assert torch.equal(found[name], value), (why, name)


def from_shards(shards: Any) -> dict[str, torch.Tensor]:
    """Whole tensors of the blocks of all ranks."""
    told: list[Any] = [None] * dist.get_world_size()
    mine = [(one.name, one.tensor, one.offsets, one.shape) for one in shards]
    dist.all_gather_object(told, mine)
    found: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for name, block, offsets, shape in itertools.chain(*told):
        place = tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))
        whole = found.setdefault(name, torch.zeros(shape, dtype=block.dtype))
        whole[place] = block
        filled.setdefault(name, torch.zeros(shape, dtype=torch.bool))[place] = True
    assert all(value.all() for value in filled.values())
    return found


def _exports(rank: int, world: int, strategy: str) -> None:
    for mesh, outer in (("flat", "no_shard"), ("hybrid", "no_shard"), ("hybrid", "optim")):
        if mesh == "hybrid" and (world < 2 or (outer == "optim" and strategy == "no_shard")):
            continue
        sizes = {2: (2, 1), 4: (2, 2)}
        options: dict[str, Any] = {"outer_dp_sharding_strategy": outer}
        if mesh == "hybrid":
            names = ("outer", "inner")
            options["mesh"] = init_device_mesh("cpu", sizes[world], mesh_dim_names=names)
        for computes in (torch.float32, torch.bfloat16):
            model, optimizer = sharded(strategy, computes, **options)
            for step in range(2):
                train(model, optimizer, step)
                for dtype in (torch.bfloat16, torch.float32, None):
                    label = f"{mesh} {outer} {computes} {dtype} {step}"
                    wanted = expected(model, dtype)
                    assert_same(dict(export_weights(model, dtype=dtype)), wanted, label)
                    found = from_shards(export_shards(model, dtype=dtype))
                    found["temperature"] = found["temperature"].view(())
                    assert_same(found, wanted, label)
            first = next(iter(export_weights(model)))[0]
            assert first == "embedding.weight" or first.startswith("blocks.0")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_exported_tensors_are_those_of_the_whole_model(strategy: str, world: int) -> None:
    run_ranks(_exports, world, strategy, timeout=300)


def _between_steps(rank: int, world: int, strategy: str) -> None:
    (plain, without), (model, optimizer) = sharded(strategy), sharded(strategy)
    for step in range(4):
        train(plain, without, step)
        model(tokens(step, 0, rank)).backward()
        dict(export_weights(model))  # with gradients attached
        optimizer.step()
        if step % 2:
            stopped = export_weights(model, dtype=None)
            next(stopped)
            stopped.close()
            next(export_shards(model))
        optimizer.zero_grad()
        list(export_weights(model))
        with torch.no_grad():
            model(tokens(step, 1, rank))
        dict(export_weights(model))  # behind an evaluation, weights gathered ahead
    assert_same(model.full_state_dict(), plain.full_state_dict(), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_with_exports_in_between_is_training_without(strategy: str) -> None:
    run_ranks(_between_steps, 2, strategy, timeout=300)


class _Counted(FlatBuffer):
    """Counts the bytes of copies that exist."""

    alive, most, allowed = 0, 0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        nbytes = self.nbytes
        for _ in range(2000):  # a thread of gloo's keeps tensors a moment longer than its work
            if _Counted.alive + nbytes <= _Counted.allowed:
                break
            time.sleep(0.001)
        _Counted.alive += nbytes
        _Counted.most = max(_Counted.most, _Counted.alive)
        weakref.finalize(self.tensor.untyped_storage(), _Counted._gone, nbytes)

    @classmethod
    def _gone(cls, nbytes: int) -> None:
        cls.alive -= nbytes


def _bounded(rank: int, world: int) -> None:
    unit_copies.FlatBuffer = _Counted  # type: ignore[misc]
    model, _ = sharded("optim_grads_params")
    sizes = [
        sum(g.layout.total_numel * (2 if g.key.dtype.is_floating_point else 4) for g in unit.groups)
        for unit in model.engine.units
    ]
    largest, whole = max(sizes), sum(sizes)
    assert whole > 3 * largest / 2
    _Counted.allowed = 3 * largest
    names = [name for name, _ in export_weights(model)]
    assert 0 < _Counted.most <= 3 * largest, "a loop that keeps a variable"
    _Counted.most, _Counted.allowed = 0, 2 * largest
    exported = export_weights(model)
    for name in names:
        found, tensor = next(exported)
        assert found == name
        del tensor
    assert 0 < _Counted.most <= 2 * largest, "the unit at hand and the next one"
    _Counted.allowed = whole
    kept = [tensor for _, tensor in export_weights(model)]
    assert _Counted.alive <= whole and len(kept) == len(names)


def test_two_units_exist_at_a_time_and_what_the_caller_keeps() -> None:
    run_ranks(_bounded, 2)


def _chosen(rank: int, world: int) -> None:
    model, optimizer = sharded("optim_grads_params")
    everything = [name for name, _ in export_weights(model, which="changed")]
    frozen = {"blocks.1.norm.weight", "blocks.1.norm.bias", "blocks.0.codes"}
    assert {*frozen, "counter"} < set(everything), "nothing had been exported before"
    for step in range(2):
        train(model, optimizer, step)
        model.module.counter.add_(1000)  # as running statistics, or the bias of a router
        changed = dict(export_weights(model, which="changed"))
        assert set(everything) - set(changed) == frozen
        wanted = expected(model, torch.bfloat16)
        assert_same(changed, {name: wanted[name] for name in changed}, "what is trained")
        shards = from_shards(export_shards(model, which="changed"))
        shards["temperature"] = shards["temperature"].view(())
        assert_same(shards, changed, "shards of what is trained")
    assert "counter" not in {one.name for one in export_shards(model, which="trained")}
    model.load_state_dict(model.state_dict())
    trained = [name for name in changed if name != "counter"]
    assert list(dict(export_weights(model, which="trained"))) == trained
    assert [name for name, _ in export_weights(model, which="changed")] == everything
    assert list(dict(export_weights(model, which="changed"))) == list(changed)


def test_only_what_changed_is_exported_if_asked_for() -> None:
    run_ranks(_chosen, 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"which": "new"}, "which='new'"), ({"scope": "rank"}, "scope='rank'"),
        ({"dtype": torch.float8_e4m3fn}, "quantized=True"), ({"dtype": torch.int8}, "dtype="),
        ({"hf_config": {"model_type": "llama"}}, "hf_config: .* export_hf_weights of Megatron"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named_before_anything_is_gathered(
    one_rank: None, options: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        export_weights(sharded("optim")[0], **options)


def test_a_module_that_is_not_wrapped_is_named() -> None:
    with pytest.raises(ValueError, match="Linear is not wrapped"):
        export_weights(nn.Linear(2, 2))
