"""Quantised parameters without Transformer Engine: a tensor class with its fields, a linear map
that reads them as its layers do, and what the engine asks of such a library.

RECIPES: how scales come about. "current" and "delayed" scaling have one format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from megatron_fsdp_adapter.core.engine.guard import resharded_class
from megatron_fsdp_adapter.core.engine.quantised import QuantisedWeight
from megatron_fsdp_adapter.core.layout import BLOCK128, MXFP8, PER_TENSOR, WeightFormat
from tests.quantised import arithmetic as math

RECIPES: Mapping[str, WeightFormat] = {
    "current": PER_TENSOR, "delayed": PER_TENSOR, "block128": BLOCK128, "mxfp8": MXFP8,
}  # fmt: skip

PLANES = {
    "rowwise": "_rowwise_data", "rowwise_scales": "_rowwise_scale_inv",
    "columnwise": "_columnwise_data", "columnwise_scales": "_columnwise_scale_inv",
}  # fmt: skip
"""The field that each plane is in."""
FIELDS = tuple(PLANES.values())


@dataclass
class EmulatedQuantizer:
    """What a parameter knows of how it was made. scale: of the next quantisation with delayed
    scaling, from the largest value of those before."""

    recipe: str
    rowwise_usage: bool = True
    columnwise_usage: bool = True
    scale: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    history: torch.Tensor = field(default_factory=lambda: torch.zeros(1))

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def roll(self) -> None:
        """What happens at the end of a forward pass with delayed scaling."""
        used = self.history > 0
        self.scale = torch.where(used, math.scale_of(self.history), self.scale)


class EmulatedTensor(torch.Tensor):
    """A weight of nominal dtype whose values are in fields."""

    _quantizer: EmulatedQuantizer

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, quantizer: EmulatedQuantizer,
        fields: Mapping[str, torch.Tensor],
    ) -> EmulatedTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)  # type: ignore[attr-defined]
        made._quantizer = quantizer
        for name in FIELDS:
            setattr(made, name, fields.get(name))
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> Any:
        """Only told to those who look for wrappers."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            source = args[0]
            fields = {name: getattr(source, name) for name in FIELDS}
            return EmulatedTensor(source.shape, source.dtype, source._quantizer, fields)

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, EmulatedTensor) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def rowwise(self) -> torch.Tensor:
        """Values for forward: the weight."""
        return decoded(self, "_rowwise_data", "_rowwise_scale_inv").to(self.dtype)

    def columnwise(self) -> torch.Tensor:
        """Values for backward: the weight."""
        if self._quantizer.recipe == "mxfp8":
            return decoded(self, "_columnwise_data", "_columnwise_scale_inv").to(self.dtype)
        values = decoded(self, "_columnwise_data", "_columnwise_scale_inv")
        return values.t().to(self.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As a plain tensor."""
        return self.rowwise().to(dtype or self.dtype)

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Derives what is wanted and missing; RuntimeError if it cannot be derived."""
        if rowwise_usage and self._rowwise_data is None:  # type: ignore[attr-defined]
            raise RuntimeError("the rowwise data are not there")
        if columnwise_usage and self._columnwise_data is None:  # type: ignore[attr-defined]
            if self._quantizer.recipe == "mxfp8":
                raise RuntimeError("the columnwise data are not there")
            self._columnwise_data, self._columnwise_scale_inv = transposed(self)
        if columnwise_usage is False:
            drop_derived(self)


def drop_derived(param: Any) -> None:
    if param._quantizer.recipe != "mxfp8":
        param._columnwise_data = param._columnwise_scale_inv = None


def transposed(param: Any) -> tuple[torch.Tensor, torch.Tensor]:
    data, scales = param._rowwise_data, param._rowwise_scale_inv
    recipe = param._quantizer.recipe
    return data.t().contiguous(), scales.t().contiguous() if recipe == "block128" else scales


def decoded(param: Any, data_field: str, scale_field: str) -> torch.Tensor:
    """float32, in the shape of the data."""
    data, scales = getattr(param, data_field), getattr(param, scale_field)
    recipe = param._quantizer.recipe
    values = math.from_e4m3(data)
    if recipe == "mxfp8":
        along = 1 if data_field == "_rowwise_data" else 0
        return values * math.from_e8m0(scales).repeat_interleave(32, along)
    if recipe == "block128":
        return values * math.spread(scales, (data.shape[0], data.shape[1]), 128, 128)
    return values * scales


def whole_fields(
    value: torch.Tensor, quantizer: EmulatedQuantizer, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The fields of a whole weight: the reference."""
    weight, recipe = math.rounded(value.detach(), dtype), quantizer.recipe
    amax = weight.abs().max().reshape(1)
    if recipe == "block128":
        data, scale_inv = math.block128(weight)
        return {"_rowwise_data": data, "_rowwise_scale_inv": scale_inv}
    if recipe == "mxfp8":
        return {PLANES[name]: plane for name, plane in math.mxfp8(weight).items()}
    scale = quantizer.scale if recipe == "delayed" else math.scale_of(amax)
    quantizer.history.copy_(amax)
    return {"_rowwise_data": math.per_tensor(weight, scale), "_rowwise_scale_inv": 1.0 / scale}


def quantise_whole(param: Any, value: torch.Tensor) -> None:
    """Makes `param`, which is not sharded, what `value` is."""
    drop_derived(param)
    for name, made in whole_fields(value, param._quantizer, param.dtype).items():
        setattr(param, name, made)


def emulated_parameter(value: torch.Tensor, recipe: str) -> nn.Parameter:
    """A parameter that keeps the value it was made from."""
    quantizer = EmulatedQuantizer(recipe)
    fields = whole_fields(value, quantizer, value.dtype)
    if recipe == "delayed":
        quantizer.roll()
        fields = whole_fields(value, quantizer, value.dtype)
    made = EmulatedTensor(value.shape, value.dtype, quantizer, fields)
    param = nn.Parameter(made)
    param._high_precision_init_val = value.detach().clone()  # type: ignore[attr-defined]
    return param


class _Linear(torch.autograd.Function):
    """Keeps the parameter object, and reads its fields when it is their turn."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor) -> torch.Tensor:
        quantizer = weight._quantizer
        weight.update_usage(
            rowwise_usage=True, columnwise_usage=quantizer.columnwise_usage or None
        )
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight.rowwise(), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight.update_usage(columnwise_usage=True)
        flat = grad.flatten(0, -2)
        of_weight = flat.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        of_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight.columnwise(), of_weight, of_bias


class EmulatedLinear(nn.Module):
    """A linear map over a quantised weight."""

    def __init__(self, linear: nn.Linear, recipe: str) -> None:
        super().__init__()
        self.weight = emulated_parameter(linear.weight.detach(), recipe)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-any-return]


# What the engine asks.


class EmulatedParams:
    """`QuantisedParams` of the above. finished: how often quantisers have; written: how often
    planes of a group that does not keep its shard were written."""

    def __init__(self) -> None:
        self.finished, self.written = 0, 0

    def fields(self, param: Any) -> dict[str, torch.Tensor]:
        format = RECIPES[param._quantizer.recipe]
        return {plane.name: getattr(param, PLANES[plane.name]) for plane in format.planes}

    def scales(self, param: Any) -> list[torch.Tensor]:
        if param._quantizer.recipe == "mxfp8":
            return []
        return [vars(param)["_rowwise_scale_inv"]]  # it may be guarded

    def high_precision(self, param: Any) -> torch.Tensor | None:
        return param.__dict__.pop("_high_precision_init_val", None)  # type: ignore[no-any-return]

    def point(self, param: Any, views: Mapping[str, torch.Tensor]) -> None:
        for name, view in views.items():
            setattr(param, PLANES[name], view)
        drop_derived(param)

    def prepare(self, param: Any) -> None:
        param._quantizer.set_usage(rowwise=True, columnwise=False)

    def drop_derived(self, param: Any) -> None:
        drop_derived(param)

    def guard_class(self, original: type) -> type:
        return resharded_class(original, FIELDS)

    def quantiser(
        self, format: WeightFormat, weights: Sequence[QuantisedWeight]
    ) -> EmulatedQuantiser:
        return EmulatedQuantiser(self, weights)


class EmulatedQuantiser:
    """Of rows: no row of another rank is looked at."""

    def __init__(self, owner: EmulatedParams, weights: Sequence[QuantisedWeight]) -> None:
        self._owner, self._weights = owner, list(weights)
        self._counts = [self._maxima(weight) for weight in weights]
        self.amax_numel = sum(self._counts)
        self._amaxes: list[torch.Tensor] = [torch.zeros(0)] * len(weights)

    @staticmethod
    def _maxima(weight: QuantisedWeight) -> int:
        recipe, (rows, columns) = _quantizer(weight).recipe, weight.param.shape
        blocks = math.up(rows, 128) * math.up(columns, 128) // 128**2
        return {"mxfp8": 0, "block128": blocks}.get(recipe, 1)

    def bind(self, amaxes: torch.Tensor) -> None:
        self._amaxes = list(amaxes.split(self._counts))

    def begin(self) -> None:
        for weight, amax in zip(self._weights, self._amaxes, strict=True):
            rows = math.rounded(weight.main, weight.param.dtype)
            if not amax.numel():
                continue
            if not rows.numel():
                amax.zero_()
            elif _quantizer(weight).recipe == "block128":
                shape = (weight.param.shape[0], weight.param.shape[1])
                amax.copy_(math.block_amax(rows, shape, weight.start).view(-1))
            else:
                amax.copy_(rows.abs().max())

    def finish(self) -> None:
        self._owner.finished += 1
        self._scales = [
            self._set_scales(weight, amax)
            for weight, amax in zip(self._weights, self._amaxes, strict=True)
        ]
        for weight in self._weights:
            if weight.kept:
                self._write(weight)

    def writer(self, weights: Sequence[QuantisedWeight]) -> Callable[[], None]:
        def write() -> None:
            self._owner.written += 1
            for weight in weights:
                self._write(weight)

        return write

    def _set_scales(self, weight: QuantisedWeight, amax: torch.Tensor) -> torch.Tensor:
        """What all ranks have beside planes; returns what bytes are made with."""
        quantizer, fields = _quantizer(weight), weight.param.__dict__
        if quantizer.recipe == "mxfp8":
            return amax
        inverse = fields["_rowwise_scale_inv"]
        if quantizer.recipe == "block128":
            scale = math.scale_of(amax, True).view(inverse.shape)
        else:
            scale = quantizer.scale if quantizer.recipe == "delayed" else math.scale_of(amax)
            quantizer.history.copy_(amax)
        inverse.copy_(1.0 / scale)
        return scale

    def _write(self, weight: QuantisedWeight) -> None:
        """This rank's rows of each plane."""
        rows = math.rounded(weight.main, weight.param.dtype)
        scale = self._scales[[own.param is weight.param for own in self._weights].index(True)]
        if not rows.numel():
            return
        for name, made in self._planes(weight, rows, scale).items():
            weight.planes[name].copy_(made)

    def _planes(
        self, weight: QuantisedWeight, rows: torch.Tensor, scale: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        recipe = _quantizer(weight).recipe
        if recipe == "mxfp8":
            return math.mxfp8(rows)
        if recipe == "block128":
            shape = (weight.param.shape[0], weight.param.shape[1])
            first = weight.start // shape[1]
            full = math.spread(scale, shape, 128, 128)[first : first + rows.shape[0]]
            return {"rowwise": math.e4m3(rows * full)}
        return {"rowwise": math.per_tensor(rows, scale)}


def _quantizer(weight: QuantisedWeight) -> EmulatedQuantizer:
    return weight.param.__dict__["_quantizer"]  # type: ignore[no-any-return]


def format_of(managed: Any) -> WeightFormat | None:
    """For `partition`."""
    quantizer = getattr(managed.param, "_quantizer", None)
    return None if quantizer is None else RECIPES[quantizer.recipe]


def quantise_linears(
    module: nn.Module, recipe: str, chosen: Callable[[str], bool] = lambda name: True
) -> None:
    """Puts quantised linear maps in the place of those below `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and chosen(name):
            frozen = not child.weight.requires_grad
            made = EmulatedLinear(child, recipe)
            made.weight.requires_grad_(not frozen)
            setattr(module, name, made)
        else:
            quantise_linears(child, recipe, chosen)


def roll_scales(module: nn.Module) -> None:
    """The end of an outermost autocast, with gradients."""
    for child in module.modules():
        if isinstance(child, EmulatedLinear):
            child._parameters["weight"].__dict__["_quantizer"].roll()  # type: ignore[union-attr]
