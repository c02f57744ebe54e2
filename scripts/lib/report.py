"""What a run tells: log lines and JSON lines, on the first rank."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib.distributed import Place
from lib.options import Options

GIB = 2**30


@dataclass(frozen=True)
class Step:
    """One training step. `loss` is the mean over the global batch's tokens; None: not updated."""

    iteration: int
    consumed_samples: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    seconds: float
    tokens: int


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch had allocated on the GPU, or the process's resident peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Reporter:
    """Writes what the options ask for; on ranks other than the first every method does nothing."""

    def __init__(self, options: Options, place: Place, start_iteration: int) -> None:
        self._options = options
        self._on = place.first
        self._log: Any = None
        self._since = (0.0, 0)  # seconds and tokens since the last line
        if self._on and options.loss_log_file is not None:
            self._log = _open_log(Path(options.loss_log_file), start_iteration)

    def line(self, text: str) -> None:
        """A line of the log."""
        if self._on:
            print(text, flush=True)

    def step(self, step: Step) -> None:
        """Called after every step."""
        seconds, tokens = self._since
        self._since = (seconds + step.seconds, tokens + step.tokens)
        record = {
            "iteration": step.iteration,
            "consumed_samples": step.consumed_samples,
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "seconds": step.seconds,
        }
        self._record(record)

    def interval(self, step: Step, peak_bytes: float) -> None:
        """Called after every --log-interval steps, with the largest peak of any rank."""
        seconds, tokens = self._since
        self._since = (0.0, 0)
        rate = tokens / seconds if seconds else 0.0
        norm = "skipped" if step.grad_norm is None else f"{step.grad_norm:.4f}"
        self.line(
            f"iteration {step.iteration}/{self._options.train_iters} | "
            f"samples {step.consumed_samples} | loss {step.loss:.6f} | grad norm {norm} | "
            f"lr {step.learning_rate:.3e} | {rate:,.0f} tokens/s | "
            f"peak memory {peak_bytes / GIB:.2f} GiB"
        )
        self._record(
            {
                "iteration": step.iteration,
                "tokens_per_second": rate,
                "peak_memory_bytes": int(peak_bytes),
            }
        )

    def validation(self, iteration: int, loss: float) -> None:
        """Called after every evaluation."""
        self.line(f"iteration {iteration} | validation loss {loss:.6f}")
        self._record({"iteration": iteration, "validation_loss": loss})

    def close(self) -> None:
        """Finishes the file."""
        if self._log is not None:
            self._log.close()

    def _record(self, record: dict[str, Any]) -> None:
        if self._log is not None:
            # json writes a float with as many digits as it takes to read the same float back.
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()


def _open_log(path: Path, start_iteration: int) -> Any:
    """The log, with the lines up to `start_iteration` if there are any, opened at its end.

    Lines after it are of steps that a resumed run takes again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if start_iteration > 0 and path.is_file():
        lines = path.read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["iteration"] <= start_iteration]
    temporary = path.with_name(path.name + ".new")
    temporary.write_text("".join(line + "\n" for line in kept))
    os.replace(temporary, path)
    return path.open("a")


def now() -> float:
    """Seconds, for differences."""
    return time.perf_counter()
