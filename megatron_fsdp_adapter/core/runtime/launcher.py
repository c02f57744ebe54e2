"""The place of this process among those of its launcher, and how all of them end with one message.
Imports nothing of torch."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

SECONDS_FOR_RANK_0 = 60.0
REPORT = "TORCHELASTIC_ERROR_FILE"
"""The variable that names the file from which torchrun reads a rank's error."""


def is_first_rank(variable: str = "RANK") -> bool:
    """True if this process is the first of all; with "LOCAL_RANK", if it is the first of its host.
    True too if no launcher has started it."""
    return int(os.environ.get(variable, "0")) == 0


def refuse(message: str) -> NoReturn:
    """Ends the process with status 2. Rank 0 first prints `message` and writes it for torchrun's
    final report. Other ranks wait before they end, because torchrun ends all ranks, rank 0 too,
    when one ends."""
    if is_first_rank():
        print(message, file=sys.stderr, flush=True)
        report = os.environ.get(REPORT)
        if report is not None:
            extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
            content = {"message": {"message": message, "extraInfo": extra}}
            Path(report).write_text(json.dumps(content))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(SECONDS_FOR_RANK_0)
    raise SystemExit(2)
