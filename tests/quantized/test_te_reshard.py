"""Checkpoints of quantized weights under another split of the model: tensor, pipeline and expert
parallelism on two ranks. Each rank's bytes are what Transformer Engine's function makes of its
whole slice of the main weights; delayed scaling goes with the weights that it is of."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)
from megatron_fsdp_adapter.checkpoint.names import FP8_SCALING
from megatron_fsdp_adapter.checkpoint.training import load_model_state, model_state
from tests.checkpoint.reshard_cases import _global_name, _tensor_parallel, _whole_of
from tests.distributed.gpt import Case, plain_name
from tests.distributed.launch import run_ranks
from tests.distributed.topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    init_topology,
)
from tests.quantized.arithmetic import e4m3
from tests.quantized.te_checks import own_group, same
from tests.quantized.te_extension import FOLDERS, standing_in
from tests.quantized.te_modules import KNOWS
from tests.quantized.te_scaling import LENGTH, quantize_weight, scale_layers, scaled_linears
from tests.quantized.te_weights import quantizer, te_quantize

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
    (DENSE, "pp2", "tp2", "current"), (EXPERTS, "tp2-ep2", "ep2", "blockwise"),
    (DENSE, "tp2", "pp2", "mxfp8"),
]  # fmt: skip
STRATEGY = "optim_grads_params"

pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
)


def made(topology: Topology, recipe: str, rank: int, world: int, seed: int) -> TopologyTrainer:
    init_topology(topology)
    experts = topology.experts is not None
    case = Case(
        num_layers=2, hidden=64, heads=4, ffn=64, vocab=54, seq=8, batch=2, seed=seed,
        tied=not experts, swiglu=experts, bias=not experts,
    )  # fmt: skip
    group = own_group(rank, world)

    def change(model: torch.nn.Module) -> None:
        if recipe == "delayed":
            scale_layers(model, rank, world)
            return
        for module in scaled_linears(model):
            quantize_weight(module, quantizer(recipe, torch.tensor([1.0, 0.0])), group)

    return build_topology_trainer(topology, case, STRATEGY, change)


def whole_weights(trainer: TopologyTrainer) -> dict[str, torch.Tensor]:
    """Main weights of the unsplit model, the same on every rank."""
    mine = [
        (_global_name(trainer, name), _tensor_parallel(name), "weight", value)
        for name, value in trainer.weights().items()
    ]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    whole = _whole_of(everyones, trainer.case.swiglu)
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


def check_bytes(trainer: TopologyTrainer, recipe: str, group: Any, where: str) -> int:
    weights, checked = trainer.weights(), 0
    for number, chunk in enumerate(trainer.chunks):
        engine = chunk.engine
        engine.to_unsharded()
        for unit in engine.units:
            engine.gather.need(unit)
            for entry in [e for g in unit.groups if g.key.quantized for e in g.managed]:
                name, param = f"{number}.{plain_name(entry.fqns[0])}", entry.param
                mine, label = KNOWS.fields(param), f"{where}, {name}"
                if recipe == "delayed":
                    wanted = {"rowwise": e4m3(weights[name] * param._quantizer.scale)}
                else:
                    other: Any = quantizer(recipe, torch.tensor([1.0, 0.0])).make_empty(
                        param.shape, dtype=param.dtype, device="cpu"
                    )
                    te_quantize([other], [weights[name].reshape(-1)], [0], group)
                    wanted = KNOWS.fields(other)
                    scales = zip(KNOWS.scales(param), KNOWS.scales(other), strict=True)
                    for one, two in scales:
                        same(one, two, f"{label}, scales")
                for plane, value in wanted.items():
                    same(mine[plane], value, f"{label}, {plane}")
                checked += 1
            engine.gather.release(unit)
    return checked


def _reshard(rank: int, world: int, folder: str, root: str, way: int) -> None:
    splits, before, after, recipe = WAYS[way]
    with standing_in(Path(folder)):
        group = own_group(rank, world)
        first = made(splits[before], recipe, rank, world, seed=1)
        load_model_state(first.chunks, {k: record_for(k) for k in records_of(first)}, strict=False)
        whole = whole_weights(first)
        save_checkpoint(root, 1, training_state(first.chunks, first.optimizer))
        second = made(splits[after], recipe, rank, world, seed=2)
        state = training_state(second.chunks, second.optimizer, is_loading=True)
        _, state = load_checkpoint(root, state)
        load_training_state(second.chunks, state, second.optimizer)
        where = f"{recipe}, {before} to {after}"
        for name, value in whole_weights(second).items():
            same(value, whole[name], f"{where}, {name}")
        records = records_of(second)
        assert bool(records) == (recipe == "delayed")
        for key, record in records.items():
            same(record, record_for(key), f"{where}, {key}")
        assert check_bytes(second, recipe, group, where) > 0
        dist.barrier()


@pytest.mark.parametrize("way", range(len(WAYS)), ids=lambda way: "-".join(WAYS[way][1:]))
def test_bytes_and_scaling_under_another_split(way: int, tmp_path: Path) -> None:
    run_ranks(_reshard, 2, str(FOLDERS[0]), str(tmp_path), way, timeout=300)
