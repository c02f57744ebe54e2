"""The optimizer in host memory, streamed through the device: the bits of the one without offload,
under every strategy, and stock DDP's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_adapter import release_memory, return_memory
from tests.distributed.checks import (
    Step,
    check_run,
    check_run_bits,
    free_run,
    recorded_step,
)
from tests.distributed.fused_adam import transformer_engine_optimizer
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
    load_weights,
    optimizer_config,
    train_step,
)
from tests.distributed.launch import run_ranks
from tests.distributed.topologies import (
    TOPOLOGIES,
    build_topology_trainer,
    case_for,
    init_topology,
    run_schedule,
    topology_step,
)

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.5, bf16=True)
OFFLOAD = {"chunked_optimizer_state_offload": True}
BF16 = torch.bfloat16

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16 weights": ({}, {}),
    "float32 weights, which have moments alone to offload": ({"bf16": False}, {}),
    "fp16 and a loss scale": ({"fp16": True, "bf16": False}, {}),
    "tied, recomputed": ({"tied": True, "recompute": "full-1"}, {}),
    "no overlap, one microbatch": ({"overlap": False, "microbatches": 1}, {}),
    "bf16 on the wire": ({}, {"megatron_fsdp_grad_comm_dtype": BF16}),
}


def freeze(model: torch.nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("layers.0.mlp" not in name and "norm" not in name)


def _run(trainer: Trainer, rank: int, device: torch.device) -> list[Step]:
    """Weights are read after steps, and after several between which nobody has read any."""
    found = free_run(trainer, rank, 2, device)
    for number in (2, 3):
        loss, norm = train_step(trainer, batches(trainer.case, number, rank, device))
        found.append(Step(loss, norm, {}, {}))
    return [*found, recorded_step(trainer, batches(trainer.case, 4, rank, device))]


def _same_bits(rank: int, world: int, name: str) -> None:
    device = init_megatron()
    changes, ddp = VARIANTS[name]
    case = CASE.but(**changes)
    for strategy in STRATEGIES:
        plain = build_trainer(case, strategy, device, ddp=ddp)
        ours = build_trainer(case, strategy, device, ddp={**ddp, **OFFLOAD})
        check_run_bits(_run(ours, rank, device), _run(plain, rank, device), strategy)
        _check_memory(ours)


def _check_memory(trainer: Trainer) -> None:
    """Between steps nothing that belongs to the optimizer has memory on the device."""
    for group in trainer.wrapper.engine.groups:
        if group.staged is not None:
            assert not group.staged.device_buffer.allocated and group.main is group.staged.host
    shards = distributed_optimizer(trainer).optimizer._fsdp_shards
    buffers = [buffer for stage in shards._stages for buffer in stage.buffers]
    assert buffers and not any(buffer.device_buffer.allocated for buffer in buffers)


@pytest.mark.parametrize("name", ["bf16 weights"])
def test_steps_have_the_bits_of_steps_without_offload(name: str) -> None:
    run_ranks(_same_bits, 2, name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "bf16 weights"])
def test_steps_have_the_bits_of_steps_without_offload_in_variants(name: str) -> None:
    run_ranks(_same_bits, 2, name)


def _fused_and_frozen(rank: int, world: int, changed: dict[str, Any]) -> None:
    """A fused optimizer counts a step in each call, and does not see empty shards; gradients and
    moments in bf16, with a part of the model frozen."""
    device = init_megatron()
    policy = {"megatron_fsdp_main_grads_dtype": BF16}
    moments = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
    for strategy in STRATEGIES:
        runs, steps = [], []
        for ddp in ({}, changed):
            with transformer_engine_optimizer():
                trainer = build_trainer(
                    CASE, strategy, device, change=freeze, ddp={**policy, **ddp},
                    optimizer=lambda config: _precise(config, moments),
                )
            runs.append(free_run(trainer, rank, 3, device))
            steps.append([group["step"] for group in trainer.optimizer.param_groups])
        check_run_bits(runs[1], runs[0], strategy)
        assert steps[0] == steps[1] == [3] * len(steps[0])


def _precise(config: Any, moments: dict[str, Any]) -> Any:
    from tests.distributed.fused_adam import precision_aware

    return precision_aware(config, **moments)


def test_fused_optimizers_with_gradients_and_moments_in_bf16_and_frozen_parameters() -> None:
    run_ranks(_fused_and_frozen, 2, OFFLOAD)


def _like_stock(rank: int, world: int) -> None:
    device, case = init_megatron(), CASE.but(adam_eps=1e-3)
    theirs = free_run(build_trainer(case, None, device), rank, 3, device)
    for strategy in STRATEGIES:
        ours = build_trainer(case, strategy, device, ddp=OFFLOAD)
        check_run(free_run(ours, rank, 3, device), theirs, strategy)


def test_it_trains_like_stock_ddp() -> None:
    run_ranks(_like_stock, 2)


def _between_steps(rank: int, world: int, changed: dict[str, Any]) -> None:
    """Loads reach the weights that modules compute with, at once; a step that is left out changes
    nothing; evaluation changes nothing."""
    device, case = init_megatron(), CASE.but(fp16=True, bf16=False)
    for strategy in STRATEGIES:
        plain, ours = (build_trainer(case, strategy, device, ddp=ddp) for ddp in ({}, changed))
        start = plain.params()
        for trainer in (plain, ours):
            train_step(trainer, batches(case, 0, rank, device))
            load_weights(trainer, start)
        data = batches(case, 1, rank, device)
        assert forward_backward(ours, data, forward_only=True) == forward_backward(
            plain, data, forward_only=True
        )
        check_run_bits([recorded_step(ours, data)], [recorded_step(plain, data)], strategy)
        before = ours.params()
        forward_backward(ours, batches(case, 2, rank, device))
        for param in ours.wrapper.parameters():
            param.grad._local_tensor.fill_(float("inf"))
        assert ours.optimizer.step()[0] is False
        after = ours.params()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert forward_backward(ours, data, forward_only=True) == forward_backward(
            _at(plain, before), data, forward_only=True
        )


def _at(trainer: Trainer, weights: dict[str, torch.Tensor]) -> Trainer:
    load_weights(trainer, weights)
    return trainer


def test_what_is_written_between_steps_is_computed_with() -> None:
    run_ranks(_between_steps, 2, OFFLOAD)


def _released(rank: int, world: int) -> None:
    """Memory goes away between steps, and comes back: weights kept beside main weights are made of
    them again."""
    device = init_megatron()
    for strategy in ("optim", "optim_grads_params"):
        runs = []
        for releases in (False, True):
            trainer = build_trainer(CASE, strategy, device, ddp=OFFLOAD)
            train_step(trainer, batches(CASE, 0, rank, device))
            if releases:
                found = release_memory(trainer.wrapper, trainer.optimizer)
                assert found["optimizer"] == 0 and found["main_weights"] == 0
                return_memory(trainer.wrapper, trainer.optimizer)
            runs.append(recorded_step(trainer, batches(CASE, 1, rank, device)))
        check_run_bits(runs[1:], runs[:1], strategy)


def test_memory_that_is_released_between_steps() -> None:
    run_ranks(_released, 2)


def _hybrid(rank: int, world: int) -> None:
    device = init_megatron(num_distributed_optimizer_instances=2)
    for outer in ("no_shard", "optim"):
        ddp = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer}
        for strategy in ("optim", "optim_grads_params"):
            plain, ours = (
                build_trainer(CASE, strategy, device, ddp={**ddp, **more}) for more in ({}, OFFLOAD)
            )
            check_run_bits(
                free_run(ours, rank, 2, device), free_run(plain, rank, 2, device),
                f"{strategy}, {outer}",
            )


def test_with_instances_that_hold_the_same_shards_or_parts_of_them() -> None:
    run_ranks(_hybrid, 2)


def _topology(
    rank: int, world: int, name: str, strategy: str, changed: dict[str, Any]
) -> None:
    """Model chunks with an optimizer of all of them, experts in a domain of their own."""
    topology = TOPOLOGIES[name]
    init_topology(topology)
    case = case_for(topology, bf16=True)
    runs = []
    for ddp in ({}, changed):
        trainer = build_topology_trainer(topology, case, strategy, ddp=ddp)
        runs.append([])
        for step in range(4):
            if step % 2:
                run_schedule(trainer, step)  # nobody reads weights between this step and the next
                assert trainer.optimizer.step()[0]
            else:
                runs[-1].append(topology_step(trainer, step))
        if ddp:
            units = [unit for chunk in trainer.chunks for unit in chunk.engine.units]
            shards = trainer.optimizer.optimizer._fsdp_shards
            assert 1 < len(shards._stages) <= len(units)
    check_run_bits(runs[1], runs[0], f"{name}, {strategy}")


@pytest.mark.parametrize(
    ("name", "world", "strategy"),
    [
        ("pp2-vpp2", 2, "optim_grads_params"),
        pytest.param("ep2-etp2", 4, "optim", marks=pytest.mark.full),
        pytest.param("ep2-pp2", 4, "optim_grads_params", marks=pytest.mark.full),
        pytest.param("tp2-sp", 4, "optim_grads", marks=pytest.mark.full),
    ],
)
def test_other_axes(name: str, world: int, strategy: str) -> None:
    run_ranks(_topology, world, name, strategy, OFFLOAD)


CORES = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
"""Megatron's own option, which asks for the same."""


def _refused(rank: int, world: int) -> None:
    device = init_megatron()
    with pytest.raises(ValueError, match="Set chunked_optimizer_state_offload=True in the DDP"):
        build_trainer(CASE, "optim", device, optimizer=CORES)
    with pytest.raises(ValueError, match="optimizer_offload_fraction=0.5: .* use 1.0"):
        half = {**CORES, "optimizer_offload_fraction": 0.5}
        build_trainer(CASE, "optim", device, ddp=OFFLOAD, optimizer=half)
    with pytest.raises(ValueError, match="optimizer='sgd' with chunked_optimizer_state_offload"):
        build_trainer(CASE, "optim", device, ddp=OFFLOAD, optimizer={"optimizer": "sgd"})
    config = optimizer_config(CASE)
    config.chunked_optimizer_state_offload = True  # a field of releases to come
    assert build_trainer(CASE, "optim", device, ddp=OFFLOAD, optimizer=lambda _: config).optimizer
    assert config.chunked_optimizer_state_offload is False, "core would offload it once more"


def test_what_it_cannot_do_is_an_early_error() -> None:
    run_ranks(_refused, 1)
