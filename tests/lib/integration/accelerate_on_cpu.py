"""Programs on accelerate, unmodified, sharded on a CPU. For tests only, never for users.

    torchrun --nproc-per-node 2 tests/lib/integration/accelerate_on_cpu.py examples/trainer.py ...

accelerate shards on accelerators alone.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from accelerate import state
from accelerate.utils import DistributedType

_initialize = state.AcceleratorState.__init__


def _on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
    """Does for a CPU what accelerate does for accelerators."""
    is_first = not state.AcceleratorState._shared_state
    _initialize(self, *args, **kwargs)
    plugin = kwargs.get("fsdp_plugin")
    if is_first and plugin is not None:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = plugin
        state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)


def _has_a_name(cls: type, value: Any) -> str:
    """In the place of a hash of a data set in memory, which names a file in a cache, and which dill
    cannot make with every pyarrow."""
    return "0" * 16


def prepare() -> None:
    """Makes accelerate shard on the CPU, from now on."""
    state.AcceleratorState.__init__ = _on_cpu
    try:
        from datasets import fingerprint
    except ModuleNotFoundError:
        return  # without TRL
    fingerprint.Hasher.hash = classmethod(_has_a_name)


def run(argv: list[str]) -> None:
    """Runs the program `argv[0]` with the arguments behind it."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).parent)
    prepare()
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
