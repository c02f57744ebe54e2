"""Transformer Engine's own Python classes and functions on the host, with a stand-in for its
compiled extension that computes what the kernels do, element by element, in torch. Checked against
the Python files of 2.11 and 2.20, which run unmodified, and what they call of the extension.

`TRANSFORMER_ENGINE_PYTHON` names folders, separated as in PATH, that have the Python files of a
release: `transformer_engine/pytorch` of the torch wheel, the rest of the core wheel.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.lib.quantized.arithmetic import amax_of, decoded, e4m3, e8m0, scales_of
from tests.lib.ranks.launch import run_ranks

FOLDERS = tuple(
    Path(folder)
    for folder in os.environ.get("TRANSFORMER_ENGINE_PYTHON", "").split(os.pathsep)
    if folder
)
WITHOUT = "TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
RELEASES = [
    pytest.param(folder, marks=pytest.mark.full if number else (), id=folder.name)
    for number, folder in enumerate(FOLDERS)
]
"""For long tests: the first of them by default."""
OURS = ("transformer_engine", "transformer_engine_torch", "pydantic")


class DType(enum.IntEnum):
    """The members that both releases have."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


@contextmanager
def standing_in(folder: Path) -> Iterator[None]:
    """Inside, Transformer Engine of `folder` can be imported; afterwards it is as it was."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in OURS}
    for name in kept:
        if name.split(".")[0] != "pydantic":
            del sys.modules[name]
    hopper = types.SimpleNamespace(major=9, minor=0)
    try:
        _install(folder)
        with (
            mock.patch.object(torch.cuda, "get_device_properties", lambda device: hopper),
            mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        ):
            _dequantize_on_the_host()
            yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        sys.modules.update(kept)


def run_te(
    folder: Path, fn: Callable[..., Any], world: int, *args: Any, timeout: float = 300.0
) -> list[Any]:
    """As `run_ranks`, with Transformer Engine of `folder` on every rank."""
    return run_ranks(_inside, world, str(folder), fn, *args, timeout=timeout)


def _inside(rank: int, world: int, folder: str, fn: Callable[..., Any], *args: Any) -> Any:
    with standing_in(Path(folder)):
        return fn(rank, world, *args)


def _package(folder: Path, name: str, **members: Any) -> None:
    made = types.ModuleType(name)
    made.__path__ = [str(folder.joinpath(*name.split(".")))]
    made.__dict__.update(members)
    sys.modules[name] = made


def _install(folder: Path) -> None:
    if importlib.util.find_spec("pydantic") is None:
        _package(folder, "pydantic")
        _package(folder, "pydantic.dataclasses", dataclass=dataclasses.dataclass)
    sys.modules["transformer_engine_torch"] = Extension("transformer_engine_torch")
    _package(folder, "transformer_engine")
    common = {"load_framework_extension": lambda name: None, "decode_cudnn_version": divmod}
    _package(folder, "transformer_engine.common", **common)
    _package(folder, "transformer_engine.pytorch")
    # It needs a package for exports, and is asked for names of functions only.
    _package(folder, "transformer_engine.pytorch.onnx_extensions", __getattr__=lambda name: None)


def _dequantize_on_the_host() -> None:
    """2.20 copies these tensors to a GPU for it. The modules go when nothing stands in any more."""
    module = "transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage"
    function = importlib.import_module(module)._FromMXFP8Func
    function.forward = staticmethod(lambda ctx, *given: Extension.dequantize(*given))


class Extension(types.ModuleType):
    """What the tests reach of `transformer_engine_torch`; all else raises when it is called."""

    DType = DType
    Float8BlockScaleTensorFormat = enum.IntEnum(
        "Float8BlockScaleTensorFormat", "COMPACT GEMM_READY INVALID"
    )
    FP8FwdTensors = enum.IntEnum(
        "FP8FwdTensors",
        "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT "
        "GEMM3_WEIGHT GEMM3_OUTPUT",
        start=0,
    )
    FP8BwdTensors = enum.IntEnum(
        "FP8BwdTensors",
        "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
        start=0,
    )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{name} has no stand-in")

        return refuse

    @staticmethod
    def create_empty_quantized_tensor(
        quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pinned: bool
    ) -> Any:
        if type(quantizer).__name__ in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
            from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

            return Float8Tensor(
                shape=shape,
                dtype=dtype,
                data=torch.empty(shape, dtype=torch.uint8),
                fp8_scale_inv=torch.empty(1),
                fp8_dtype=quantizer.dtype,
                quantizer=quantizer,
                data_transpose=torch.empty(shape[::-1], dtype=torch.uint8),
                device=device,
            )
        parts = quantizer.alloc_tensors(shape, device=device)
        context = quantizer.create_metadata(shape, dtype=dtype)
        return context["cls"].__tensor_unflatten__(parts, context, torch.Size(shape), None)

    @staticmethod
    def quantize(source: torch.Tensor, quantizer: Any, target: Any, noop: Any = None) -> Any:
        assert type(quantizer).__name__ == "Float8Quantizer"
        values = source.float()
        target._data.view(-1).copy_(e4m3(values * quantizer.scale).view(-1))
        if quantizer.amax.numel():
            quantizer.amax.fill_(max(quantizer.amax.item(), amax_of(values)))
        return target

    @staticmethod
    def dequantize(param: Any, dtype: Any) -> torch.Tensor:
        return decoded(param).to(param.dtype)

    @staticmethod
    def fp8_transpose(data: torch.Tensor, dtype: Any, *, out: Any = None) -> torch.Tensor:
        if out is None:
            return data.t().contiguous()
        return out.copy_(data.t())  # type: ignore[no-any-return]

    @staticmethod
    def compute_amax(source: torch.Tensor, amax: torch.Tensor) -> None:
        amax.fill_(amax_of(source))

    @staticmethod
    def multi_tensor_scale(size: int, noop: Any, lists: Any, factor: float) -> None:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * factor)

    @staticmethod
    def multi_tensor_compute_scale_and_scale_inv(
        size: int, noop: Any, lists: Any, most: float, powers: bool, epsilon: float
    ) -> None:
        for amax, scale, inverse in zip(*lists, strict=True):
            scale.copy_(scales_of(amax, powers, epsilon).view(scale.shape))
            inverse.copy_(torch.ones_like(scale) / scale)

    @staticmethod
    def fp8_block_scaling_compute_partial_amax(
        source: torch.Tensor, amax: torch.Tensor, h: int, w: int, start: int, block: int
    ) -> None:
        values = torch.zeros(h * w)
        values[start : start + source.numel()] = source.float().nan_to_num(0.0, math.inf, -math.inf)
        for row, line in enumerate(values.view(h, w).split(block)):
            for column, part in enumerate(line.split(block, 1)):
                amax[row, column] = part.abs().max()

    @staticmethod
    def fp8_block_scaling_partial_cast(
        source: torch.Tensor,
        out: torch.Tensor,
        scale: torch.Tensor,
        h: int,
        w: int,
        start: int,
        block: int,
        dtype: Any,
    ) -> None:
        place = torch.arange(start, start + source.numel())
        factors = scale[place // w // block, place % w // block]
        out.copy_(e4m3(source.float() * factors))

    @staticmethod
    def mxfp8_scaling_compute_partial_amax(
        source: torch.Tensor,
        by_row: torch.Tensor,
        by_column: torch.Tensor,
        h: int,
        w: int,
        start: int,
    ) -> None:
        values = torch.zeros(h * w)
        values[start : start + source.numel()] = source.float().nan_to_num(0.0, math.inf, -math.inf)
        values = values.view(h, w).abs()
        by_row[:h, : w // 32] = values.view(h, w // 32, 32).amax(2).to(by_row.dtype)
        by_column[: h // 32, :w] = values.view(h // 32, 32, w).amax(1).to(by_column.dtype)

    @staticmethod
    def multi_tensor_compute_scale_inv_e8m0(size: int, noop: Any, lists: Any) -> None:
        for amax, exponent in zip(*lists, strict=True):
            exponent.copy_(e8m0(amax.float() * torch.tensor(1 / 448)))

    @staticmethod
    def mxfp8_scaling_partial_cast(
        source: torch.Tensor,
        by_row: torch.Tensor,
        by_column: torch.Tensor,
        row_scales: torch.Tensor,
        column_scales: torch.Tensor,
        h: int,
        w: int,
        start: int,
    ) -> None:
        place = torch.arange(start, start + source.numel())
        row = place // w
        column = place % w
        for out, exponents in (
            (by_row, row_scales[row, column // 32]),
            (by_column, column_scales[row // 32, column]),
        ):
            factors = torch.pow(2.0, 127.0 - exponents.double()).float()
            out.copy_(e4m3(source.float() * factors))
