"""Fused weight gradients (`gradient_accumulation_fusion`): which modules write them, in the way
that `wgrad_probe` has seen, and Megatron's GEMM for them where apex is missing.

Megatron's own linear layers call apex's `fused_weight_gradient_mlp_cuda`, and refuse to be built
with the option, which is on by default, where apex is not installed: the output layer of every
model is one of them, also of models made of Transformer Engine layers. Transformer Engine's matrix
product, or torch's, is put in the place of a missing apex (`compat/table.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ...core.engine.partition import ManagedParam
from ...core.engine.wgrad import WgradProtocol
from ...quantized import format_of
from ..options.rules import is_on
from .wgrad_probe import Observed


def grad_writer(
    managed: ManagedParam,
    observe: Callable[[Any, torch.dtype, bool], Observed] | None,
) -> WgradProtocol:
    """The protocol by which the gradient of `managed` is written, from the modules that hold it.

    Only matrices are written by modules. Where the holders differ, all of them add to what was
    zeroed; the engine adds what autograd has beside them.

    Args:
        observe: what a module with weights of a dtype, quantized or not, does to `main_grad`; None
            without `gradient_accumulation_fusion`.

    Raises:
        ValueError: a module that neither adds nor overwrites as its flag asks.
    """
    param = managed.param
    if observe is None or param.ndim != 2 or not param.requires_grad:
        return WgradProtocol.AUTOGRAD
    is_quantized = format_of(managed) is not None
    writers = set()
    for owner, _ in managed.slots:
        if fuses(owner):
            seen = observe(owner, param.dtype, is_quantized)
            writers.add(_writer_that(seen, type(owner).__name__))
    # A tied embedding weight is handed to the output layer, which does not hold it; Megatron marks
    # it with an attribute that is about the placeholder gradient, which is not made here. Of a
    # pipeline it marks neither, but the copies: the last stage hands out its copy if it has it for
    # multi-token prediction. That of the first stage loses nothing by it.
    is_copy = not writers and is_on(param, "shared_embedding")
    if is_copy or is_on(param, "zero_out_wgrad"):
        writers.add(WgradProtocol.ACCUMULATES)
    if len(writers) > 1:
        return WgradProtocol.ACCUMULATES
    return writers.pop() if writers else WgradProtocol.AUTOGRAD


def asks_fusion(config: Any) -> bool:
    """True if the model config has the option on."""
    return is_on(config, "gradient_accumulation_fusion")


FUSION_OPTIONS = (
    "fuse_wgrad_accumulation",
    "_accumulate_into_main_grad",
    "gradient_accumulation_fusion",
)
"""Attributes of modules that are on if they fuse: of Transformer Engine's, of its operations, of
Megatron's own."""


def fuses(owner: Any) -> bool:
    """True if a module writes weight gradients by itself."""
    return any(is_on(owner, option) for option in FUSION_OPTIONS)


def _writer_that(seen: Observed, name: str) -> WgradProtocol:
    """The fastest protocol that modules of class `name` were seen to keep to."""
    if seen.overwrites_in_backward:
        if seen.ignores_flag_under_hooks:
            return WgradProtocol.OVERWRITES_UNHOOKED
        return WgradProtocol.OVERWRITES
    if seen.overwrites_in_forward and seen.adds:
        return WgradProtocol.OVERWRITES_EARLY
    if seen.adds:
        return WgradProtocol.ACCUMULATES
    raise ValueError(
        f"gradient_accumulation_fusion=True: {name} neither adds its weight gradient to main_grad "
        f"nor overwrites it when requested ({seen}). Set gradient_accumulation_fusion=False "
        "(--no-gradient-accumulation-fusion)"
    )


def accumulate_wgrad(
    total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """`main_grad += grad_output^T @ total_input`, summed in the dtype of `main_grad`.

    Shapes: (tokens, inputs), (tokens, outputs), (outputs, inputs), all contiguous; the first two of
    one dtype, of 2 bytes or 4; `main_grad` of any: where that is neither float32 nor theirs, the
    product is rounded to theirs before it is added. In place of apex's
    `wgrad_gemm_accum_fp32` and `wgrad_gemm_accum_fp16`.
    """
    total_input = total_input.reshape(-1, total_input.shape[-1])
    grad_output = grad_output.reshape(-1, grad_output.shape[-1])
    if main_grad.dtype not in (torch.float32, total_input.dtype):
        # No kernel writes a product of one 16-bit dtype in the other, nor one of float32 in either.
        main_grad.add_(grad_output.t() @ total_input)
        return
    if main_grad.is_cuda and importlib.util.find_spec("transformer_engine") is not None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(
            total_input,
            grad_output,
            out_dtype=main_grad.dtype,
            layout="NT",
            out=main_grad,
            accumulate=True,
            grad=True,
        )
        return
    main_grad.addmm_(grad_output.t().to(main_grad.dtype), total_input.to(main_grad.dtype))


def products(layers: Any, held: Any) -> Any:
    """The GEMMs that Megatron's linear layers take from apex, or their replacement."""
    if held:
        return held
    return SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate_wgrad, wgrad_gemm_accum_fp16=accumulate_wgrad
    )
