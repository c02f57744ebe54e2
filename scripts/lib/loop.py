"""The training loop: steps, evaluations, checkpoints, on core's forward-backward schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func

from lib import checkpoints
from lib.checkpoints import Progress
from lib.data import batches, build_datasets
from lib.distributed import Place, largest
from lib.model import Trainee
from lib.options import Options
from lib.report import Reporter, Step, now, peak_memory

Batches = Iterator[dict[str, torch.Tensor]]


def token_loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(summed loss, number of tokens, both of them detached as (2,) fp32) of one microbatch."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    return loss, tokens, torch.stack([loss.detach(), tokens.float()])


def forward_step(
    data: Batches, model: Any, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, Any]:
    """One forward, in the form that core's schedules call; or the model's plan of it, whose parts
    core runs by itself."""
    batch = next(data)
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(token_loss, batch["loss_mask"])


def run_schedule(
    trainee: Trainee, data: Batches, options: Options, forward_only: bool = False
) -> torch.Tensor:
    """Forward (and backward) of one global batch; (2,) fp32: loss and tokens over all ranks."""
    sums = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=[trainee.model],
        num_microbatches=get_num_microbatches(),
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
        forward_only=forward_only,
    )
    total = torch.stack(sums).sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total


def train_step(
    trainee: Trainee, data: Batches, progress: Progress, options: Options
) -> tuple[Step, Progress]:
    """One optimizer step, and how far the run is after it."""
    started = now()
    trainee.model.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    total = run_schedule(trainee, data, options)
    updated, grad_norm, _ = trainee.optimizer.step()
    if updated:
        assert options.global_batch_size is not None
        trainee.scheduler.step(increment=options.global_batch_size)
    loss, tokens = (float(value) for value in total.tolist())
    progress = dataclasses.replace(
        progress,
        iteration=progress.iteration + 1,
        consumed_samples=progress.consumed_samples + (options.global_batch_size or 0),
    )
    step = Step(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        loss=loss / max(tokens, 1.0),
        grad_norm=float(grad_norm) if updated and grad_norm is not None else None,
        learning_rate=get_canonical_lr_for_logging(trainee.optimizer.param_groups) or 0.0,
        seconds=now() - started,
        tokens=(options.global_batch_size or 0) * options.seq_length,
    )
    if options.check_for_nan_in_loss_and_grad:
        _require_finite(step)
    return step, progress


def _require_finite(step: Step) -> None:
    """Raises RuntimeError, on every rank, where training has diverged."""
    if not (math.isfinite(step.loss) and math.isfinite(step.grad_norm or 0.0)):
        raise RuntimeError(
            f"iteration {step.iteration}: loss {step.loss}, gradient norm {step.grad_norm}: lower "
            "--lr, or give --no-check-for-nan-in-loss-and-grad to go on"
        )


def evaluate(trainee: Trainee, data: Batches, options: Options) -> float:
    """Mean loss over --eval-iters global batches of validation data."""
    trainee.model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(options.eval_iters):
            total += run_schedule(trainee, data, options, forward_only=True).double().cpu()
    trainee.model.train()
    loss, tokens = total.tolist()
    return loss / max(tokens, 1.0)


@dataclasses.dataclass(frozen=True)
class Due:
    """What is to be done after a step."""

    log: bool
    evaluate: bool
    save: bool
    stop: bool


def due(iteration: int, options: Options, can_evaluate: bool) -> Due:
    """What follows step `iteration`. The last step is always logged, evaluated and saved."""

    def divides(interval: int | None) -> bool:
        return interval is not None and iteration % interval == 0

    last = iteration >= options.train_iters
    stop = last or divides(options.exit_interval)
    return Due(
        log=stop or divides(options.log_interval),
        evaluate=can_evaluate and (last or divides(options.eval_interval)),
        save=options.save is not None and (stop or divides(options.save_interval)),
        stop=stop,
    )


def train(trainee: Trainee, options: Options, place: Place, progress: Progress) -> Progress:
    """Trains from `progress` to --train-iters or --exit-interval."""
    training, validation = build_datasets(options)
    data = batches(training, progress.consumed_samples, options, place)
    valid_data = None
    if validation is not None:
        valid_data = batches(validation, progress.consumed_valid_samples, options, place)
    with contextlib.closing(Reporter(options, place, progress.iteration)) as reporter:
        while progress.iteration < options.train_iters:
            step, progress = train_step(trainee, data, progress, options)
            reporter.step(step)
            todo = due(progress.iteration, options, valid_data is not None)
            if todo.log:
                reporter.interval(step, largest(peak_memory(place.device), place))
            if todo.evaluate:
                assert valid_data is not None
                reporter.validation(progress.iteration, evaluate(trainee, valid_data, options))
                samples = options.eval_iters * (options.global_batch_size or 0)
                progress = dataclasses.replace(
                    progress,
                    consumed_valid_samples=progress.consumed_valid_samples + samples,
                )
            if todo.save:
                checkpoints.save(trainee, progress, options)
                reporter.line(f"iteration {progress.iteration} | saved to {options.save}")
            if todo.stop:
                break
    return progress
