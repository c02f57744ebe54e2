"""Programs on torchtitan, unmodified, on a CPU. For tests only, never for users.

torchrun --nproc-per-node 2 tests/lib/integration/titan_on_cpu.py examples/titan.py
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path

import torch
from torchtitan.tools import utils as tools

tools.device_type = "cpu"  # before the modules that read it are imported
tools.device_module = types.SimpleNamespace(
    **{**vars(torch.cpu), "current_device": lambda: 0},
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=1),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
if not hasattr(torch.distributed, "set_timeout"):
    # Of newer releases of torch. torchtitan shortens timeouts after the first step.
    torch.distributed.set_timeout = lambda timeout, group: None

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
