"""A pytest plugin for Megatron-LM's unit test of its own FSDP wrapper, unmodified, with this
package's class in its place.

Without GPUs the ranks are of gloo, on_cpu.py tells its tests about CUDA what it tells
Megatron-LM, and layers are core's own where they switch on Transformer Engine.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))
import on_cpu

from megatron_fsdp_adapter import install
from megatron_fsdp_adapter.launch import cpu_mode

CLASS = "FullyShardedDataParallel"
STEPS = 2
"""Of the 20 that a test trains for, without GPUs: a step has 8 microbatches."""

LOCAL = {
    "transformer_impl": "local",
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
}

ONLY_WITH = {
    r"test_fsdp_(with_process_groups|user_buffer_registration)\[8": "8",
    r"test_fsdp_with_process_groups\[2\]": "2",
}
"""Ranks by patterns of tests that make a grid of so many before they ask how many there are."""


def pytest_configure(config: Any) -> None:
    """Installs, before any test module is imported."""
    if not torch.cuda.is_available():
        _pretend_cuda()
    install()


def _pretend_cuda() -> None:
    on_cpu.prepare_megatron_lm(Path(os.environ["MEGATRON_LM_PATH"]))
    initialize = dist.init_process_group
    move = torch.Tensor.to

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        initialize("gloo", *args, **kwargs)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return move(self, *("cpu" if arg == "cuda" else arg for arg in args), **kwargs)

    dist.init_process_group = init_process_group
    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = lambda self, *unused: self  # type: ignore[method-assign, assignment]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Tests that need other numbers of ranks are skipped; all others see our class."""
    for item in items:
        for pattern, ranks in ONLY_WITH.items():
            if re.search(pattern, item.nodeid) and os.environ["WORLD_SIZE"] != ranks:
                item.add_marker(pytest.mark.skip(reason=f"it needs {ranks} ranks"))
    for module in {item.module for item in items}:
        assert getattr(module, CLASS).__module__.startswith("megatron_fsdp_adapter.")
        if not torch.cuda.is_available():
            _make_small(module)


def _make_small(module: Any) -> None:
    view = on_cpu.training_view()
    view.__dict__["randint"] = cpu_mode._on_host(torch.randint)
    on_cpu.put_views(("tests.unit_tests",))
    vars(module)["torch"] = view
    vars(module)["range"] = lambda number: range(min(number, STEPS))  # of steps, nothing else
    loop = module.TestMegatronFSDPE2E._training_loop
    module.TestMegatronFSDPE2E._training_loop = staticmethod(
        lambda **given: loop(**{**given, **LOCAL})
    )
