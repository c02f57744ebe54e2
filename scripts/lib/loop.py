"""The training loop: steps, evaluations, checkpoints, on core's forward-backward schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
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
from lib.report import Log, peak_memory

Batches = Iterator[dict[str, torch.Tensor]]


def token_loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of one microbatch for core's schedules: summed loss, number of tokens, and a (2,)
    fp32 tensor of both, detached."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    return loss, tokens, torch.stack([loss.detach(), tokens.float()])


def forward_step(
    data: Batches, model: Any, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, Any]:
    """Runs one forward for core's schedules; returns the output, and the function of its loss. With
    `return_schedule_plan` the output is the model's plan of the forward, whose parts core runs."""
    batch = next(data)
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(token_loss, batch["loss_mask"])


def run_schedule(
    trainee: Trainee, data: Batches, options: Options, forward_only: bool = False
) -> torch.Tensor:
    """Runs forward (and backward) of one global batch; returns a (2,) fp32 tensor: summed loss and
    number of tokens of all ranks."""
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
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(total, group=group)
    return total


def train_step(trainee: Trainee, data: Batches, options: Options) -> dict[str, Any]:
    """Runs one optimizer step; returns its log. The loss is the mean over all tokens.
    Raises RuntimeError if loss or norm is not finite, unless the options allow that."""
    started = time.perf_counter()
    trainee.model.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    loss, tokens = run_schedule(trainee, data, options).tolist()
    updated, norm, _ = trainee.optimizer.step()
    if updated:
        trainee.scheduler.step(increment=options.global_batch_size)
    mean = loss / max(tokens, 1.0)
    grad_norm = float(norm) if updated and norm is not None else None
    rate = get_canonical_lr_for_logging(trainee.optimizer.param_groups)
    found = {
        "loss": mean,
        "grad_norm": grad_norm,
        "learning_rate": rate or 0.0,
        "seconds": time.perf_counter() - started,
    }
    finite = math.isfinite(mean) and math.isfinite(grad_norm or 0.0)
    if options.check_for_nan_in_loss_and_grad and not finite:
        raise RuntimeError(
            f"loss {mean}, gradient norm {grad_norm}. Lower --lr, or give "
            "--no-check-for-nan-in-loss-and-grad to continue"
        )
    return found


def evaluate(trainee: Trainee, data: Batches, options: Options) -> float:
    """Mean loss over --eval-iters global batches of validation data."""
    trainee.model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(options.eval_iters):
            total += run_schedule(trainee, data, options, forward_only=True).double().cpu()
    trainee.model.train()
    loss, tokens = total.tolist()
    return float(loss / max(tokens, 1.0))


def train(trainee: Trainee, options: Options, place: Place, progress: Progress) -> Progress:
    """Trains from `progress` to --train-iters or --exit-interval; returns the new progress. The
    last step is logged and, if asked for, saved; that of --train-iters is also evaluated."""
    training, validation = build_datasets(options)
    data = batches(training, progress.consumed_samples, options, place)
    valid_data = None
    if validation is not None:
        valid_data = batches(validation, progress.consumed_valid_samples, options, place)
    batch = options.global_batch_size
    seconds = 0.0
    logged = progress.iteration
    with contextlib.closing(Log(options, place, progress.iteration)) as log:
        while progress.iteration < options.train_iters:
            step = train_step(trainee, data, options)
            done = progress.iteration + 1
            progress = dataclasses.replace(
                progress, iteration=done, consumed_samples=progress.consumed_samples + batch
            )
            log.write(iteration=done, consumed_samples=progress.consumed_samples, **step)
            seconds += step["seconds"]
            is_last = done >= options.train_iters
            stop = is_last or _divides(options.exit_interval, done)
            if stop or _divides(options.log_interval, done):
                rate = (done - logged) * batch * options.seq_length / seconds
                log.interval(done, rate, step, largest(peak_memory(place.device), place))
                seconds = 0.0
                logged = done
            if valid_data is not None and (is_last or _divides(options.eval_interval, done)):
                loss = evaluate(trainee, valid_data, options)
                log.line(f"iteration {done} | validation loss {loss:.6f}")
                log.write(iteration=done, validation_loss=loss)
                samples = progress.consumed_valid_samples + options.eval_iters * batch
                progress = dataclasses.replace(progress, consumed_valid_samples=samples)
            if options.save is not None and (stop or _divides(options.save_interval, done)):
                checkpoints.save(trainee, progress, options)
                log.line(f"iteration {done} | saved to {options.save}")
            if stop:
                break
    return progress


def _divides(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0
