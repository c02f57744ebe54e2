"""`python -m tests.lib.checkpoint.across ENGINE ACTION ROOT OUT`: one half of
test_across_releases.py, in the interpreter that runs it. Trains a little and saves, or loads, and
writes weights, moments and the losses of the next steps to OUT, as a pickle of arrays."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import megatron.core

from tests.lib.checkpoint.interop import half

if __name__ == "__main__":
    engine, action, root, out = sys.argv[1:]
    found = {**half(engine, action, root), "release": megatron.core.__version__}
    Path(out).write_bytes(pickle.dumps(found))
