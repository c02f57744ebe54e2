"""The plugin of scripts/peer_tests.sh on a machine without GPUs: gloo ranks, and what on_cpu.py
tells Megatron-LM about CUDA told to its tests as well. They switch on Transformer Engine; here the
layers are core's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))
import on_cpu
import peer_tests
from peer_tests import pytest_runtest_logreport, pytest_unconfigure  # noqa: F401

from megatron_fsdp_adapter.launch import cpu_mode

STEPS = 2
"""Of the 20 that a test trains for: a step has 8 microbatches."""

LOCAL = {
    "transformer_impl": "local",
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
}


def pytest_configure(config: Any) -> None:
    checkout = Path(os.environ["MEGATRON_LM_PATH"])
    on_cpu.prepare_megatron_lm(checkout)
    initialise, move = dist.init_process_group, torch.Tensor.to

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        initialise("gloo", *args, **kwargs)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return move(self, *("cpu" if arg == "cuda" else arg for arg in args), **kwargs)

    dist.init_process_group = init_process_group
    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = lambda self, *unused: self  # type: ignore[method-assign, assignment]
    peer_tests.pytest_configure(config)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    peer_tests.pytest_collection_modifyitems(items)
    for module in {item.module for item in items}:
        view = on_cpu.training_view()
        view.__dict__["randint"] = cpu_mode._on_host(torch.randint)
        on_cpu.put_views(("tests.unit_tests",))
        vars(module)["torch"] = view
        vars(module)["range"] = lambda number: range(min(number, STEPS))  # of steps, nothing else
        loop = module.TestMegatronFSDPE2E._training_loop
        module.TestMegatronFSDPE2E._training_loop = staticmethod(
            lambda loop=loop, **given: loop(**{**given, **LOCAL})
        )
