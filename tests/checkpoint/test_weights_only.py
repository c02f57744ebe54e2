"""A load of weights alone: the next step is that of a fresh optimizer on those weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from launch import run_ranks

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SAVED = "optim_grads_params"


def _adam(trainer: Any) -> dict[Any, Any]:
    from tests.distributed.gpt import distributed_optimizer

    return distributed_optimizer(trainer).optimizer.state


def _made_fresh(trainer: Any) -> None:
    for entry in _adam(trainer).values():
        for value in entry.values():
            getattr(value, "_local_tensor", value).zero_()


def _loaded(trainer: Any, folder: str) -> None:
    """What Megatron does with --no-load-optim: the model, and then `reload_model_params`."""
    state = training_state([trainer.wrapper])
    _, state = load_checkpoint(folder, state, ignore_unexpected=("optimizer.",))
    load_training_state([trainer.wrapper], state)
    trainer.optimizer.reload_model_params()


def _steps(trainer: Any, case: Any, rank: int, device: torch.device) -> list[Any]:
    from tests.distributed.checks import recorded_step
    from tests.distributed.gpt import batches

    trainer.case = case
    return [recorded_step(trainer, batches(case, step, rank, device)) for step in (2, 3)]


def _weights_only(rank: int, size: int, root: str) -> None:
    from tests.distributed.checks import (
        check_loss,
        check_run_bits,
        check_same_bits,
        check_weights,
        passes,
    )
    from tests.distributed.gpt import Case, batches, build_trainer, init_megatron, train_step

    device = init_megatron()
    for name, case in {"fp32": Case(), "bf16": Case(bf16=True, swiglu=True)}.items():
        first = build_trainer(case, SAVED, device)
        for step in (0, 1):
            train_step(first, batches(case, step, rank, device))
        save_checkpoint(f"{root}/{name}", 2, training_state([first.wrapper], first.optimizer))
        weights = first.params()
        went_on = _steps(first, case, rank, device)
        # The same run again, whose optimizer forgets all it knows: bit for bit.
        again = build_trainer(case, SAVED, device)
        for step in (0, 1):
            train_step(again, batches(case, step, rank, device))
        _made_fresh(again)
        expected = _steps(again, case, rank, device)
        assert not passes(check_weights, went_on[0].weights, expected[0].weights, ""), "no power"
        for strategy in STRATEGIES:
            trainer = build_trainer(case.but(seed=4321), strategy, device)
            _loaded(trainer, f"{root}/{name}")
            where = f"{name}, {strategy}"
            check_same_bits(trainer.params(), weights, f"{where}, just loaded")
            steps = _steps(trainer, case, rank, device)
            counts = {float(entry["step"]) for entry in _adam(trainer).values() if "step" in entry}
            assert counts == {2.0}, counts
            if strategy == SAVED:
                check_run_bits(steps, expected, where)
            for mine, theirs in zip(steps, expected, strict=True):
                check_loss(mine.loss, theirs.loss, where)
                check_weights(mine.weights, theirs.weights, where)
        if not case.bf16:
            _stock_agrees(case, weights, expected, rank, device)


def _stock_agrees(
    case: Any, weights: Any, expected: list[Any], rank: int, device: torch.device
) -> None:
    """Stock DDP, made anew around the weights."""
    from tests.distributed.checks import check_weights
    from tests.distributed.gpt import build_trainer

    def with_weights(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights[name])

    stock = build_trainer(case, None, device, change=with_weights)
    for mine, theirs in zip(expected, _steps(stock, case, rank, device), strict=True):
        check_weights(mine.weights, theirs.weights, "stock DDP")


def test_the_next_step_is_that_of_a_fresh_optimizer_on_the_loaded_weights(tmp_path: Path) -> None:
    run_ranks(_weights_only, 2, str(tmp_path), timeout=400)
