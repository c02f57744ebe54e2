"""The place of this process among those of its launcher, and how all of them end with one message.
Imports nothing of torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

SECONDS_FOR_RANK_0 = 60.0
REPORT = "TORCHELASTIC_ERROR_FILE"
"""The variable that names the file from which torchrun reads a rank's error."""
TOLD = "megatron_fsdp_adapter.refused"
"""The key that rank 0 puts into the process group's store once it has printed its message."""


def is_first_rank(variable: str = "RANK") -> bool:
    """True if this process is the first of all; with "LOCAL_RANK", if it is the first of its host.
    True too if no launcher has started it."""
    return int(os.environ.get(variable, "0")) == 0


def refuse(message: str) -> NoReturn:
    """Ends the process with status 2. Rank 0 first prints `message` and writes it for torchrun's
    final report.

    Other ranks wait for rank 0 before they end, because torchrun ends all ranks of a host, rank 0
    too, when one ends. If rank 0 does not end meanwhile, it has not refused: they print too."""
    store = _store()
    if is_first_rank():
        _tell(message)
        if store is not None:
            # The store may be gone, and the message is printed.
            with contextlib.suppress(RuntimeError):
                store.set(TOLD, "")
    elif not _rank_0_told(store):
        _tell(message)
    raise SystemExit(2)


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    report = os.environ.get(REPORT)
    if report is not None:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        content = {"message": {"message": message, "extraInfo": extra}}
        Path(report).write_text(json.dumps(content))


def _rank_0_told(store: Any) -> bool:
    """True if rank 0 has printed, as far as this rank can know. Waits for it. store: of `_store`.

    Under torchrun a rank beside rank 0 does not live to the end of this call, if rank 0 ends."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if store is None:
        if by_torchrun:
            # The first of a host is first, and its end is that of the others.
            turns = 1 if is_first_rank("LOCAL_RANK") else 2
            time.sleep(turns * SECONDS_FOR_RANK_0)
        # Another launcher has given all ranks the same command line, which rank 0 refuses too.
        return not by_torchrun
    try:
        store.wait([TOLD], timedelta(seconds=SECONDS_FOR_RANK_0))
    except RuntimeError:  # in vain, or the store ended with rank 0's host
        return False
    if by_torchrun and is_first_rank("GROUP_RANK"):
        time.sleep(SECONDS_FOR_RANK_0)
    return True


def _store() -> Any:
    """The store of the process group of all ranks; None before there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()
