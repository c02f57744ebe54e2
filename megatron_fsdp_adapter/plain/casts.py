"""Hooks that cast a module's inputs and outputs to the dtype that it computes in, or gives."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def cast_inputs_of(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point tensors in the inputs of `module` to `dtype`, before its other hooks."""
    cast = functools.partial(_cast_inputs, dtype)
    module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)


def cast_outputs_of(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point tensors in the outputs of `module` to `dtype`."""
    module.register_forward_hook(functools.partial(_cast_output, dtype))


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(dtype, (args, kwargs))


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(dtype, output)


def _cast(dtype: torch.dtype, values: Any) -> Any:
    """`values`, of which floating-point tensors are in `dtype`, inside of any containers."""
    return tree_map_only(
        torch.Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, values
    )
