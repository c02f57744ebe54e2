"""Which fields Transformer Engine's quantised tensors keep their values in, and which format that
is. Field names are those of TE 2.11 to 2.20."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.guard import resharded_class
from megatron_fsdp_adapter.core.engine.partition import ManagedParam
from megatron_fsdp_adapter.core.engine.quantised import QuantisedWeight, Quantiser
from megatron_fsdp_adapter.core.layout.format import (
    BLOCK128,
    MXFP8,
    PER_TENSOR,
    Use,
    WeightFormat,
)

from .quantisers import make_quantiser
from .tables import BLOCK

HIGH_PRECISION = "_high_precision_init_val"
OF_HIGH_PRECISION = (HIGH_PRECISION, "get_high_precision_init_val", "clear_high_precision_init_val")
"""The value before quantisation, and two methods of the object: a parameter that was swapped for
another has those of the other one."""


@dataclass(frozen=True)
class Kind:
    """A class of TE's quantised tensors.

    format: of the weights; planes: the field of each plane; scales: fields that every rank has;
    derived: what TE derives from planes, with the values that stand for "not there".
    """

    format: WeightFormat
    planes: Mapping[str, str]
    scales: tuple[str, ...] = ()
    derived: Mapping[str, Any] = field(default_factory=dict)

    @property
    def guarded(self) -> tuple[str, ...]:
        """Fields that hold nothing while weights are not gathered."""
        return (*self.planes.values(), *(name for name in self.derived if name != INVALID))


INVALID = "_transpose_invalid"
KINDS = {
    "Float8Tensor": Kind(
        PER_TENSOR, {"rowwise": "_data"}, ("_scale_inv",), {"_transpose": None, INVALID: True}
    ),
    "Float8BlockwiseQTensor": Kind(
        BLOCK128, {"rowwise": "_rowwise_data"}, ("_rowwise_scale_inv",),
        {"_columnwise_data": None, "_columnwise_scale_inv": None},
    ),
    "MXFP8Tensor": Kind(
        MXFP8,
        {
            "rowwise": "_rowwise_data", "rowwise_scales": "_rowwise_scale_inv",
            "columnwise": "_columnwise_data", "columnwise_scales": "_columnwise_scale_inv",
        },
    ),
}  # fmt: skip
UNKNOWN = ("NVFP4Tensor", "HybridQuantizedTensor", "GroupedTensor")
"""TE's other classes of quantised tensors."""

RECIPES = {
    "delayed": PER_TENSOR,
    "float8_current_scaling": PER_TENSOR,
    "float8_block_scaling": BLOCK128,
    "mxfp8": MXFP8,
}
"""What a recipe makes of weights, by the method of TE's recipes that says which one it is."""


def kind_of(cls: type) -> Kind | None:
    """None for tensors that are not quantised; NotImplementedError for TE's other classes."""
    for base in cls.__mro__:
        if base.__name__ in KINDS:
            return KINDS[base.__name__]
        if base.__name__ in UNKNOWN:
            raise NotImplementedError(
                f"weights in Transformer Engine's {base.__name__} are not supported; use one of "
                f"{sorted(KINDS)}, that is the recipes delayed, tensorwise, blockwise or mxfp8"
            )
    return None


def format_of(managed: ManagedParam) -> WeightFormat | None:
    """In which format a parameter is quantised, or will be once it is made, if it is on the meta
    device. None if it is not. ValueError, NotImplementedError for what is not supported."""
    param, name = managed.param, managed.fqns[0]
    kind = kind_of(type(param))
    if kind is not None:
        _check_quantizer(param, name)
    format = kind.format if kind is not None else None
    if kind is None and param.is_meta:
        format = next(filter(None, (_format_in(*slot) for slot in managed.slots)), None)
    if format is MXFP8 and any(size % BLOCK for size in param.shape):
        raise ValueError(
            f"parameter {name} of shape {tuple(param.shape)}: its MXFP8 scales would be padded; "
            f"use dimensions that are multiples of {BLOCK}"
        )
    return format


def _check_quantizer(param: nn.Parameter, name: str) -> None:
    quantizer: Any = param._quantizer  # type: ignore[attr-defined]
    dtype, dim = quantizer.dtype.name, getattr(quantizer, "block_scaling_dim", 2)
    if dtype != "kFloat8E4M3" or dim != 2:
        raise NotImplementedError(
            f"parameter {name} is quantised to {dtype} with scales of {dim}-dimensional blocks; "
            "weights are E4M3, in two-dimensional blocks where there are any"
        )


def _format_in(owner: nn.Module, name: str) -> WeightFormat | None:
    """Of the parameter `name` of a module whose parameters are made later."""
    about = getattr(owner, "param_init_meta", {}).get(name)
    if about is None or not getattr(owner, "primary_weights_in_fp8", False):
        return None
    if about.fp8_meta_index is None:
        return None
    recipe: Any = owner.fp8_meta["recipe"]  # type: ignore[index]
    found = [format for method, format in RECIPES.items() if getattr(recipe, method)()]
    if len(found) != 1:
        raise NotImplementedError(
            f"{type(owner).__name__}.{name} will be quantised by {type(recipe).__name__}, which is "
            f"not supported; use a recipe that is one of {sorted(RECIPES)}"
        )
    return found[0]


class TransformerEngineParams:
    """`QuantisedParams` over TE's classes. Its C++ compares classes exactly: a parameter that is
    guarded can be given to none of its functions, and none is called here."""

    def fields(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        return {plane: getattr(param, name) for plane, name in _kind(param).planes.items()}

    def scales(self, param: nn.Parameter) -> list[torch.Tensor]:
        """With the scale that delayed scaling has for the next cast."""
        found = [getattr(param, name) for name in _kind(param).scales]
        quantizer: Any = param._quantizer  # type: ignore[attr-defined]
        return [*found, quantizer.scale] if is_delayed(quantizer) else found

    def high_precision(self, param: nn.Parameter) -> torch.Tensor | None:
        value = param.__dict__.get(HIGH_PRECISION)
        for name in OF_HIGH_PRECISION:
            param.__dict__.pop(name, None)
        return value

    def point(self, param: nn.Parameter, views: Mapping[str, torch.Tensor]) -> None:
        for plane, name in _kind(param).planes.items():
            setattr(param, name, views[plane])
        self.drop_derived(param)
        self.prepare(param, Use.FORWARD)

    def prepare(self, param: nn.Parameter, use: Use) -> None:
        """TE derives the columns of a weight in forward if its quantizer says that they are used,
        and in backward whatever that says. Set every time: TE puts another quantizer there when a
        recipe changes."""
        param._quantizer.set_usage(rowwise=True, columnwise=False)  # type: ignore[attr-defined]

    def drop_derived(self, param: nn.Parameter) -> None:
        for name, value in _kind(param).derived.items():
            setattr(param, name, value)

    def guard_class(self, original: type) -> type:
        kind = kind_of(original)
        assert kind is not None, original
        return resharded_class(original, kind.guarded)

    def quantiser(self, format: WeightFormat, weights: Sequence[QuantisedWeight]) -> Quantiser:
        return make_quantiser(format, weights)


def is_delayed(quantizer: Any) -> bool:
    """Whether it quantises with a scale of earlier steps, and notes what it sees."""
    return type(quantizer).__name__ == "Float8Quantizer"


def _kind(param: nn.Parameter) -> Kind:
    kind = kind_of(type(param))
    assert kind is not None, type(param)
    return kind
