"""Fields in which Transformer Engine's quantized tensors keep their values, and their formats.
Field names are those of TE 2.11 to 2.20."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.params import resharded_class
from megatron_fsdp_adapter.core.engine.partition import ManagedParam
from megatron_fsdp_adapter.core.layout.format import (
    BLOCK128,
    MXFP8,
    PER_TENSOR,
    WeightFormat,
)

from .checks import check_quantizer, check_recipe
from .columns import mx_columns, padded, padded_shape
from .quantizers import make_quantizers
from .weights import QuantizedParams, QuantizedWeight, Quantizers, Views

HIGH_PRECISION = "_high_precision_init_val"
OF_HIGH_PRECISION = (HIGH_PRECISION, "get_high_precision_init_val", "clear_high_precision_init_val")
"""The value before quantization, and two methods of the object: a parameter that was swapped for
another has those of the other one."""
_OF_QUANTIZED = ("_quantizer", "_dtype", "_requires_grad")
"""Annotations that their base class lacks in releases before 2.12."""
VIEWS = "_fsdp_planes"
"""Attribute of a parameter: field -> the view of gathered planes, where a field may be something
else."""

PADDED = "_fsdp_padded"
"""Attribute of a parameter whose padded scales have memory that stays: field -> that."""


@dataclass(frozen=True)
class TensorKind:
    """A class of TE's quantized tensors."""

    # Of the weights.
    format: WeightFormat
    # The field of each plane.
    planes: Mapping[str, str]
    # Fields beside the planes, of which every rank has all.
    scales: tuple[str, ...] = ()
    # What TE derives from planes, with the values that stand for "not there".
    derived: Mapping[str, Any] = field(default_factory=dict)
    # By plane of scales: TE pads its rows and columns to multiples of these.
    padded: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def guarded(self) -> tuple[str, ...]:
        """Fields that hold nothing while weights are not gathered."""
        derived = [name for name in self.derived if name != INVALID]
        return (*self.planes.values(), *derived)


INVALID = "_transpose_invalid"
KINDS = {
    "Float8Tensor": TensorKind(
        PER_TENSOR, {"rowwise": "_data"}, ("_scale_inv",), {"_transpose": None, INVALID: True}
    ),
    "Float8BlockwiseQTensor": TensorKind(
        BLOCK128, {"rowwise": "_rowwise_data"}, ("_rowwise_scale_inv",),
        {"_columnwise_data": None, "_columnwise_scale_inv": None},
    ),
    "MXFP8Tensor": TensorKind(
        MXFP8,
        {
            "rowwise": "_rowwise_data", "rowwise_scales": "_rowwise_scale_inv",
            "columnwise": "_columnwise_data", "columnwise_scales": "_columnwise_scale_inv",
        },
        padded={"rowwise_scales": (128, 4), "columnwise_scales": (4, 128)},
    ),
}  # fmt: skip
UNKNOWN = ("NVFP4Tensor", "HybridQuantizedTensor", "GroupedTensor")
"""TE's other classes of quantized tensors."""

RECIPES = {
    "delayed": PER_TENSOR,
    "float8_current_scaling": PER_TENSOR,
    "float8_block_scaling": BLOCK128,
    "mxfp8": MXFP8,
}
"""Method of TE's recipes that names the kind of a recipe -> the weights that it makes."""


def kind_of(cls: type) -> TensorKind | None:
    """The kind of a class of quantized tensors; None if it is none. NotImplementedError for TE's
    other classes."""
    # torchao has classes of the same names, without this method.
    is_of_te = hasattr(cls, "update_usage") or cls.__module__.startswith("transformer_engine")
    for base in cls.__mro__ if is_of_te else ():
        if base.__name__ in KINDS:
            return KINDS[base.__name__]
        if base.__name__ in UNKNOWN:
            raise NotImplementedError(
                f"weights in Transformer Engine's {base.__name__} are not supported. Use one of "
                f"{sorted(KINDS)}, that is the recipes delayed, tensorwise, blockwise or "
                "mxfp8"
            )
    return None


def format_of(managed: ManagedParam) -> WeightFormat | None:
    """The format in which a parameter is quantized; of one on the meta device, in which it will be
    quantized. None if it is not. NotImplementedError for what is not supported."""
    param = managed.param
    name = managed.fqns[0]
    kind = kind_of(type(param))
    if kind is not None:
        check_quantizer(param, kind.format, name)
        for owner, _ in managed.slots:
            recipe = getattr(owner, "fp8_meta", {}).get("recipe")
            check_recipe(recipe, kind.format, f"parameter {name}")
        return kind.format
    if param.is_meta:
        for owner, slot in managed.slots:
            format = _format_in(owner, slot)
            if format is not None:
                return format
    return None


def _format_in(owner: nn.Module, name: str) -> WeightFormat | None:
    """The format of the parameter `name` of a module whose parameters are made later; None if it
    will not be quantized."""
    init_meta = getattr(owner, "param_init_meta", {}).get(name)
    if init_meta is None or not getattr(owner, "primary_weights_in_fp8", False):
        return None
    if init_meta.fp8_meta_index is None:
        return None
    recipe: Any = owner.fp8_meta["recipe"]  # type: ignore[index]
    where = f"{type(owner).__name__}.{name}"
    found = [format for method, format in RECIPES.items() if getattr(recipe, method)()]
    if len(found) != 1:
        raise NotImplementedError(
            f"{where} will be quantized by {type(recipe).__name__}, which is "
            f"not supported. Use a recipe that is one of {sorted(RECIPES)}"
        )
    (format,) = found
    check_recipe(recipe, format, where)
    return format


def stored_in(param: nn.Parameter) -> list[torch.Tensor]:
    """The tensors that the value of a parameter, quantized or not, is in. They may be written in
    place: what TE derives from them is dropped."""
    kind = kind_of(type(param))
    if kind is None:
        return [param.data]
    for name, value in kind.derived.items():
        setattr(param, name, value)
    planes = [getattr(param, name) for name in kind.planes.values()]
    return [tensor for tensor in (*planes, *scales_of(param)) if tensor is not None]


def attributes_of_class(param: nn.Parameter) -> frozenset[str]:
    """Names of the attributes that a class of quantized tensors keeps on its objects. Every other
    attribute was put there from outside. None for another class."""
    kind = kind_of(type(param))
    if kind is None:
        return frozenset()
    found = {*kind.planes.values(), *kind.scales, *kind.derived, *OF_HIGH_PRECISION}
    found.update(_OF_QUANTIZED)
    for base in type(param).__mro__:
        found.update(inspect.get_annotations(base))
    return frozenset(found)


def memory_of(param: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a parameter's memory is in, quantized or not. They include what TE derives
    from planes, and not the scales that every rank has."""
    kind = kind_of(type(param))
    if kind is None:
        return [param]
    found = [getattr(param, name, None) for name in kind.guarded]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def dequantized(value: Any) -> Any:
    """A quantized tensor as what it stands for, in its nominal dtype; anything else as it is."""
    return value if kind_of(type(value)) is None else value.dequantize()


class TransformerEngineParams(QuantizedParams):
    """The parameters of TE's classes. TE's C++ compares classes exactly, and a guarded parameter
    has another class. So none of TE's functions is called here."""

    def fields(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        kind = _kind(param)
        kept = param.__dict__.get(VIEWS, {})
        if not kept and any(getattr(param, name) is None for name in kind.planes.values()):
            _make_columns(param)
        found = {}
        for plane in kind.format.planes:
            name = kind.planes[plane.name]
            value = kept[name] if name in kept else getattr(param, name)
            shape = plane.shape(tuple(param.shape))
            found[plane.name] = value[tuple(map(slice, shape))]  # without padding
        return found

    def scales(self, param: nn.Parameter) -> list[torch.Tensor]:
        return scales_of(param)

    def high_precision(self, param: nn.Parameter) -> torch.Tensor | None:
        value = param.__dict__.get(HIGH_PRECISION)
        for name in OF_HIGH_PRECISION:
            param.__dict__.pop(name, None)
        return value

    def point(self, param: nn.Parameter, views: Views) -> None:
        kind = _kind(param)
        fields = {name: views[plane] for plane, name in kind.planes.items()}
        for name, view in fields.items():
            setattr(param, name, view)
        if kind.padded:
            setattr(param, VIEWS, fields)
        self.drop_derived(param)
        self._mark_usages(param)

    def prepare(self, param: nn.Parameter) -> None:
        """Sets the fields that TE reads: views of the planes, and padded copies of those scales
        that TE wants in a larger shape."""
        kind = _kind(param)
        self._mark_usages(param)
        views: Views = param.__dict__.get(VIEWS, {})
        if not views:
            return
        for plane in kind.format.planes:
            name = kind.planes[plane.name]
            view = views[name]
            multiples = kind.padded.get(plane.name, (1, 1))
            if padded_shape(view, multiples) != view.shape:
                view = _padded_copy(param, name, view, multiples)
            setattr(param, name, view)

    def keep_padded(self, param: nn.Parameter, kept: bool) -> None:
        if kept:
            param.__dict__.setdefault(PADDED, {})
        else:
            param.__dict__.pop(PADDED, None)

    @staticmethod
    def _mark_usages(param: nn.Parameter) -> None:
        """Marks columns as not used, so that forward does not derive them. Backward derives them
        all the same. Set every time: TE puts another quantizer there when a recipe changes."""
        param._quantizer.set_usage(rowwise=True, columnwise=False)  # type: ignore[attr-defined]

    def drop_derived(self, param: nn.Parameter) -> None:
        views: Views = param.__dict__.get(VIEWS, {})
        for name, value in (*_kind(param).derived.items(), *views.items()):
            setattr(param, name, value)

    def guard_class(self, original: type) -> type:
        kind = kind_of(original)
        assert kind is not None, original
        return resharded_class(original, kind.guarded)

    def quantizers(self, weights: Sequence[QuantizedWeight]) -> Quantizers:
        return make_quantizers(weights)


def _padded_copy(
    param: nn.Parameter, name: str, view: torch.Tensor, multiples: tuple[int, int]
) -> torch.Tensor:
    """A padded copy of scales, for the field of this name: in memory that stays, if it is to."""
    kept = param.__dict__.get(PADDED)
    if kept is None:
        return padded(view, multiples)
    if name not in kept:
        kept[name] = padded(view, multiples)
    else:
        rows, columns = view.shape
        kept[name][:rows, :columns].copy_(view)
    return kept[name]  # type: ignore[no-any-return]


def _make_columns(param: Any) -> None:
    """Makes the columns of an MXFP8 weight. TE leaves them out of one that is made under
    `torch.no_grad()`. ValueError if the value that they are made of is not there."""
    value = param.__dict__.get(HIGH_PRECISION)
    if not isinstance(value, torch.Tensor) or param._rowwise_data is None:
        raise ValueError(
            f"a weight of class {type(param).__name__} and shape {tuple(param.shape)} was made "
            "under torch.no_grad(), without columns and without the value from which they could "
            "be made. Use preserve_high_precision_init_val=True"
        )
    data, scales = mx_columns(value.to(param.dtype), param._rowwise_data)
    multiples = KINDS["MXFP8Tensor"].padded["columnwise_scales"]
    param._columnwise_data = data
    param._columnwise_scale_inv = padded(scales, multiples)


def scales_of(param: nn.Parameter) -> list[torch.Tensor]:
    """Tensors of a quantized parameter, beside its planes, that every rank has: scales, and with
    delayed scaling also the scale of the next cast. `param` may be guarded."""
    found = [getattr(param, name) for name in _kind(param).scales]
    quantizer: Any = param._quantizer  # type: ignore[attr-defined]
    # A quantizer of this class uses a scale of earlier steps, and notes the amax that it sees.
    is_delayed = type(quantizer).__name__ == "Float8Quantizer"
    return [*found, quantizer.scale] if is_delayed else found


def _kind(param: nn.Parameter) -> TensorKind:
    kind = kind_of(type(param))
    assert kind is not None, type(param)
    return kind
