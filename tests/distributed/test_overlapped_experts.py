"""Core runs parts of layers (`overlap_moe_expert_parallel_comm`), of two microbatches in turn:
gradients are those of stock DDP under the same schedule."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from megatron_fsdp_adapter.megatron.schedule_plans import problems
from tests.distributed.checks import check_gradients, check_loss, check_step
from tests.distributed.delayed_weights import delay_weight_gradients
from tests.distributed.gpt import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.test_parts_of_layers import gathered_bytes, nbytes
from tests.distributed.topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    run_schedule,
    topology_step,
)
from tests.one_rank import as_one_of_many

OVERLAP = {"overlap_moe_expert_parallel_comm": True, "bf16": True}
KNOWN_BY_DDP = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
EP2 = Topology("ep2", ep=2, experts=4)
PIPELINE = Topology("ep2-pp2-vpp2", ep=2, pp=2, vpp=2, experts=4, aligned=True)


@contextmanager
def host_tensors() -> Iterator[None]:
    """Tensors on the host are on no stream."""
    with mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None):
        yield


def _calls(trainer: TopologyTrainer) -> list[str]:
    """What is called of the layers from here on: whole layers, or parts of them."""
    seen: list[str] = []
    for chunk in trainer.chunks:
        for name, child in chunk.named_modules():
            if name.endswith(("layers.1", "layers.1.self_attention")):
                short = name.rsplit(".", 1)[-1]
                child.register_forward_pre_hook(lambda *_, short=short: seen.append(short))
    return seen


def _compare(
    rank: int, world: int, topology: Topology, options: dict[str, Any], fields: dict[str, Any],
    ddp: dict[str, Any], bound: float = 0.0,
) -> None:
    init_topology(topology)
    case = case_for(topology, bf16=True, **options)
    delays = bool(fields.get("delay_wgrad_compute"))
    with host_tensors():
        plain = {**fields, "delay_wgrad_compute": False}
        reference = build_topology_trainer(topology, case, None, fields={**OVERLAP, **plain})
        made: list[list[str]] = []

        def change(model: nn.Module) -> None:
            made.append(delay_weight_gradients(model) if delays else [])

        ours = {
            strategy: build_topology_trainer(
                topology, case, strategy, change, ddp, {**OVERLAP, **fields}
            )
            for strategy in STRATEGIES
        }
        seen = {strategy: _calls(trainer) for strategy, trainer in ours.items()}
        for step in range(3):
            weights = reference.weights()
            evaluated = run_schedule(reference, step, forward_only=True)
            theirs = topology_step(reference, step)
            for strategy, trainer in ours.items():
                trainer.load(weights)
                seen[strategy].clear()
                mine, label = topology_step(trainer, step), f"{strategy}, step {step}"
                if bound:
                    check_gradients(mine.gradients, theirs.gradients, label, bound)
                    check_loss(mine.loss, theirs.loss, label)
                else:
                    check_step(mine, theirs, label)
                if topology is EP2:
                    assert set(seen[strategy]) == {"self_attention"}, "parts are called"
                trainer.load(weights)
                check_loss(run_schedule(trainer, step, forward_only=True), evaluated, strategy)
        assert not delays or all(made)


@pytest.mark.parametrize("microbatches", (1, 3))
def test_each_step_is_that_of_stock_ddp(microbatches: int) -> None:
    run_ranks(_compare, 2, EP2, {"microbatches": microbatches}, {}, {}, timeout=300)


def test_weight_gradients_that_come_later() -> None:
    """`delay_wgrad_compute`: a layer is reduced behind the last of them."""
    fields = {"delay_wgrad_compute": True}
    ddp = {"delay_wgrad_compute": True} if "delay_wgrad_compute" in KNOWN_BY_DDP else {}
    run_ranks(_compare, 2, EP2, {}, fields, ddp, timeout=300)


PARTS = {"megatron_fsdp_enable_fine_grained_param_gather": True}


@pytest.mark.parametrize("delays", [False, pytest.param(True, marks=pytest.mark.full)])
def test_experts_that_are_units_of_their_own(delays: bool) -> None:
    fields = {"delay_wgrad_compute": delays}
    ddp = {**PARTS, **({name: delays for name in fields if name in KNOWN_BY_DDP})}
    run_ranks(_compare, 2, EP2, {"microbatches": 2}, fields, ddp, timeout=300)


def _gathered(rank: int, world: int) -> None:
    """Of one microbatch, what one pass reads and the next stage; of several, twice that."""
    topology = Topology("ep2 of 12 experts", ep=2, experts=12)
    init_topology(topology)
    for microbatches, passes in ((1, 1), (3, 2)):
        case = case_for(topology, bf16=True, num_layers=6, microbatches=microbatches)
        for ddp in ({}, PARTS):
            with host_tensors():
                with as_one_of_many():  # experts of two ranks are kept whole
                    trainer = build_topology_trainer(
                        topology, case, "optim_grads_params", ddp=ddp, fields=OVERLAP
                    )
                run_schedule(trainer, 0)
                with gathered_bytes(trainer) as taken:
                    run_schedule(trainer, 1)
            units = trainer.chunks[0].engine.units
            experts = sum(nbytes(unit) for unit in units if "layers.1.mlp.experts" in unit.name)
            others = max(nbytes(unit) for unit in units[:-1] if ".experts" not in unit.name)
            assert (experts > others) == (ddp is PARTS), "most of a layer are its experts"
            allowed = nbytes(units[-1]) + passes * (2 * others + experts)
            assert max(taken) <= allowed, (microbatches, ddp, max(taken), others, experts)


@pytest.mark.once
def test_a_pass_gathers_what_it_reads_and_the_next_stage() -> None:
    run_ranks(_gathered, 2, timeout=300)


FIELDS: dict[str, dict[str, Any]] = {
    "shared experts": {"moe_shared_expert_intermediate_size": 20},
    "early release": {"ep_overlap_early_attn_memory_release": True},
}


def _one_unit_of_all_layers(rank: int, world: int) -> None:
    init_topology(EP2)
    case = case_for(EP2, bf16=True)
    with host_tensors():
        reference = build_topology_trainer(EP2, case, None, fields=OVERLAP)
        ours = build_topology_trainer(
            EP2, case, "optim_grads_params", fields=OVERLAP, fsdp_unit_modules=[TransformerBlock]
        )
        reduce, reduced = ours.chunks[0].engine.reduce, Counter[str]()
        original = reduce.backward_done

        def counted(unit: Any, *args: Any) -> None:
            reduced[unit.name] += 1
            original(unit, *args)

        reduce.backward_done = counted
        for step in range(2):
            ours.load(reference.weights())
            check_step(topology_step(ours, step), topology_step(reference, step), f"step {step}")
        assert set(reduced.values()) == {2 * case.microbatches}, reduced


def test_a_unit_that_several_layers_read_is_reduced_once_behind_the_last() -> None:
    run_ranks(_one_unit_of_all_layers, 2, timeout=300)


def test_a_strategy_that_is_unknown_is_left_to_its_own_rule() -> None:
    config = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    ddp = SimpleNamespace(data_parallel_sharding_strategy="zero3", fsdp_double_buffer=True)
    assert problems(config, ddp) == []
    ddp.data_parallel_sharding_strategy = "optim_grads_params"
    assert "fsdp_double_buffer" in problems(config, ddp)[0]


@pytest.mark.full
@pytest.mark.parametrize("ddp", [{}, PARTS], ids=["layers", "parts"])
@pytest.mark.parametrize("name", FIELDS)
def test_each_step_is_that_of_stock_ddp_with_more_options(name: str, ddp: dict[str, Any]) -> None:
    run_ranks(_compare, 2, EP2, {}, FIELDS[name], ddp, timeout=300)


def test_a_tied_weight_has_the_gradients_of_both_uses() -> None:
    """Two graphs make them. Autograd adds them up in bfloat16, which rounds once; stock DDP takes
    each away by itself."""
    run_ranks(_compare, 2, EP2, {"tied": True}, {}, {}, 2**-7, timeout=300)


@pytest.mark.full
@pytest.mark.parametrize("ddp", [{}, PARTS], ids=["layers", "parts"])
def test_each_step_is_that_of_stock_ddp_in_an_interleaved_pipeline(ddp: dict[str, Any]) -> None:
    run_ranks(_compare, 4, PIPELINE, {}, {}, ddp, timeout=600)
