"""The output of a run: log lines and JSON lines, on the first rank."""

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
    """Peak bytes allocated by torch on the GPU, or the peak resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Log:
    """Writes the lines of the log and the log file. On ranks other than the first every method is a
    no-op."""

    def __init__(self, options: Options, place: Place, start_iteration: int) -> None:
        self._steps = options.train_iters
        self._writes = place.first
        self._file = None
        if self._writes and options.loss_log_file is not None:
            self._file = _open_log(Path(options.loss_log_file), start_iteration)

    def line(self, text: str) -> None:
        """Writes a line of the log."""
        if self._writes:
            print(text, flush=True)

    def write(self, **record: Any) -> None:
        """Writes a line of the file."""
        if self._file is not None:
            # json writes floats with enough digits to read back the same value.
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def interval(
        self, iteration: int, rate: float, step: Mapping[str, Any], peak_bytes: float
    ) -> None:
        """Logs the steps since the last such line. rate: tokens per second; step: the log of the
        last step; peak_bytes: the largest peak of any rank."""
        norm = "skipped"
        if step["grad_norm"] is not None:
            norm = f"{step['grad_norm']:.4f}"
        whose = ""
        if not torch.cuda.is_available():
            whose = " of the process"  # with Python's and torch's own, about 0.5 GiB
        self.line(
            f"iteration {iteration}/{self._steps} | loss {step['loss']:.6f} | grad norm {norm} | "
            f"lr {step['learning_rate']:.3e} | {rate:,.0f} tokens/s | "
            f"peak memory{whose} {peak_bytes / 2**30:.2f} GiB"
        )
        self.write(iteration=iteration, tokens_per_second=rate, peak_memory_bytes=int(peak_bytes))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _open_log(path: Path, start_iteration: int) -> Any:
    """Opens the log file at its end. Of an earlier run it keeps the lines up to `start_iteration`:
    a resumed run repeats the later steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if start_iteration > 0 and path.is_file():
        lines = path.read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["iteration"] <= start_iteration]
    temporary = path.with_name(path.name + ".new")
    temporary.write_text("".join(line + "\n" for line in kept))
    os.replace(temporary, path)
    return path.open("a")
