"""Measures a layer as it is trained: forward and backward of a few layers of Transformer Engine,
in bf16 and in FP8, experts' products, Muon's iteration, Adam's pass, copies to host memory.

What products reach inside of a layer is what is left of the layer's time when attention and passes
over memory, which are measured alone, are taken away. Alone, products are a fifth faster.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_fsdp_adapter.cli.quantised_options import PLAIN, Quantisation
from megatron_fsdp_adapter.core.layout.format import PER_TENSOR
from megatron_fsdp_adapter.sharding.muon.newton_schulz import (
    COEFFICIENTS,
    cost,
    orthogonalised,
)

from .machine import Gpu, operation_seconds
from .models import shape_named
from .program import Kind
from .shapes import Parallel, Shape, units, with_layers
from .timed_modules import Work

LAYERS = 4
EXPERTS, TOKENS_OF_EXPERT = 8, 1024
BF16 = torch.bfloat16

Timed = Callable[[Callable[[], object], torch.device, int], float]
"""`measure.seconds_of`."""


@dataclass(frozen=True)
class Part:
    """A thing that is measured. measure: of a GPU, device and clock, the GPU with it."""

    name: str
    measure: Callable[[Gpu, torch.device, Timed], Gpu]


def rate_inside(seconds: float, works: Sequence[Work], kind: Kind, gpu: Gpu) -> float:
    """TFLOP/s of the works of `kind`, of works that take `seconds` together. ValueError if the
    others alone take as long."""
    others = sum(
        operation_seconds(work.kind, work.amount, gpu, work.kernels)
        for work in works if work.kind is not kind
    )
    own = [work for work in works if work.kind is kind]
    left = seconds - others - sum(work.kernels for work in own) * gpu.kernel_us * 1e-6
    if left <= 0:
        raise ValueError(
            f"a layer takes {seconds * 1e3:.2f} ms, and all of it but {kind.value}es "
            f"{others * 1e3:.2f} ms by what was measured alone"
        )
    return sum(work.amount for work in own) / left / 1e12


def layer_shape() -> Shape:
    """That is measured: Llama-3 8B's, which all presets are near."""
    return replace(with_layers(shape_named("llama3-8b"), LAYERS), seq_length=4096)


def works_of(shape: Shape, quantised: Quantisation) -> list[Work]:
    """Forward and backward of the last layer, one sequence."""
    unit = next(
        one for one in reversed(units(shape, Parallel(), 1, 0, quantised))
        if one.name.startswith("decoder.layers.")
    )
    return [*unit.forward, *unit.backward]


def of_attention(gpu: Gpu, device: torch.device, timed: Timed) -> Gpu:
    """As Transformer Engine computes it; torch may take other kernels."""
    import transformer_engine.pytorch as te

    shape = layer_shape()
    gpt = shape.gpt
    attention = te.DotProductAttention(
        gpt.num_attention_heads, gpt.head_dim, num_gqa_groups=gpt.query_groups,
        attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal", layer_number=1,
    )  # fmt: skip
    query, key, value = (
        torch.randn(
            shape.seq_length, 1, heads, gpt.head_dim, device=device, dtype=BF16, requires_grad=True
        )
        for heads in (gpt.num_attention_heads, gpt.query_groups, gpt.query_groups)
    )

    def run() -> None:
        out = attention(query, key, value)
        torch.autograd.grad(out, (query, key, value), out.detach())

    flops = sum(one.amount for one in works_of(shape, PLAIN) if one.kind is Kind.ATTENTION)
    return replace(gpu, attention_tflops=flops / timed(run, device, 20) / 1e12)


def in_bf16(gpu: Gpu, device: torch.device, timed: Timed) -> Gpu:
    shape = layer_shape()
    seconds = _layer_seconds(shape, device, timed, nullcontext)
    rate = rate_inside(seconds, works_of(shape, PLAIN), Kind.PRODUCT, gpu)
    return replace(gpu, product_tflops=rate)


def in_fp8(gpu: Gpu, device: torch.device, timed: Timed) -> Gpu:
    """With a scale a tensor, of bf16 weights."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    def context() -> AbstractContextManager[Any]:
        if hasattr(te, "autocast"):
            return te.autocast(enabled=True, recipe=Float8CurrentScaling())  # type: ignore[no-any-return]
        return te.fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling())  # type: ignore[no-any-return]

    shape = layer_shape()
    seconds = _layer_seconds(shape, device, timed, context)
    works = works_of(shape, Quantisation(products=PER_TENSOR))
    return replace(gpu, fp8_product_tflops=rate_inside(seconds, works, Kind.FP8_PRODUCT, gpu))


def _layer_seconds(
    shape: Shape, device: torch.device, timed: Timed,
    context: Callable[[], AbstractContextManager[Any]],
) -> float:
    """Forward and backward of one layer of several, which do not find each other in the cache."""
    import transformer_engine.pytorch as te

    gpt = shape.gpt
    layers = [
        te.TransformerLayer(
            gpt.hidden_size, gpt.ffn, gpt.num_attention_heads, num_gqa_groups=gpt.query_groups,
            hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal",
            normalization="RMSNorm", activation="swiglu", bias=False, params_dtype=BF16,
            fuse_qkv_params=True, layer_number=number + 1, device=device,
        )
        for number in range(LAYERS)
    ]  # fmt: skip
    start = torch.randn(
        shape.seq_length, 1, gpt.hidden_size, device=device, dtype=BF16, requires_grad=True
    )
    grad = torch.randn_like(start)

    def run() -> None:
        value = start
        with context():
            for layer in layers:
                value = layer(value)
        value.backward(grad)
        start.grad = None
        for layer in layers:
            layer.zero_grad(set_to_none=True)

    return timed(run, device, 40) / LAYERS


def of_experts(gpu: Gpu, device: torch.device, timed: Timed) -> Gpu:
    """Both products of eight experts of Mixtral, forward and backward."""
    import transformer_engine.pytorch as te

    hidden, ffn = 4096, 14336
    up, down = (
        te.GroupedLinear(EXPERTS, *sizes, bias=False, params_dtype=BF16, device=device)
        for sizes in ((hidden, 2 * ffn), (ffn, hidden))
    )
    tokens = EXPERTS * TOKENS_OF_EXPERT
    splits = [TOKENS_OF_EXPERT] * EXPERTS
    x = torch.randn(tokens, hidden, device=device, dtype=BF16, requires_grad=True)
    middle = torch.randn(tokens, ffn, device=device, dtype=BF16, requires_grad=True)
    grads = [torch.randn(tokens, n, device=device, dtype=BF16) for n in (2 * ffn, hidden)]

    def run() -> None:
        up(x, splits).backward(grads[0])
        down(middle, splits).backward(grads[1])
        x.grad = middle.grad = None
        up.zero_grad(set_to_none=True)
        down.zero_grad(set_to_none=True)

    flops = 6.0 * tokens * hidden * 3 * ffn
    return replace(gpu, grouped_tflops=flops / timed(run, device, 20) / 1e12)


def of_adam(gpu: Gpu, device: torch.device, timed: Timed) -> Gpu:
    """Torch's fused one: 28 bytes an element, as a step of mixed precision passes over."""
    param = torch.nn.Parameter(torch.zeros(1 << 27, device=device))
    param.grad = torch.ones_like(param)
    adam = torch.optim.AdamW([param], fused=True)
    seconds = timed(adam.step, device, 20)
    return replace(gpu, memory_tbps=28.0 * param.numel() / seconds / 1e12)


def of_iteration(gpu: Gpu, device: torch.device, timed: Timed) -> Gpu:
    """Newton-Schulz of two matrices of a layer."""
    x = torch.randn(2, 4096, 14336, device=device, dtype=BF16)
    seconds = timed(lambda: orthogonalised(x, COEFFICIENTS["quintic"]), device, 5)
    return replace(gpu, iteration=2 * cost(4096, 14336) / seconds / 1e12 / gpu.product_tflops)


def of_host_memory(gpu: Gpu, device: torch.device, timed: Timed) -> Gpu:
    """Copies of page-locked memory: to the host alone, as activations go there in a forward; from
    it while as much goes there, as of an optimizer that is streamed."""
    hosts = [torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    own = [torch.empty(1 << 29, dtype=torch.uint8, device=device) for _ in range(2)]
    side = torch.cuda.Stream(device=device)

    def out() -> None:
        hosts[0].copy_(own[0], non_blocking=True)

    def both() -> None:
        out()
        with torch.cuda.stream(side):
            own[1].copy_(hosts[1], non_blocking=True)

    nbytes = hosts[0].numel()
    alone, together = timed(out, device, 5), timed(both, device, 5)
    return replace(gpu, to_host_gbps=nbytes / alone / 1e9, from_host_gbps=nbytes / together / 1e9)


PARTS: tuple[Part, ...] = (
    Part("Adam's pass", of_adam), Part("attention", of_attention),
    Part("a layer in bf16", in_bf16),
    Part("a layer in FP8", in_fp8), Part("products of experts", of_experts),
    Part("Newton-Schulz iterations", of_iteration), Part("copies to host memory", of_host_memory),
)  # fmt: skip
"""In this order: a layer needs what was found before it."""


def load_transformer_engine() -> None:
    """Before anything is computed: attention of torch loads its own libraries of cuDNN, beside
    which those that Transformer Engine finds cannot be loaded. Without it, its parts say so."""
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("transformer_engine.pytorch")


def measure_parts(
    gpu: Gpu, device: torch.device, timed: Timed, parts: Sequence[Part] = PARTS
) -> tuple[Gpu, list[str]]:
    """`gpu` with what could be measured, and a line for each part that could not, which says why:
    what is not installed, or does not run here, stays as it was."""
    left = []
    for part in parts:
        try:
            gpu = part.measure(gpu, device, timed)
        except (ImportError, OSError, RuntimeError, TypeError, ValueError, AssertionError) as error:
            left.append(f"not measured: {part.name}: {type(error).__name__}: {error}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return gpu, left
