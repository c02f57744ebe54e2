"""`use_distributed_optimizer` may be left out: training and checkpoints are those with it, bit for
bit. As it was, the DDP config was refused without it, and an optimizer config without it gave an
optimizer that stepped on DTensors."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_fsdp_adapter import FullyShardedDataParallel
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_model,
    ddp_config,
    finalize_model_grads,
    full_all,
    init_megatron,
    optimizer_config,
    train_step,
)
from tests.distributed.launch import run_ranks

CASES = (Case(seed=77, clip=0.3), Case(seed=78, bf16=True, overlap=False, microbatches=2))


def _trainer(case: Case, strategy: str, device: torch.device, said: bool) -> Trainer:
    """`said`: the option is in both configs; else in neither."""
    ddp = ddp_config(case, strategy, {"use_distributed_optimizer": said})
    model = build_model(case, device)
    wrapper = FullyShardedDataParallel(model.config, ddp, model)
    config = optimizer_config(case, use_distributed_optimizer=said)
    optimizer = get_megatron_optimizer(config, [wrapper], use_gloo_process_groups=False)
    wrapper.config.no_sync_func = wrapper.no_sync
    wrapper.config.finalize_model_grads_func = finalize_model_grads
    wrapper.config.grad_scale_func = optimizer.scale_loss
    assert isinstance(optimizer, DistributedOptimizer)
    assert ddp.use_distributed_optimizer and config.use_distributed_optimizer
    return Trainer(case, wrapper, optimizer, strategy)


def _moments(state: Any) -> dict[str, torch.Tensor]:
    """Whole moments by parameter and name, of what the optimizer gives a checkpoint."""
    found = {
        f"{name}.{kind}": value
        for name, kinds in state["state"].items()
        for kind, value in kinds.items()
        if hasattr(value, "_local_tensor")
    }
    assert found
    return full_all(found)


def _compare(rank: int, world: int) -> None:
    device = init_megatron()
    for case in CASES:
        for strategy in STRATEGIES:
            with_it, without = (_trainer(case, strategy, device, said) for said in (True, False))
            for step in range(3):
                data = batches(case, step, rank, device)
                expected, found = train_step(with_it, data), train_step(without, data)
                assert found == expected, f"{case}, {strategy}, step {step}"
            weights = (with_it.params(), without.params())
            # The first is told the form by Megatron-LM's argument, the second by nobody.
            said = {"distrib_optim_sharding_type": "fsdp_dtensor"}
            states = (
                _moments(with_it.optimizer.sharded_state_dict({}, metadata=said)),
                _moments(without.optimizer.sharded_state_dict({}, metadata={})),
            )
            for expected, found in (weights, states):
                assert expected.keys() == found.keys()
                for name, value in expected.items():
                    assert torch.equal(found[name], value), f"{case}, {strategy}: {name}"


def test_without_use_distributed_optimizer_training_is_the_same_bit_for_bit() -> None:
    run_ranks(_compare, 2)


def _announcements(rank: int, world: int) -> list[str]:
    """What two wrappers print, of which the second has nothing to set, and the optimizer."""
    import io
    from contextlib import redirect_stdout

    device = init_megatron()
    case, spoken = Case(num_layers=1), io.StringIO()
    with redirect_stdout(spoken):
        _trainer(case, "optim", device, said=False)
        _trainer(case, "optim", device, said=True)
    starts = ("FullyShardedDataParallel: strategy", "Megatron's optimizer with")
    return [line for line in spoken.getvalue().splitlines() if line.startswith(starts)]


def test_what_is_set_is_printed_once_by_one_rank() -> None:
    first, second = run_ranks(_announcements, 2)
    assert len(first) == 3 and second == []
    assert first[0].endswith("torch.float32; set by the wrapper: use_distributed_optimizer=True")
    assert first[1].startswith("Megatron's optimizer with FullyShardedDataParallel: set for you")
    assert first[2].endswith("gradients reduced in torch.float32"), "what was set before is no news"
