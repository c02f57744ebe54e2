"""`python -m tests.checkpoint.across ENGINE ACTION ROOT OUT`: one half of test_across_releases.py,
in the interpreter that runs it. Trains a little and saves, or loads, and writes weights, moments
and the losses of the next steps to OUT, as a pickle of arrays."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import megatron.core

from tests.checkpoint.test_bundled_interop import _bundled, _ours
from tests.distributed.launch import run_ranks

STRATEGY = "optim_grads_params"


def half(engine: str, action: str, root: str) -> dict[str, Any]:
    """The bundled engine on one rank, which is where it can save optimizer state; ours on two."""
    if engine == "bundled":
        found = run_ranks(_bundled, 1, action, root, True, timeout=300)[0]
    else:
        found = run_ranks(_ours, 2, action, root, True, STRATEGY, timeout=300)[0]
    return {**found, "release": megatron.core.__version__}


if __name__ == "__main__":
    engine, action, root, out = sys.argv[1:]
    Path(out).write_bytes(pickle.dumps(half(engine, action, root)))
