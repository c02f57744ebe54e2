"""The modules of a checkout of Megatron-LM, made ready for short runs of tests: on a CPU
(`on_cpu.py`) and on GPUs (`on_gpu.py`). Nothing is compiled, and nothing is written into it."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import torch

FUSED_KERNELS = "megatron.legacy.fused_kernels"
"""Gone in 0.18."""

MODULES = (
    # of all releases: one that a release does not have is passed over
    "megatron.training",
    "megatron.training.arguments",
    "megatron.training.async_utils",
    "megatron.training.checkpointing",
    "megatron.training.dist_signal_handler",
    "megatron.training.ft_integration",
    "megatron.training.initialize",
    "megatron.training.training",
    "megatron.training.utils",
    "megatron.training.yaml_arguments",
    FUSED_KERNELS,
)


def import_if_there(name: str) -> types.ModuleType | None:
    """A module of Megatron's, None if this release has none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        return None


class WithLatentAttention:
    """Core's attention without Transformer Engine: a call returns one, also of a layer of latent
    attention, which tells it the width of keys and values. Its weights are the layer's, so it
    computes the same; values must be as wide as `--kv-channels`."""

    def __new__(  # type: ignore[misc]
        cls, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any
    ) -> torch.nn.Module:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        return DotProductAttention(*args, **options)


def give_what_local_layers_lack() -> None:
    """Makes layers of latent attention run without Transformer Engine. Core takes what stands in
    for its classes for classes."""
    from megatron.core.models import backends
    from megatron.core.transformer import multi_latent_attention

    if isinstance(multi_latent_attention.TELinear, type):
        return
    multi_latent_attention.HAVE_TE = False
    backends.DotProductAttention = WithLatentAttention


def complete() -> None:
    """Gives the modules, which are imported already, what a machine of tests lacks: compilers, and
    fused kernels."""
    give_what_local_layers_lack()
    from megatron.core import datasets, optimizer
    from megatron.core.datasets import utils as dataset_utils

    # Both build something. The wheel of megatron-core has the helpers; the kernels need nvcc.
    datasets.__path__.extend(
        str(Path(folder, "megatron", "core", "datasets")) for folder in sys.path
    )
    dataset_utils.compile_helpers = lambda: None
    fused_kernels = import_if_there(FUSED_KERNELS)
    if fused_kernels is not None:
        fused_kernels.load = lambda args: None

    if optimizer.Adam.__module__.startswith("torch."):
        # Resuming stock DDP from torch_dist. Megatron-LM has a `tests` of its own.
        sys.path.append(str(Path(__file__).parents[1] / "gpt"))
        importlib.import_module("torch_adam").make_loadable()
