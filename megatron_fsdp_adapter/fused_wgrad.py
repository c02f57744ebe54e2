"""Fused weight gradients (`gradient_accumulation_fusion`): which modules write them, and Megatron's
matrix product for them where apex is missing.

Megatron's own linear layers call apex's `fused_weight_gradient_mlp_cuda`, and refuse to be built
with the option, which is on by default, where apex is not installed: the output layer of every
model is one of them, also of models made of Transformer Engine layers. `install()` here puts
Transformer Engine's matrix product, or torch's, in the place of a missing apex.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import torch

from .engine.direct import GradWriter
from .engine.partition import ManagedParam

_EXTENSION = "fused_weight_gradient_mlp_cuda"


def grad_writer(managed: ManagedParam, fused: bool) -> GradWriter:
    """Who writes the gradient of `managed`, from the modules that hold it.

    `fused` is `gradient_accumulation_fusion`. Only matrices are written by modules. Where one
    holder adds and another overwrites, both add; the engine adds what autograd has beside them.
    """
    if not fused or managed.param.ndim != 2:
        return GradWriter.AUTOGRAD
    writers = {_writer_of(owner) for owner, _ in managed.slots}
    # A tied embedding weight is handed to the output layer, which does not hold it; Megatron marks
    # it with an attribute that is about the placeholder gradient, which nobody makes here.
    if getattr(managed.param, "zero_out_wgrad", False):
        writers.add(GradWriter.ACCUMULATES)
    return next(one for one in _PRECEDENCE if one in writers)


_PRECEDENCE = (GradWriter.ACCUMULATES, GradWriter.OVERWRITES, GradWriter.AUTOGRAD)


def _writer_of(owner: Any) -> GradWriter:
    if getattr(owner, "fuse_wgrad_accumulation", False):  # Transformer Engine
        return GradWriter.OVERWRITES
    if getattr(owner, "gradient_accumulation_fusion", False):  # Megatron
        return GradWriter.ACCUMULATES
    return GradWriter.AUTOGRAD


def accumulate_wgrad(
    total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """`main_grad += grad_output^T @ total_input`, summed in the dtype of `main_grad`.

    Shapes: (tokens, inputs), (tokens, outputs), (outputs, inputs), all contiguous; the first two of
    one dtype, of 2 bytes or 4; `main_grad` float32 or that dtype. In place of apex's
    `wgrad_gemm_accum_fp32` and `wgrad_gemm_accum_fp16`.
    """
    total_input = total_input.reshape(-1, total_input.shape[-1])
    grad_output = grad_output.reshape(-1, grad_output.shape[-1])
    if main_grad.is_cuda and importlib.util.find_spec("transformer_engine") is not None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(
            total_input, grad_output, out_dtype=main_grad.dtype, layout="NT", out=main_grad,
            accumulate=True, grad=True,
        )  # fmt: skip
        return
    main_grad.addmm_(grad_output.t().to(main_grad.dtype), total_input.to(main_grad.dtype))


def _layers() -> Any:
    from megatron.core.tensor_parallel import layers

    return layers


def install() -> bool:
    """Lets Megatron's linear layers fuse weight gradients without apex. Returns whether that was
    needed: apex, where present, is left alone. Idempotent."""
    layers = _layers()
    if layers._grad_accum_fusion_available:
        return False
    ours = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate_wgrad, wgrad_gemm_accum_fp16=accumulate_wgrad
    )
    setattr(layers, _EXTENSION, ours)
    layers._grad_accum_fusion_available = True
    return True


def uninstall() -> None:
    """Undoes `install()`."""
    layers = _layers()
    ours = getattr(layers, _EXTENSION, None)
    if getattr(ours, "wgrad_gemm_accum_fp32", None) is accumulate_wgrad:
        delattr(layers, _EXTENSION)
        layers._grad_accum_fusion_available = False
