"""The kernel of `fused_adam`. Imported where it is used: Triton comes with torch's CUDA builds
only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .multi_tensor import CHUNK, Lists, TensorTable, Update

BLOCK = 1024
"""Elements that a program has in registers at a time."""
WARPS = 8
STAGES = 3
"""Loads under way. Chunks of 8192 to 131072, blocks of 1024 to 4096, 4 or 8 warps and 1 to 3 stages
were tried on an H200 with 680M elements: 4.14 TB/s as it is, 3.9 to 4.1 most others, and spilled
registers at 4096 by 4."""

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


# Transformer Engine compiles its Adam with --use_fast_math. These are the instructions that this
# gives: divisions and roots are approximate, and all operations flush subnormal numbers to zero.


@triton.jit
def _divided(one, other):
    return tl.inline_asm_elementwise(
        "div.approx.ftz.f32 $0, $1, $2;",
        "=f,f,f",
        [one, other],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _root(value):
    return tl.inline_asm_elementwise(
        "sqrt.approx.ftz.f32 $0, $1;",
        "=f,f",
        [value],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _sum(one, other):
    return tl.inline_asm_elementwise(
        "add.rn.ftz.f32 $0, $1, $2;",
        "=f,f,f",
        [one, other],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _product(one, other):
    return tl.inline_asm_elementwise(
        "mul.rn.ftz.f32 $0, $1, $2;",
        "=f,f,f",
        [one, other],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _fused(one, other, added):
    """one * other + added, rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rn.ftz.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [one, other, added],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _read(pointers, inside):
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _fused_adam(
    addresses,
    tensor_of,
    first_of,
    count,
    clip,
    lr,
    beta1,
    beta2,
    correction1,
    correction2,
    eps,
    decay,
    GRAD: tl.constexpr,
    WEIGHT: tl.constexpr,
    MOMENT: tl.constexpr,
    DECOUPLED: tl.constexpr,
    CLIP: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.load(tensor_of + program)
    chunk = program - tl.load(first_of + number)
    # 64 bits: a tensor can have more than 2**31 elements.
    start = chunk.to(tl.int64) * CHUNK
    grads = tl.load(addresses + number).to(tl.pointer_type(GRAD))
    weights = tl.load(addresses + count + number).to(tl.pointer_type(WEIGHT))
    firsts = tl.load(addresses + 2 * count + number).to(tl.pointer_type(MOMENT))
    seconds = tl.load(addresses + 3 * count + number).to(tl.pointer_type(MOMENT))
    numel = tl.load(addresses + 4 * count + number)
    end = tl.minimum(numel, start + CHUNK)
    factor = 1.0
    if CLIP:
        factor = tl.load(clip)
    if ALIGNED:
        grads = tl.multiple_of(grads, 16)
        weights = tl.multiple_of(weights, 16)
        firsts = tl.multiple_of(firsts, 16)
        seconds = tl.multiple_of(seconds, 16)
        end = tl.multiple_of(end, 8)
    for block in tl.range(start, end, BLOCK, num_stages=STAGES):
        place = block + tl.arange(0, BLOCK)
        inside = place < end
        grad = _read(grads + place, inside)
        weight = _read(weights + place, inside)
        first = _read(firsts + place, inside)
        second = _read(seconds + place, inside)
        if CLIP:
            grad = _product(grad, factor).to(GRAD).to(tl.float32)
        if not DECOUPLED:
            grad = _fused(decay, weight, grad)
        # As in Transformer Engine's kernel some products are rounded, and others are fused.
        first = _fused(beta1, first, _product(1.0 - beta1, grad))
        squares = _product(_product(1.0 - beta2, grad), grad)
        second = _fused(beta2, second, squares)
        root = _root(_divided(second, correction2))
        denominator = _sum(root, eps)
        update = _divided(_divided(first, correction1), denominator)
        if DECOUPLED:
            update = _fused(decay, weight, update)
        weight = _fused(-lr, update, weight)
        tl.store(weights + place, weight.to(WEIGHT), mask=inside)
        tl.store(firsts + place, first.to(MOMENT), mask=inside)
        tl.store(seconds + place, second.to(MOMENT), mask=inside)


def update(table: TensorTable, lists: Lists, step: Update) -> None:
    """Updates all tensors in one launch; see `multi_tensor.UpdateKernel`."""
    grads, weights, firsts, _ = (TYPES[tensors[0].dtype] for tensors in lists)
    clip = table.addresses if step.clip is None else step.clip  # unread without one
    chunks = table.tensor_of.numel()
    _fused_adam[(chunks,)](
        table.addresses,
        table.tensor_of,
        table.first_of,
        table.addresses.shape[1],
        clip,
        step.lr,
        step.beta1,
        step.beta2,
        step.correction1,
        step.correction2,
        step.eps,
        step.weight_decay,
        GRAD=grads,
        WEIGHT=weights,
        MOMENT=firsts,
        DECOUPLED=step.decoupled,
        CLIP=step.clip is not None,
        ALIGNED=table.aligned,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        STAGES=STAGES,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
