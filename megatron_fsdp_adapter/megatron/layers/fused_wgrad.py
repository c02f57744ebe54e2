"""Fused weight gradients (`gradient_accumulation_fusion`): which modules write them and how, and a
replacement for a missing apex.

`wgrad_probe` tells how a module writes. Megatron's own linear layers call apex's
`fused_weight_gradient_mlp_cuda`. Without apex they cannot be built with this option, which is on by
default; and the output layer of every model is such a layer, also in models of Transformer Engine
layers. So a missing apex is replaced by Transformer Engine's GEMM or torch's (`compat/table.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ...core.engine.partition import ManagedParam
from ...core.engine.wgrad import WgradProtocol
from ..options.rules import is_on
from .wgrad_probe import Observed

Observe = Callable[[Any, torch.dtype, bool], Observed]
"""Returns what a module does to `main_grad`. Takes the module, the dtype of its weights, and True
if they are quantized."""


def grad_writer(managed: ManagedParam, observe: Observe) -> WgradProtocol:
    """The protocol by which the gradient of `managed` is written, if weight gradients are fused
    (`gradient_accumulation_fusion`).

    It follows from the modules that hold the parameter. Modules write only gradients of matrices.
    Where holders differ, all of them add to a zeroed bucket. The engine adds gradients that come
    from autograd as well.

    Raises:
        ValueError: a module that neither adds nor overwrites as its flag asks.
    """
    param = managed.param
    if param.ndim != 2 or not param.requires_grad:
        return WgradProtocol.AUTOGRAD
    is_quantized = managed.format is not None
    writers = set()
    for owner, _ in managed.slots:
        if fuses(owner):
            seen = observe(owner, param.dtype, is_quantized)
            writers.add(_writer_that(seen, type(owner).__name__))
    # The output layer writes the gradient of a tied embedding weight without holding it. Megatron
    # marks such a weight by `zero_out_wgrad`. In a pipeline it marks only the copies, by
    # `shared_embedding`: the last stage's output layer writes its copy if that is held for
    # multi-token prediction. The first stage's copy has the mark too, which does no harm.
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
"""Attributes that are on if a module fuses: of Transformer Engine's modules, of its operations, of
Megatron's own modules."""


def fuses(owner: Any) -> bool:
    """True if a module writes weight gradients into `main_grad` by itself."""
    return any(is_on(owner, option) for option in FUSION_OPTIONS)


def _writer_that(seen: Observed, name: str) -> WgradProtocol:
    """The fastest protocol that modules of class `name` were seen to follow. ValueError if there is
    none."""
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

    It replaces apex's `wgrad_gemm_accum_fp32` and `wgrad_gemm_accum_fp16`. Shapes: (..., inputs),
    (..., outputs), (outputs, inputs), all contiguous. The first two have the same dtype, of 2 or 4
    bytes; `main_grad` has any. If that is neither float32 nor theirs, the product is rounded to
    their dtype before it is added.
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
    """The GEMMs that Megatron's linear layers use: apex's if it is there, else `accumulate_wgrad`.
    held: apex's module, or None."""
    if held:
        return held
    return SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate_wgrad, wgrad_gemm_accum_fp16=accumulate_wgrad
    )
