"""Tensors that are gathered by functions of their own, as those of torchao's float8 are."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn

aten = torch.ops.aten
KEPT = {
    aten.empty_like.default, aten.new_zeros.default, aten.slice.Tensor, aten.copy_.default,
    aten.view.default, aten.as_strided.default, aten._to_copy.default, aten.split.Tensor,
    aten.clone.default, aten.detach.default, aten.t.default, aten.fill_.Scalar,
}  # fmt: skip
"""Operators whose results are of the class of what they were given."""


class Wrapper(torch.Tensor):
    """Values in another tensor."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, *more: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor, *more: Any) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        out = func(*given[0], **given[1])
        if func not in KEPT:
            return out
        return pytree.tree_map_only(torch.Tensor, cls, out)


class Rounded(Wrapper):
    """Weights that are sent as 8-bit integers, with a scale for all ranks. The first signature."""

    calls = 0
    """Of `fsdp_pre_all_gather`, on this rank."""
    scale: torch.Tensor | None = None
    """If the program has computed it ahead."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        Rounded.calls += 1
        scale = self.scale
        if scale is None:
            scale = self.inner.abs().max()
            dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = scale / 127
        return ((self.inner / scale).round().to(torch.int8),), (scale,)

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (values,) = gathered
        (scale,) = metadata
        if out is None:
            return RoundedWeight(values, scale, dtype), (values,)
        assert type(out) is RoundedWeight
        assert out.values.data_ptr() == values.data_ptr()
        out.scale = scale
        return None


class RoundedWeight(torch.Tensor):
    """The unsharded weights: integers and a scale, in slots."""

    __slots__ = ["scale", "values"]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.size(), strides=values.stride(), dtype=dtype, device=values.device
        )
        made.values = values
        made.scale = scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
        return cls(inner["values"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.as_strided.default, aten.t.default):
            one, *others = args
            return cls(func(one.values, *others, **(kwargs or {})), one.scale, one.dtype)
        given = pytree.tree_map_only(
            cls, lambda one: one.values.to(one.dtype) * one.scale, (args, kwargs or {})
        )
        return func(*given[0], **given[1])


class Halved(Wrapper):
    """Weights that are sent in bfloat16, padded if rows are uneven. The second signature."""

    seen: tuple[Any, ...] = ()
    """Arguments of the last call on this rank."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        Halved.seen = (mesh.ndim, mesh.size(), outer_size, outer_stride, module, mp_policy)
        rows = math.ceil(outer_size[0] / mesh.size())
        sent = self.inner.new_zeros(rows, *outer_size[1:], dtype=torch.bfloat16)
        sent[: self.inner.size(0)].copy_(self.inner)
        return (sent,), None

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (sent,) = gathered
        if out is None:
            made = sent.to(dtype)
            return made, (sent, made)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(sent[: out.size(0)])
        return None


def wrap(module: nn.Module, kind: type[Wrapper]) -> None:
    """Makes the matrices in `module` ones of `kind`."""
    for owner in module.modules():
        for name, param in list(owner._parameters.items()):
            if param is not None and param.ndim == 2:
                made = nn.Parameter(kind(param.detach()), param.requires_grad)
                owner._parameters[name] = made
