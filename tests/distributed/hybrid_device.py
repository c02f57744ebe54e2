"""Core's optimizer offload on machines without a GPU: the host stands for both memories.

`HybridDeviceOptimizer` asks parameters whether they are on a GPU, and keeps those that are not as
they are. Inside `two_memories` it takes every tensor for one of a GPU, and copies are in the other
memory; streams are those of CPU mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer as core_hybrid

from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron import hybrid_optimizer

_HOST = "_stands_for_host"


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    setattr(copy, _HOST, True)
    return copy


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """The method that chooses what is offloaded, in a world of two memories."""

    def choose(self: Any, offload_fraction: float) -> Any:
        with (
            mock.patch.object(
                torch.Tensor, "is_cuda", property(lambda tensor: not hasattr(tensor, _HOST))
            ),
            mock.patch.object(torch.Tensor, "cpu", _to_host),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        ):
            return original(self, offload_fraction)

    return choose


@contextmanager
def two_memories() -> Iterator[None]:
    """Inside, core's optimizer offloads from the CPU to the CPU."""
    name = "_get_sub_optimizer_param_groups"
    with (
        mock.patch.object(core_hybrid, "torch", cpu_mode.make_view()),
        mock.patch.object(
            HybridDeviceOptimizer, name, _choosing(getattr(HybridDeviceOptimizer, name))
        ),
        mock.patch.object(hybrid_optimizer, "is_on_host", lambda engines: False),
    ):
        yield


def offload(fraction: float = 1.0, overlap: bool = True) -> dict[str, Any]:
    """Fields of an OptimizerConfig."""
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": overlap,
    }
