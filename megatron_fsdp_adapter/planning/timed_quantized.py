"""Quantized weights of the timed runtime: planes without memory, recorded casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.guard import ReshardedParameter
from megatron_fsdp_adapter.core.layout.format import PER_TENSOR, WeightFormat
from megatron_fsdp_adapter.quantized.weights import QuantizedParams, QuantizedWeight, Quantizers

from .program import Kind
from .timed_runtime import TimedRuntime


class TimedParams(QuantizedParams):
    """Ordinary parameters on the meta device. Casts, and transposes that backward derives, are
    recorded as memory passes."""

    def __init__(self, runtime: TimedRuntime, format: WeightFormat) -> None:
        self._runtime, self._format = runtime, format
        self._derived: set[int] = set()

    def fields(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        shape = tuple(param.shape)
        return {
            plane.name: torch.empty(plane.shape(shape), dtype=plane.dtype, device="meta")
            for plane in self._format.planes
        }

    def scales(self, param: nn.Parameter) -> list[torch.Tensor]:
        return []

    def high_precision(self, param: nn.Parameter) -> torch.Tensor | None:
        return param.detach()

    def point(self, param: nn.Parameter, views: Mapping[str, torch.Tensor]) -> None:
        """No-op: the views are not read."""

    def prepare(self, param: nn.Parameter) -> None:
        is_backward = self._runtime.part == "backward"
        if self._format.has_columns or not is_backward or id(param) in self._derived:
            return
        self._derived.add(id(param))
        self._runtime.write(Kind.MEMORY, 2 * param.numel(), label="transposes of FP8 weights")

    def drop_derived(self, param: nn.Parameter) -> None:
        self._derived.discard(id(param))

    def guard_class(self, original: type) -> type:
        return ReshardedParameter

    def quantizers(self, weights: Sequence[QuantizedWeight]) -> Quantizers:
        return [(TimedQuantizer(self._runtime, self._format, weights), weights)]


class TimedQuantizer:
    """`Quantizer`: records a pass over main weights for amaxes, if ranks exchange them, and one
    that writes planes."""

    def __init__(
        self, runtime: TimedRuntime, format: WeightFormat, weights: Sequence[QuantizedWeight]
    ) -> None:
        self._runtime, self._format, self._weights = runtime, format, tuple(weights)
        agreed = not any("scales" in plane.name for plane in format.planes)
        self.amax_numel = sum(self._maxima(weight) for weight in weights) if agreed else 0

    def _maxima(self, weight: QuantizedWeight) -> int:
        if self._format is PER_TENSOR:
            return 1
        return max(1, weight.param.numel() // 128**2)

    def bind(self, amaxes: torch.Tensor) -> None:
        """No-op: amaxes have no values."""

    def begin(self) -> None:
        if self.amax_numel:
            nbytes = sum(weight.main.nbytes for weight in self._weights)
            self._runtime.write(Kind.MEMORY, nbytes, label="largest values of weights")

    def finish(self) -> None:
        self._write([weight for weight in self._weights if weight.kept])

    def writer(self, weights: Sequence[QuantizedWeight]) -> Callable[[], None]:
        return lambda: self._write(weights)

    def _write(self, weights: Sequence[QuantizedWeight]) -> None:
        nbytes = sum(
            weight.main.nbytes + sum(plane.nbytes for plane in weight.planes.values())
            for weight in weights
        )
        self._runtime.write(Kind.MEMORY, nbytes, label=f"casts to {self._format.name}")
