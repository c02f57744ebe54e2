"""Transformer Engine's quantized weights without Transformer Engine: tensor classes of its names,
with its fields, so that `megatron_fsdp_adapter.quantized` takes them for the real ones. Whole
weights are quantized by `arithmetic`. And a linear map that reads such weights as Transformer
Engine's layers do: emulated ones, and those of its own classes (`te_extension`).

TE_RECIPES: the recipes of weights in Transformer Engine's own classes.

Checked against the classes and fields of `pytorch/tensor` of Transformer Engine 2.11 and 2.20. A
write in place into a weight goes to a copy of its values; there are no workspaces and no caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from megatron_fsdp_adapter.quantized import TransformerEngineParams
from megatron_fsdp_adapter.quantized.e4m3 import scales_shape
from megatron_fsdp_adapter.quantized.params import KINDS
from megatron_fsdp_adapter.quantized.weights import QuantizedWeight, Quantizers
from tests.lib.engine.fused_linear import left_to_autograd, taken_early
from tests.lib.quantized import arithmetic as math
from tests.lib.quantized import te_weights
from tests.lib.quantized.te_weights import RECIPES

TE_RECIPES = {f"te {recipe}": recipe for recipe in RECIPES}
PLANES = KINDS["MXFP8Tensor"].planes
"""The field that each plane of MXFP8 is in."""


@dataclass
class EmulatedQuantizer:
    """What a parameter has of how it was made. scale: of the next quantization with delayed
    scaling, from the largest value of those before, amax."""

    recipe: str
    rowwise_usage: bool = True
    columnwise_usage: bool = True
    scale: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    amax: torch.Tensor = field(default_factory=lambda: torch.zeros(1))
    dtype: Any = field(default_factory=lambda: SimpleNamespace(name="kFloat8E4M3"))

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise

    @property
    def force_pow_2_scales(self) -> bool:
        return self.recipe == "block128"

    def roll(self) -> None:
        """What happens at the end of a forward pass with delayed scaling."""
        used = self.amax > 0
        self.scale = torch.where(used, math.scales_of(self.amax), self.scale)
        self.amax = torch.zeros_like(self.amax)


class Float8Quantizer(EmulatedQuantizer):
    """Of delayed scaling, which this name identifies."""


def quantizer_of(recipe: str, **options: Any) -> EmulatedQuantizer:
    return (Float8Quantizer if recipe == "delayed" else EmulatedQuantizer)(recipe, **options)


class EmulatedTensor(torch.Tensor):
    """A weight of nominal dtype whose values are in fields."""

    _quantizer: EmulatedQuantizer

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        quantizer: EmulatedQuantizer,
        fields: Mapping[str, Any],
    ) -> EmulatedTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)  # type: ignore[attr-defined]
        made._quantizer = quantizer
        for name in _names(quantizer):
            setattr(made, name, fields.get(name))
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> Any:
        """Only looked for, by what tells wrappers from other tensors."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            source = args[0]
            fields = {name: getattr(source, name) for name in _names(source._quantizer)}
            return make(source.shape, source.dtype, source._quantizer, fields)

        def plain(value: Any) -> Any:
            if isinstance(value, EmulatedTensor):
                return value.dequantize()
            return value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As a plain tensor."""
        return math.decoded(self).to(self.dtype).to(dtype or self.dtype)

    def update_usage(
        self: Any, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Derives columns that are wanted and missing."""
        derived = _derived(self._quantizer)
        rows = getattr(self, field_of(self._quantizer.recipe, "rowwise"))
        if columnwise_usage and derived and getattr(self, derived) is None:
            setattr(self, derived, rows.t().contiguous())


class Float8Tensor(EmulatedTensor):
    """One scale a weight."""


class Float8BlockwiseQTensor(EmulatedTensor):
    """One scale for 128 x 128 elements."""


class MXFP8Tensor(EmulatedTensor):
    """One scale for 32 elements, along rows and along columns."""


CLASSES: Mapping[str, type[EmulatedTensor]] = {
    "current": Float8Tensor,
    "delayed": Float8Tensor,
    "block128": Float8BlockwiseQTensor,
    "mxfp8": MXFP8Tensor,
}


def field_of(recipe: str, plane: str) -> str:
    return KINDS[CLASSES[recipe].__name__].planes[plane]


def _names(quantizer: EmulatedQuantizer) -> tuple[str, ...]:
    """Fields of a weight."""
    kind = KINDS[CLASSES[quantizer.recipe].__name__]
    return (*kind.planes.values(), *kind.scales, *kind.derived)


def _derived(quantizer: EmulatedQuantizer) -> str | None:
    """The field of columns that are derived; None for planes."""
    return next(iter(KINDS[CLASSES[quantizer.recipe].__name__].derived), None)


def make(
    shape: Sequence[int],
    dtype: torch.dtype,
    quantizer: EmulatedQuantizer,
    fields: Mapping[str, Any],
) -> EmulatedTensor:
    return CLASSES[quantizer.recipe](shape, dtype, quantizer, fields)  # type: ignore[call-arg]


def whole_fields(
    value: torch.Tensor, quantizer: EmulatedQuantizer, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The fields of a whole weight: the reference."""
    weight = value.detach().to(dtype).float()
    recipe = quantizer.recipe
    if recipe == "block128":
        data, inverse = math.block128(weight)
        padded = torch.ones(scales_shape(tuple(weight.shape)))
        padded[:, : inverse.shape[1]] = inverse
        return {"_rowwise_data": data, "_rowwise_scale_inv": padded}
    if recipe == "mxfp8":
        return {PLANES[name]: plane for name, plane in math.mxfp8(weight).items()}
    quantizer.amax.fill_(math.amax_of(weight))
    if recipe == "delayed":
        scale = quantizer.scale
    else:
        scale = math.scales_of(quantizer.amax)
    return {"_data": math.e4m3(weight * scale), "_scale_inv": 1.0 / scale}


def whole_weight(value: torch.Tensor, recipe: str, dtype: torch.dtype) -> Any:
    """A weight in nominal `dtype` that is not sharded, by one of `RECIPES` or `TE_RECIPES`."""
    if recipe in TE_RECIPES:
        return te_weights.te_whole(TE_RECIPES[recipe], value, dtype)
    quantizer = quantizer_of(recipe)
    return make(value.shape, dtype, quantizer, whole_fields(value, quantizer, dtype))


def quantize_whole(param: Any, value: torch.Tensor) -> None:
    """Makes `param`, which is not sharded, what `value` is."""
    if not isinstance(param, EmulatedTensor):
        if hasattr(param._quantizer, "amax"):
            param._quantizer.amax.zero_()  # of two changes without a pass between, the last counts
        return te_weights.te_quantize([param], [value])
    derived = _derived(param._quantizer)
    fields = {} if derived is None else {derived: None}
    for name, made in {**fields, **whole_fields(value, param._quantizer, param.dtype)}.items():
        setattr(param, name, made)


def quantized_parameter(value: torch.Tensor, recipe: str) -> Any:
    """A parameter that keeps the value it was made from, by one of `RECIPES` or `TE_RECIPES`."""
    if recipe in RECIPES:
        return emulated_parameter(value, recipe)
    slots = torch.tensor([100.0, 0.0], device=value.device)
    wants = te_weights.quantizer(TE_RECIPES[recipe], slots)
    return te_weights.te_parameter(value, wants)


def roll(weight: Any) -> None:
    """What happens to delayed scaling at the end of a forward pass."""
    wants = weight._quantizer
    if isinstance(wants, EmulatedQuantizer):
        wants.roll()
    elif type(wants).__name__ == "Float8Quantizer" and wants.amax.item() > 0:
        wants.scale.copy_(torch.tensor(448.0) / wants.amax * 0.9)
        wants.amax.zero_()


def emulated_parameter(value: torch.Tensor, recipe: str) -> nn.Parameter:
    """A parameter that keeps the value it was made from. On a GPU its fields are on the host."""
    quantizer, host = quantizer_of(recipe), value.cpu()
    fields = whole_fields(host, quantizer, value.dtype)
    if recipe == "delayed":
        quantizer.roll()
        fields = whole_fields(host, quantizer, value.dtype)
    quantizer.scale, quantizer.amax = (
        one.to(value.device) for one in (quantizer.scale, quantizer.amax)
    )
    param = nn.Parameter(make(value.shape, value.dtype, quantizer, fields))
    param._high_precision_init_val = value.detach().clone()  # type: ignore[attr-defined]
    return param


class _Linear(torch.autograd.Function):
    """Keeps the parameter object, and reads its fields when it is their turn."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor) -> torch.Tensor:
        quantizer = weight._quantizer
        weight.update_usage(rowwise_usage=True, columnwise_usage=quantizer.columnwise_usage or None)
        if not isinstance(weight, EmulatedTensor):
            assert te_weights.derived(weight) is None, "made in forward"
        ctx.save_for_backward(x, weight)
        ctx.early = taken_early(weight)
        return nn.functional.linear(x, _values(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight.update_usage(columnwise_usage=True)
        flat = grad.flatten(0, -2)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = left_to_autograd(weight, flat.t() @ x.flatten(0, -2), ctx.early)
        of_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ _values(weight, columns=True), of_weight, of_bias


def _values(weight: Any, columns: bool = False) -> torch.Tensor:
    """For forward; of columns, for backward."""
    if not isinstance(weight, EmulatedTensor):
        te_weights.check_padded(weight)
    return math.decoded(weight, columns).to(weight.dtype)


class EmulatedLinear(nn.Module):
    """A linear map over a quantized weight."""

    def __init__(self, linear: nn.Linear, recipe: str) -> None:
        super().__init__()
        self.weight = quantized_parameter(linear.weight, recipe)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-any-return]


def quantize_linears(
    module: nn.Module, recipe: str, chosen: Callable[[str], bool] = lambda name: True
) -> None:
    """Puts quantized linear maps in the place of those below `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and chosen(name):
            frozen = not child.weight.requires_grad
            made = EmulatedLinear(child, recipe)
            made.weight.requires_grad_(not frozen)
            setattr(module, name, made)
        else:
            quantize_linears(child, recipe, chosen)


# What the engine asks, counted.


class CountingParams(TransformerEngineParams):
    """finished: how often quantizers of weights have."""

    finished = 0

    def quantizers(self, weights: Sequence[QuantizedWeight]) -> Quantizers:
        found = super().quantizers(weights)
        for made, _ in found:
            made.finish = functools.partial(self._finished, made.finish)  # type: ignore[method-assign]
        return found

    def _finished(self, finish: Callable[[], None]) -> None:
        self.finished += 1
        finish()
