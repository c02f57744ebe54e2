"""Checks of the tests for GPUs, on ranks of the host: models are small, and the modules see the
host in place of CUDA. What a check measures on a device it cannot show so; that its calls are
right, it can. CPU mode was checked with core 0.16.1 to 0.19.2."""

from __future__ import annotations

import sys
from typing import Any

import torch

from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron.compat.patches import ModuleView
from tests.lib.gpt.gpt import Case
from tests.lib.gpu.gpu_ranks import Check

SMALL: dict[str, Any] = {
    "hidden": 32,
    "heads": 4,
    "ffn": 48,
    "vocab": 64,
    "seq": 16,
    "batch": 1,
}

BYTES = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
"""What torch.cuda says of memory: there is none."""


def see_the_host() -> None:
    """For every module of tests/gpu that is loaded."""
    view = cpu_mode.make_view()
    answers = {**cpu_mode.CUDA_ANSWERS, **dict.fromkeys(BYTES, lambda *args: 0)}
    vars(view)["cuda"] = ModuleView(torch.cuda, answers)
    for name, module in list(sys.modules.items()):
        if name.startswith("tests.gpu.test_"):
            for key, value in list(vars(module).items()):
                if isinstance(value, Case):
                    layers = min(value.num_layers, 4)
                    setattr(module, key, value.but(**SMALL, num_layers=layers))
            if vars(module).get("torch") is torch:
                vars(module)["torch"] = view


def run_on_host(rank: int, world: int, check: Check) -> Any:
    """A check that the process which asks has made: ranks' own may have other random numbers."""
    see_the_host()
    return check.function(rank, world, *check.arguments)
