"""What a run writes: log lines and JSON lines, on the first rank."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lib.distributed import Place
from lib.options import Options


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch had allocated on the GPU, or the process's resident peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Log:
    """Writes what the options ask for; on ranks other than the first every method does nothing."""

    def __init__(self, options: Options, place: Place, start_iteration: int) -> None:
        self._last, self._on, self._file = options.train_iters, place.first, None
        if self._on and options.loss_log_file is not None:
            self._file = _open_log(Path(options.loss_log_file), start_iteration)

    def line(self, text: str) -> None:
        """A line of the log."""
        if self._on:
            print(text, flush=True)

    def write(self, **record: Any) -> None:
        """A line of the file."""
        if self._file is not None:
            # json writes a float with as many digits as it takes to read the same float back.
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def interval(
        self, iteration: int, rate: float, step: Mapping[str, Any], peak_bytes: float
    ) -> None:
        """After every --log-interval steps: tokens a second since the last one, what the last step
        logged, and the largest peak of any rank."""
        norm = "skipped" if step["grad_norm"] is None else f"{step['grad_norm']:.4f}"
        self.line(
            f"iteration {iteration}/{self._last} | loss {step['loss']:.6f} | grad norm {norm} | "
            f"lr {step['learning_rate']:.3e} | {rate:,.0f} tokens/s | "
            f"peak memory {peak_bytes / 2**30:.2f} GiB"
        )
        self.write(iteration=iteration, tokens_per_second=rate, peak_memory_bytes=int(peak_bytes))

    def close(self) -> None:
        """Finishes the file."""
        if self._file is not None:
            self._file.close()


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
