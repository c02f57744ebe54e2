"""Graphs of whole iterations, which core keeps as long as a process lives."""

from __future__ import annotations

import gc

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader


def forget_graphs() -> None:
    """Core keeps them on the class. A communicator cannot go before the graphs that use it."""
    torch.cuda.synchronize()
    for stage in ("training", "validation"):
        FullCudaGraphWrapper.curr_iteration[stage] = 0
        FullCudaGraphWrapper.cuda_graph[stage] = None
        FullCudaGraphWrapper.result[stage] = None
        StaticBufferLoader.static_buffers[stage] = []
    gc.collect()
