"""Exports, bit for bit: of plain modules the tensors of the whole model, in every strategy and
mixture of axes; of Megatron models, under every kind of parallelism, what a checkpoint has. A
bounded number of units exist at a time. That training goes on as if there had been none is the
event "exports" of tests/lib/engine/scenarios.py. Of models whose main weights are in host memory:
test_step_schedules.py."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import (
    export_shards,
    export_weights,
)
from megatron_fsdp_adapter.checkpoint.convert.lazy import from_tensor
from megatron_fsdp_adapter.checkpoint.convert.training_state import common_name, join_halves
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.plain.fully_shard import FullyShardedModel
from megatron_fsdp_adapter.state.names import split_depth
from tests.lib.gpt.gpt import Case
from tests.lib.gpt.memory import live_bytes
from tests.lib.gpt.topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    init_topology,
    run_schedule,
)
from tests.lib.plain.exports import assert_same, mesh_options, sharded, train
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "rollout/export.py",
    "rollout/export_source.py",
    "rollout/unit_copies.py",
    "megatron/wrapper/export_adapter.py",
)

BF16 = torch.bfloat16


def from_shards(shards: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Whole tensors of the blocks of all ranks."""
    mine = [(one.name, one.tensor, one.offsets, one.shape) for one in shards]
    found: dict[str, torch.Tensor] = {}
    for name, block, offsets, shape in itertools.chain(*everyones(mine)):
        place = []
        for offset, length in zip(offsets, block.shape, strict=True):
            place.append(slice(offset, offset + length))
        if name not in found:
            found[name] = torch.full(shape, 99, dtype=block.dtype)
        found[name][tuple(place)] = block
    if "temperature" in found:
        found["temperature"] = found["temperature"].view(())
    return found


# Plain modules.


def expected(model: FullyShardedModel, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """A whole-model gather. Weights that are tied come once."""
    whole = model.full_state_dict()
    whole.pop("head.weight")
    if dtype is None:
        return dict(whole)
    found = {}
    for name, value in whole.items():
        found[name] = value.to(dtype) if value.is_floating_point() else value
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
@on_ranks()
def test_exported_tensors_are_those_of_the_whole_model(world: int, strategy: str) -> None:
    cells = itertools.product(mesh_options(world, strategy), (torch.float32, BF16))
    for options, computes in cells:
        model, optimizer = sharded(strategy, computes, **options)
        for step in range(2):
            train(model, optimizer, step)
            for dtype in (BF16, None):
                label = f"{options} {computes} {dtype} {step}"
                wanted = expected(model, dtype)
                assert_same(dict(export_weights(model, dtype=dtype)), wanted, label)
                assert_same(from_shards(export_shards(model, dtype=dtype)), wanted, label)


@on_ranks(2)
def test_two_units_exist_at_a_time() -> None:
    """The unit at hand and the next one."""
    model, _ = sharded("optim_grads_params")
    sizes = []
    for unit in model.engine.units:
        floats = [group for group in unit.groups if group.key.dtype.is_floating_point]
        sizes.append(sum(2 * group.layout.total_numel for group in floats))
    most = 2 * max(sizes)
    assert sum(sizes) > 1.5 * most
    gc.collect()
    before = live_bytes()
    held = []
    for _, tensor in export_weights(model):
        held.append(live_bytes() - before)
        del tensor
    assert 0 < max(held) <= most


@on_ranks(2)
def test_only_what_changed_is_exported_if_asked_for() -> None:
    model, optimizer = sharded("optim_grads_params")
    everything = [name for name, _ in export_weights(model, which="changed")]
    frozen = {"blocks.1.norm.weight", "blocks.1.norm.bias", "blocks.0.codes"}
    assert {*frozen, "counter"} < set(everything), "nothing had been exported before"
    for step in range(2):
        train(model, optimizer, step)
        model.module.counter.add_(1000)  # as running statistics, or the bias of a router
        changed = dict(export_weights(model, which="changed"))
        assert set(everything) - set(changed) == frozen
        wanted = expected(model, BF16)
        assert_same(changed, {name: wanted[name] for name in changed}, "what is trained")
        assert_same(from_shards(export_shards(model, which="changed")), changed, "shards of it")
    assert "counter" not in {one.name for one in export_shards(model, which="trained")}
    model.load_state_dict(model.state_dict())
    trained = [name for name in changed if name != "counter"]
    assert list(dict(export_weights(model, which="trained"))) == trained
    assert [name for name, _ in export_weights(model, which="changed")] == everything
    assert list(dict(export_weights(model, which="changed"))) == list(changed)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"which": "new"}, "which='new'"), ({"scope": "rank"}, "scope='rank'"),
        ({"dtype": torch.float8_e4m3fn}, "quantized=True"), ({"dtype": torch.int8}, "dtype="),
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


# Megatron models.

CASE = Case(
    num_layers=2,
    hidden=24,
    heads=4,
    ffn=44,
    vocab=54,
    seq=8,
    batch=2,
    microbatches=2,
    swiglu=True,
    bias=False,
    adam_eps=1e-3,
)
TWO = (
    Topology("dp2"), Topology("dp2-experts", experts=4), Topology("tp2", tp=2),
    Topology("tp2-experts", tp=2, sp=True, experts=2, dispatcher="allgather"),
    Topology("ep2", ep=2, experts=4), Topology("pp2", pp=2), Topology("pp2-vpp2", pp=2, vpp=2),
)  # fmt: skip
FOUR = (
    Topology("tp2-pp2", tp=2, pp=2), Topology("ep2-pp2", ep=2, pp=2, experts=4),
    Topology("ep2-dp2", ep=2, experts=4), Topology("tp2-dp2", tp=2),
    Topology("ep2-etp2", tp=2, ep=2, etp=2, sp=True, experts=4, dispatcher="allgather"),
)  # fmt: skip


def gpt(topology: Topology, strategy: str, tied: bool = False, **options: Any) -> TopologyTrainer:
    """A Llama, or a Mixtral of which every second layer has experts, with an optimizer."""
    init_topology(topology)
    layers = max(2, topology.pp * topology.num_chunks)
    case = CASE.but(num_layers=layers, tied=tied or topology.pp > 1)
    return build_topology_trainer(
        topology,
        case,
        strategy,
        fields={"normalization": "RMSNorm", "num_query_groups": 2},
        **options,
    )


def whole_model(run: TopologyTrainer) -> dict[str, torch.Tensor]:
    """What a checkpoint has, whole and of all ranks, by the common names."""
    mine = {}
    for chunk in run.chunks:
        for key, value in chunk.module.checkpoint_state_dict().items():
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                mine[split_depth(key)[1]] = whole.detach()
    lazy = {name: from_tensor(v) for one in everyones(mine) for name, v in one.items()}
    return {common_name(name): value.whole() for name, value in join_halves(lazy).items()}


def common(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By the names that checkpoints of every kind of layers have in common."""
    return {common_name(name): tensor for name, tensor in named}


def _check(run: TopologyTrainer, label: str) -> None:
    """Whole tensors and blocks. Those of a stage, and with instances: cells of the matrix."""
    whole = whole_model(run)
    if len(run.chunks) > 1:
        given = run.chunks
    else:
        given = run.chunks[0]
    for dtype in (BF16, torch.float32):
        wanted = {name: value.to(dtype) for name, value in whole.items()}
        listed = list(export_weights(given, dtype=dtype))
        assert len(listed) == len(wanted), f"{label}: a name comes twice"
        assert_same(common(listed), wanted, label)
        shards = from_shards(export_shards(given, dtype=dtype))
        assert_same(common(shards.items()), wanted, f"{label} shards")


CELLS = []
for world, topologies in ((2, TWO), (4, FOUR)):
    for topology, (strategy, row) in itertools.product(topologies, STRATEGIES.items()):
        marks = pytest.mark.full if world > 2 or not row.shard_grads else ()
        CELLS.append(pytest.param(world, topology, strategy, marks=marks))


@pytest.mark.parametrize(("world", "topology", "strategy"), CELLS)
@on_ranks()
def test_ranks_export_what_a_checkpoint_has(topology: Topology, strategy: str) -> None:
    run = gpt(topology, strategy)
    run_schedule(run, 0)
    assert run.optimizer.step()[0]
    _check(run, "after a step")
    run_schedule(run, 1, forward_only=True)
    _check(run, "behind an evaluation")


@on_ranks(2)
def test_modules_that_are_left_alone_are_exported_like_sharded_ones() -> None:
    def freeze(model: torch.nn.Module) -> None:
        model.decoder.layers[0].requires_grad_(False)

    def built(placements: dict[str, str]) -> Any:
        made = gpt(
            TWO[0], "optim_grads_params", tied=True, change=freeze, module_placements=placements
        )
        return made.chunks[0]

    plain = built({})
    left = built({"decoder.layers.0": "leave"})
    wanted = dict(export_weights(plain, dtype=BF16))
    assert_same(dict(export_weights(left, dtype=BF16)), wanted, "left alone")
    assert_same(from_shards(export_shards(left)), wanted, "left alone, shards")
    trained = dict(export_weights(left, dtype=BF16, which="trained"))
    assert trained.keys() == {name for name in wanted if ".layers.0." not in name}
