"""Casts of a module's inputs and outputs to the dtype that it computes in, or gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors


def cast_inputs_of(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point tensors in the inputs of `module` to `dtype`, before its other hooks
    run. Like these, torch.compile leaves the cast out of its graphs."""
    hook = torch.compiler.disable(lambda module, args, kwargs: cast(dtype, (args, kwargs)))
    module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def cast_outputs_of(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point tensors in the outputs of `module` to `dtype`."""
    hook = torch.compiler.disable(lambda module, args, output: cast(dtype, output))
    module.register_forward_hook(hook)


def cast(dtype: torch.dtype | None, values: Any) -> Any:
    """`values` with all floating-point tensors cast to `dtype`; unchanged if that is None.

    FSDP2's own function looks into containers and dataclasses. Other objects (a cache of keys and
    values, for example) stay the same objects, since the caller may look at them afterwards.
    """
    if dtype is None:
        return values

    def cast_one(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return _apply_to_tensors(cast_one, values)
