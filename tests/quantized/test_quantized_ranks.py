"""Training with quantized weights on gloo ranks equals one unsharded process, bit for bit: main
weights, bytes and scales after every step. Weights are emulated, or in Transformer Engine's own
classes, whole ones then quantized by its own function; on the engine, and in plain modules."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter import export_weights, fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.core.comm.communicator import Communicator
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.lib.engine.engine_cases import Rig, build
from tests.lib.engine.small_model import Layer, Setup, make_net, microbatch
from tests.lib.quantized.emulated import RECIPES, TE_RECIPES, field_of, roll, whole_fields
from tests.lib.quantized.quantized_cases import PlainQuantizedRig
from tests.lib.quantized.te_checks import same, same_planes
from tests.lib.quantized.te_extension import FOLDERS, RELEASES, WITHOUT, run_te
from tests.lib.quantized.te_models import computed_with
from tests.lib.quantized.te_weights import KNOWS, gathered
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.launch import run_ranks

CHECKS = ("quantized/weights.py", "quantized/quantizers.py", "quantized/e4m3.py")

CPU = torch.device("cpu")


def made(setup: Setup) -> Rig:
    return build(setup, HostRuntime(), lambda group, *_: Communicator(group, CPU))


def forward_backward(rig: Rig, rank: int, microbatches: int, first: int) -> None:
    weights = [param for unit in rig.engine.units for param in unit.quantized]
    for index in range(first, first + microbatches):
        rig.last(index == first + microbatches - 1)
        rig.loss(index + 100 * rank).backward()
        for weight in weights:
            roll(weight)


def whole_mains(engine: FsdpEngine, is_split: bool) -> dict[str, torch.Tensor]:
    """Main weights of all ranks that share them, put together. With a domain of its own a weight
    has other values in the ranks outside."""
    engine.to_sharded()
    own = []
    for pair in engine.pairs:
        rows = pair.group.shards.held.range(pair.index)
        local = pair.sharded._local_tensor.detach().float().reshape(-1)  # type: ignore[attr-defined]
        own.append((pair.managed.fqns[0], rows.start, local))
    sharing = {
        pair.managed.fqns[0]: engine.gather.communicators[pair.group.key.domain].ranks
        for pair in engine.pairs
        if is_split
    }
    found = {pair.managed.fqns[0]: torch.empty(pair.unsharded.shape) for pair in engine.pairs}
    for rank, pieces in enumerate(everyones(own)):
        for name, start, values in pieces:
            if rank not in sharing.get(name, range(dist.get_world_size())):
                continue
            found[name].view(-1)[start : start + values.numel()] = values
    return found


def compare(engine: FsdpEngine, plain: PlainQuantizedRig, when: Any) -> None:
    mains = whole_mains(engine, plain.setup.split)
    expected = plain.weights()
    assert mains.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(mains[name], value), (when, name)
    names = set()
    for name, param in gathered(engine):
        same_planes(param, plain.quantized[name], f"{when}, {name}")
        names.add(name)
    assert names == plain.quantized.keys() != set()


def scales_of(plain: PlainQuantizedRig) -> list[list[float]]:
    params = plain.quantized.values()
    return [
        (KNOWS.scales(p) or [p._rowwise_scale_inv])[0].float().flatten().tolist() for p in params
    ]


def train(setup: Setup, rank: int, when: Any) -> None:
    """Steps of two microbatches; evaluations in the middle of one and after another; a load; a
    step that is skipped."""
    ranks = setup.world
    row = STRATEGIES[setup.strategy]
    rig = made(setup)
    plain = PlainQuantizedRig(setup, ranks, separately=row.shard_grads)
    before = scales_of(plain)
    compare(rig.engine, plain, (*when, "wrapped"))
    for step in range(5):
        rig.zero()
        plain.zero()
        forward_backward(rig, rank, 2, 2 * step)
        plain.forward_backward(2, 2 * step)
        if step == 1:
            assert torch.equal(rig.evaluate(), plain.evaluate()), (*when, "in the middle")
        rig.finish()
        if step != 3:
            rig.optimizer_step()
            plain.optimizer_step()
        if step == 2:
            rig.load()
            plain.load()
        rig.sync(wait=step % 2 == 1)
        assert torch.equal(rig.evaluate(), plain.evaluate()), (*when, step)
        compare(rig.engine, plain, (*when, step))
    # A step that makes no scales is seen. Powers of two of whole blocks change rarely.
    assert "block" in str(setup.recipe) or scales_of(plain) != before, when


def _train(
    rank: int, world: int, pairs: Sequence[tuple[str, str]], options: Mapping[str, Any]
) -> None:
    """pairs: strategies with recipes."""
    for strategy, recipe in pairs:
        train(Setup(strategy, world, rank, recipe=recipe, **options), rank, (recipe, strategy))


def every_strategy(*recipes: str) -> list[tuple[str, str]]:
    return list(itertools.product(STRATEGIES, recipes))


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=pytest.mark.full if one == "block128" else ()) for one in RECIPES],
)
def test_two_ranks_train_as_one_process(recipe):
    run_ranks(_train, 2, every_strategy(recipe), {"layers": 2}, timeout=600)


@pytest.mark.skipif(not FOLDERS, reason=WITHOUT)
@pytest.mark.parametrize("recipe", TE_RECIPES)
@pytest.mark.parametrize("folder", RELEASES)
def test_two_ranks_train_as_one_process_that_te_quantizes(folder: Path, recipe: str) -> None:
    run_te(folder, _train, 2, every_strategy(recipe), {"layers": 2}, timeout=600)


@pytest.mark.full
def test_one_rank_trains_as_one_process():
    run_ranks(_train, 1, every_strategy(*RECIPES), {"layers": 2}, timeout=600)


OPTIONS = {
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "recompute": {"recompute": "non_reentrant"},
    "selective": {"recompute": "selective"},
    "slots": {"slots": True},
    "no overlap": {"overlap": False},
    "transposes kept": {"keep_derived": True},
}


RARE = ("no overlap", "transposes kept", "selective", "slots")
PAIRS = (
    ("optim_grads", "current"), ("optim_grads_params", "delayed"), ("optim_grads_params", "mxfp8"),
)  # fmt: skip


@pytest.mark.parametrize(
    "option", [pytest.param(o, marks=pytest.mark.full if o in RARE else ()) for o in OPTIONS]
)
def test_two_ranks_train_as_one_process_with_options(option):
    pairs = PAIRS[:1] if option == "transposes kept" else PAIRS  # not where weights are sharded
    run_ranks(_train, 2, pairs, {"layers": 3, **OPTIONS[option]}, timeout=600)


def _bytes_are_of_mains(rank: int, world: int, options: Mapping[str, Any]) -> None:
    """More ranks add up in an order of their own: bytes are compared with those of the main
    weights, which all ranks put together."""
    for recipe in RECIPES:
        for strategy in STRATEGIES:
            rig = made(Setup(strategy, world, rank, recipe=recipe, layers=3, **options))
            for step in range(3):
                rig.zero()
                forward_backward(rig, rank, 2, 2 * step)
                rig.finish()
                rig.optimizer_step()
                before = {id(p): p._quantizer.scale for u in rig.engine.units for p in u.quantized}
                mains = whole_mains(rig.engine, rig.setup.split)
                for name, param in gathered(rig.engine):
                    wants = type(param._quantizer)(recipe, scale=before[id(param)])
                    expected = whole_fields(mains[name], wants, param.dtype)
                    rows = rig.quantized.fields(param)["rowwise"]
                    assert torch.equal(rows, expected[field_of(recipe, "rowwise")]), (recipe, name)


PARTS = {"outer": 2, "shard_outer": True}
AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "one axis": (4, {}),
    "two domains": (4, {"split": True}),
    "two instances": (4, {"outer": 2}),
    "instances that hold parts": (4, PARTS),
    "an outer axis of the ranks of one shard": (2, PARTS),
}


@pytest.mark.parametrize(
    "axes", [pytest.param(n, marks=pytest.mark.full if AXES[n][0] > 2 else ()) for n in AXES]
)
def test_bytes_over_any_axes_are_those_of_the_main_weights(axes):
    ranks, options = AXES[axes]
    run_ranks(_bytes_are_of_mains, ranks, options, timeout=900)


def _plain(rank: int, world: int, strategy: str) -> None:
    for recipe in TE_RECIPES:
        label = f"{recipe}, {strategy}"
        setup = Setup(strategy, world, rank, recipe=recipe, layers=2)
        whole = PlainQuantizedRig(setup, world)
        model = fully_shard_model(
            make_net(setup), fsdp_unit_modules=[Layer], data_parallel_sharding_strategy=strategy
        )
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        kinds = {group.key.quantized for group in model.engine.groups}
        assert len(kinds) == 2, "norms are not quantized"
        assert all(pair.sharded.dtype == torch.float32 for pair in model.engine.pairs)
        for step in range(3):
            model(microbatch(step + 100 * rank)).float().square().mean().backward()
            for weight in [param for unit in model.engine.units for param in unit.quantized]:
                roll(weight)
            optimizer.step()
            if step == 2:  # nothing has asked for the last bytes yet
                exported = dict(export_weights(model, quantized=True))
            optimizer.zero_grad()
            whole.zero()
            whole.forward_backward(1, step)
            whole.optimizer_step()
        compare(model.engine, whole, f"{label}, trained")
        for name, value in computed_with(model.engine, TE_RECIPES[recipe]).items():
            same(exported[name].float(), value.float(), f"{label}, {name}, exported")
        if recipe != "te delayed":  # no module of TE's has its scale here
            other = fully_shard_model(
                make_net(setup),
                fsdp_unit_modules=[Layer],
                data_parallel_sharding_strategy="optim_grads_params",
            )
            weights = model.full_state_dict()
            assert all(type(value) is torch.Tensor for value in weights.values())
            other.load_state_dict(weights)
            compare(other.engine, whole, f"{label}, loaded")
    dist.barrier()


@pytest.mark.skipif(not FOLDERS, reason=WITHOUT)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("folder", RELEASES)
def test_a_plain_model_trains_as_one_process_that_te_quantizes(folder: Path, strategy: str) -> None:
    run_te(folder, _plain, 2, strategy)
