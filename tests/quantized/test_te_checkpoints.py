"""Checkpoints of runs whose weights are in Transformer Engine's classes.

A resume makes the bytes, and takes the steps, of a run that was not stopped; one weight is frozen:
its bytes keep the scale that they were made with. Under another split of the model, on two ranks,
each rank's bytes are what Transformer Engine's function makes of its whole slice of the main
weights; delayed scaling goes with the weights that it is of.
"""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint.training import load_model_state, model_state
from megatron_fsdp_adapter.state.names import FP8_SCALING
from tests.lib.checkpoint.reshard_cases import _tensor_parallel, _whole_of
from tests.lib.gpt.checkpoints import loaded, saved
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
)
from tests.lib.gpt.topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    global_name,
    init_topology,
)
from tests.lib.quantized.arithmetic import e4m3
from tests.lib.quantized.te_checks import same, same_planes
from tests.lib.quantized.te_extension import FOLDERS, RELEASES, WITHOUT, run_te
from tests.lib.quantized.te_scaling import LENGTH, quantize_layers, roll, scale_layers
from tests.lib.quantized.te_weights import KNOWS, gathered, planes_of, te_whole
from tests.lib.ranks.groups import everyones

CHECKS = ("quantized/scaling.py", "state/scaling_records.py", "checkpoint/training.py")

CASE = Case(hidden=32, heads=2, ffn=64, bf16=True, microbatches=2, lr=3e-3)
SAVED = "optim_grads_params"
Bits = dict[str, torch.Tensor]

pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)


def bits_of(trainer: Trainer) -> Bits:
    """Of every quantized weight the gathered bytes and scales; every main weight, whole; and what
    delayed scaling knows."""
    found = trainer.params()
    for name, param in gathered(trainer.wrapper.engine):
        found |= {f"{name}, {key}": value for key, value in planes_of(param).items()}
    state = trainer.wrapper.state_dict_for_save_checkpoint()
    return found | {key: value for key, value in state.items() if key.endswith(FP8_SCALING)}


def steps(trainer: Trainer, first: int, rank: int, device: Any) -> list[Any]:
    """Two of them, with delayed scaling's updates."""
    found = []
    for step in (first, first + 1):
        loss = forward_backward(trainer, batches(CASE, step, rank, device))
        roll(trainer.wrapper)
        assert trainer.optimizer.step()[0]
        found.append(loss)
    return found


def _resume(rank: int, world: int, root: str) -> None:
    device = init_megatron()

    def made(strategy: str, seed: int = CASE.seed, length: int = LENGTH) -> Trainer:
        def change(model: Any) -> None:
            scale_layers(model, length)
            frozen = model.module.decoder.layers[0].self_attention.linear_proj
            frozen.requires_grad_(False)

        trainer = build_trainer(CASE.but(seed=seed), strategy, device, change)
        trainer.case = CASE
        return trainer

    if world == 2:
        first = made(SAVED)
        steps(first, 0, rank, device)
        # Bytes are made when they are needed: here a save comes before that, there after.
        saved(first, f"{root}/before")
        bits = bits_of(first)
        saved(first, f"{root}/after")
        losses = steps(first, 2, rank, device)
        end = bits_of(first)
        # A step that is left out: the bytes have an older scale than the next ones.
        forward_backward(first, batches(CASE, 4, rank, device))
        roll(first.wrapper)
        first.wrapper.stop_communication()
        saved(first, f"{root}/left out")
        torch.save((bits, losses, end, bits_of(first)), f"{root}/{rank}.pt")
        dist.barrier()
    bits, losses, end, left_out = torch.load(f"{root}/0.pt", weights_only=False)
    made_with = [value[0, 1] for name, value in bits.items() if name.endswith(FP8_SCALING)]
    assert len(made_with) == 4 * CASE.num_layers
    assert all(scale > 100 for scale in made_with)
    for strategy in STRATEGIES if world == 2 else (SAVED,):
        for when, expected in (("before", bits), ("after", bits), ("left out", left_out)):
            second = made(strategy, seed=4321)
            # As in a graph: bytes are made at once, by the scales that are loaded.
            if when == "after":
                second.wrapper.engine.quantization.quantize_at_once()
            loaded(second, f"{root}/{when}")
            found = bits_of(second)
            same_planes(found, expected, f"{strategy}, {when}")
            if world == 2 and strategy == SAVED and when != "left out":
                assert steps(second, 2, rank, device) == losses, when
                same_planes(bits_of(second), end, f"two steps after {when}")
    longer = made(SAVED, seed=4321, length=LENGTH + 2)
    loaded(longer, f"{root}/after")
    for name, value in bits_of(longer).items():
        if name.endswith(FP8_SCALING):
            same(value[: LENGTH + 2], bits[name], f"longer, {name}")
            assert not value[LENGTH + 2 :].any()
    dist.barrier()


@pytest.mark.parametrize("folder", RELEASES)
def test_a_resume_with_delayed_scaling_goes_on_as_if_never_stopped(
    folder: Path, tmp_path: Path
) -> None:
    """Two ranks, four strategies; then one rank reads what two have saved."""
    run_te(folder, _resume, 2, str(tmp_path))
    run_te(folder, _resume, 1, str(tmp_path))


DENSE = {
    "dp2": Topology("", sp=False), "tp2": Topology("", tp=2, sp=True),
    "pp2": Topology("", pp=2, aligned=True),
}  # fmt: skip
EXPERTS = {
    "dp2": Topology("", experts=4), "ep2": Topology("", ep=2, experts=4),
    "tp2-ep2": Topology("", tp=2, ep=2, etp=1, sp=True, experts=4),
}  # fmt: skip
WAYS = [
    (EXPERTS, "ep2", "dp2", "delayed"), (EXPERTS, "dp2", "tp2-ep2", "delayed"),
    (DENSE, "tp2", "dp2", "delayed"), (DENSE, "dp2", "pp2", "delayed"),
    (DENSE, "pp2", "tp2", "current"), (EXPERTS, "tp2-ep2", "ep2", "block128"),
    (DENSE, "tp2", "pp2", "mxfp8"),
]  # fmt: skip


def made(topology: Topology, recipe: str, seed: int) -> TopologyTrainer:
    init_topology(topology)
    experts = topology.experts is not None
    case = Case(
        num_layers=2,
        hidden=64,
        heads=4,
        ffn=64,
        vocab=54,
        seq=8,
        batch=2,
        seed=seed,
        tied=not experts,
        swiglu=experts,
        bias=not experts,
    )
    if recipe == "delayed":
        change = scale_layers
    else:
        change = partial(quantize_layers, recipe=f"te {recipe}")
    return build_topology_trainer(topology, case, SAVED, change)


def whole_weights(trainer: TopologyTrainer) -> dict[str, torch.Tensor]:
    """Main weights of the unsplit model, the same on every rank."""
    mine = [
        (global_name(trainer, name), _tensor_parallel(name), "weight", value)
        for name, value in trainer.params().items()
    ]
    whole = _whole_of(everyones(mine), trainer.case.swiglu)
    return {name: entry["weight"] for name, entry in whole.items()}


def record_for(key: str) -> torch.Tensor:
    """Any values, by the name of the weight; its bytes are to be made with the next scale."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    record = torch.rand(2 + LENGTH, 5, generator=generator) + 1
    record[0] *= 300
    record[1] = 0
    return record


def records_of(trainer: TopologyTrainer) -> dict[str, torch.Tensor]:
    state = model_state(trainer.chunks)
    return {key: value for key, value in state.items() if key.endswith(FP8_SCALING)}


def check_bytes(trainer: TopologyTrainer, recipe: str, where: str) -> int:
    weights = trainer.params()
    checked = 0
    for number, chunk in enumerate(trainer.chunks):
        for name, param in gathered(chunk.engine):
            main = weights[f"{number}.{name}"]
            label = f"{where}, {name}"
            if recipe == "delayed":
                rows = KNOWS.fields(param)["rowwise"]
                same(rows, e4m3(main * param._quantizer.scale), label)
            else:
                same_planes(param, te_whole(recipe, main, param.dtype), label)
            checked += 1
    return checked


def _reshard(rank: int, world: int, root: str, way: int) -> None:
    splits, before, after, recipe = WAYS[way]
    first = made(splits[before], recipe, seed=1)
    load_model_state(first.chunks, {k: record_for(k) for k in records_of(first)}, strict=False)
    whole = whole_weights(first)
    saved(first, root)
    second = made(splits[after], recipe, seed=2)
    loaded(second, root)
    where = f"{recipe}, {before} to {after}"
    for name, value in whole_weights(second).items():
        same(value, whole[name], f"{where}, {name}")
    records = records_of(second)
    assert bool(records) == (recipe == "delayed")
    for key, record in records.items():
        same(record, record_for(key), f"{where}, {key}")
    assert check_bytes(second, recipe, where) > 0
    dist.barrier()


@pytest.mark.parametrize("way", range(len(WAYS)), ids=lambda way: "-".join(WAYS[way][1:]))
def test_bytes_and_scaling_under_another_split(way: int, tmp_path: Path) -> None:
    run_te(FOLDERS[0], _reshard, 2, str(tmp_path), way)
