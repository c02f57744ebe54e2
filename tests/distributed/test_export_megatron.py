"""Exports of Megatron models: under every kind of parallelism each rank gets what a checkpoint of
the model has, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_fsdp_adapter import FullyShardedDataParallel, export_shards, export_weights
from megatron_fsdp_adapter.checkpoint.convert.lazy import from_tensor
from megatron_fsdp_adapter.checkpoint.convert.training_state import common_name, join_halves
from megatron_fsdp_adapter.checkpoint.names import split_depth
from megatron_fsdp_adapter.megatron.local_spec import TorchNorm
from megatron_fsdp_adapter.prove.build import wire_schedule
from megatron_fsdp_adapter.quantized.blocks import in_blocks
from tests.distributed.gpt import STRATEGIES, Case, ddp_config, optimizer_config
from tests.distributed.launch import run_ranks
from tests.distributed.test_export_plain import assert_same, from_shards
from tests.distributed.topologies import (
    Topology,
    TopologyTrainer,
    _layer_spec,
    gpt_chunk,
    init_topology,
    model_config,
    run_schedule,
    vary,
)

CASE = Case(
    num_layers=2, hidden=24, heads=4, ffn=44, vocab=54, seq=8, batch=2, microbatches=2,
    swiglu=True, bias=False, adam_eps=1e-3,
)  # fmt: skip

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


def trainer(
    topology: Topology, case: Case, strategy: str, ddp: Mapping[str, Any],
    change: Callable[[torch.nn.Module], Any] = lambda model: None, **wrapper_options: Any,
) -> TopologyTrainer:
    """A Llama, or a Mixtral, with an optimizer. `change` edits each chunk before it is wrapped."""
    config = model_config(
        topology, case, normalization="RMSNorm", num_query_groups=2, bf16=case.bf16
    )
    def layer(with_experts: bool) -> Any:
        return _layer_spec(topology, with_experts=True)

    chunks = []
    for number in range(topology.num_chunks):
        torch.manual_seed(case.seed)
        model_parallel_cuda_manual_seed(case.seed)
        stage = number if topology.vpp else None
        model = gpt_chunk(case, config, stage, layer, TorchNorm)
        vary(model, case.seed, number)
        change(model)
        chunks.append(
            FullyShardedDataParallel(
                config, ddp_config(case, strategy, ddp), model, disable_bucketing=number > 0,
                **wrapper_options,
            )
        )
    optimizer = get_megatron_optimizer(
        optimizer_config(case), chunks, use_gloo_process_groups=False
    )
    for group in optimizer.param_groups:
        group["lr"] = case.lr * group["lr_mult"]
        group["weight_decay"] = case.weight_decay * group["wd_mult"]
    wire_schedule(config, chunks, optimizer, topology.aligned)
    return TopologyTrainer(topology, case, chunks, optimizer, strategy)


def whole_model(run: TopologyTrainer) -> dict[str, torch.Tensor]:
    """What a checkpoint has, whole and of all ranks, by the common names."""
    mine = {}
    for chunk in run.chunks:
        for key, value in chunk.module.checkpoint_state_dict().items():
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                mine[split_depth(key)[1]] = whole.detach()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    lazy = {name: from_tensor(value) for one in told for name, value in one.items()}
    return {common_name(name): value.whole() for name, value in join_halves(lazy).items()}


def _check(run: TopologyTrainer, label: str) -> None:
    topology, chunks = run.topology, run.chunks
    whole = whole_model(run)
    given = chunks if len(chunks) > 1 else chunks[0]
    for dtype in (torch.bfloat16, torch.float32):
        wanted = {name: value.to(dtype) for name, value in whole.items()}
        listed = list(export_weights(given, dtype=dtype))
        assert len(listed) == len(wanted), f"{label}: a name comes twice"
        assert_same(common(listed), wanted, label)
        shards = from_shards(export_shards(given, dtype=dtype))
        assert_same(common(shards.items()), wanted, f"{label} shards")
    stage = common(export_weights(given, dtype=torch.float32, scope="stage"))
    assert_same(stage, {name: whole[name] for name in stage}, f"{label} stage")
    found = dict(export_weights(given, fp8=lambda name: ".linear_" in name))
    for name, value in common(export_weights(given)).items():
        ours = next(one for one in found if common_name(one) == name)
        if ".linear_" in ours and value.dim() == 2:
            stored, scales = in_blocks(value)
            assert torch.equal(found.pop(ours).float(), stored.float()), (label, name)
            assert torch.equal(found.pop(ours + "_scale_inv"), scales), (label, name)
        else:
            assert torch.equal(found.pop(ours), value), (label, name)
    assert not found, (topology.name, list(found))


def common(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By the names that checkpoints of every kind of layers have in common."""
    return {common_name(name): tensor for name, tensor in named}


def _exports(rank: int, world: int, topology: Topology, strategies: Any, instances: int) -> None:
    init_topology(topology, instances)
    case = CASE.but(num_layers=max(2, topology.pp * topology.num_chunks), tied=topology.pp > 1)
    ddp = {"num_distributed_optimizer_instances": instances}
    for strategy in strategies:
        run = trainer(topology, case, strategy, ddp)
        run_schedule(run, 0)
        assert run.optimizer.step()[0]
        _check(run, f"{topology.name} {strategy}")
        run_schedule(run, 1, forward_only=True)
        _check(run, f"{topology.name} {strategy}, behind an evaluation")


@pytest.mark.parametrize("topology", TWO, ids=lambda one: one.name)
def test_two_ranks_export_what_a_checkpoint_has(topology: Topology) -> None:
    run_ranks(_exports, 2, topology, STRATEGIES[2:], 1, timeout=400)


@pytest.mark.full
@pytest.mark.parametrize("topology", TWO + FOUR, ids=lambda one: one.name)
def test_ranks_export_what_a_checkpoint_has(topology: Topology) -> None:
    run_ranks(_exports, 2 if topology in TWO else 4, topology, STRATEGIES, 1, timeout=900)


@pytest.mark.full
def test_instances_export_what_a_checkpoint_has() -> None:
    run_ranks(_exports, 4, Topology("dp4-experts", experts=2), STRATEGIES[2:], 2, timeout=900)


def _placed(rank: int, world: int) -> None:
    topology = Topology("dp2")
    init_topology(topology)
    case = CASE.but(tied=True)

    def freeze(model: torch.nn.Module) -> None:
        model.decoder.layers[0].requires_grad_(False)

    def exported(run: TopologyTrainer, **options: Any) -> dict[str, torch.Tensor]:
        return dict(export_weights(run.chunks[0], dtype=torch.bfloat16, **options))

    def build(**placements: str) -> TopologyTrainer:
        placed = {name.replace("_", "."): place for name, place in placements.items()}
        return trainer(
            topology, case, "optim_grads_params", {}, freeze, module_placements=placed
        )

    plain = exported(build())
    left = build(decoder_layers_0="leave")
    assert_same(exported(left), plain, "left alone")
    assert_same(from_shards(export_shards(left.chunks[0])), plain, "left alone, shards")
    trained = exported(left, which="trained")
    assert trained.keys() == {name for name in plain if ".layers.0." not in name}


def test_modules_that_are_left_alone_are_exported_like_sharded_ones() -> None:
    run_ranks(_placed, 2, timeout=300)
