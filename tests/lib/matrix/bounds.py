"""How far a cell may be from its reference, by the roundings on the way.

A sum with k roundings of unit roundoff u is off by at most gamma(k, u) of the sum of absolute
values (`tests/lib/gpt/exact.py`). Errors are measured in the Euclidean norm of a tensor,
relative to the tensor's.

gradient of the first step
    Both start from the same weights and run the same kernels on the same data, so that only the
    sums over ranks and microbatches are taken in another order: ranks * microbatches + 2 roundings
    in float32, of terms that may cancel (`CANCELLATION`). Beside that
    - on a GPU kernels may add in another order in each call (scatters, atomics): `KERNEL` roundings
      of the compute dtype;
    - with bf16 on the wire a rounding for the cast and one for each rank;
    - FP8: a flipped rounding moves a tensor's scale, and with it every element by a rounding of
      E5M2, the dtype of gradients. The recipe `delayed` quantizes sharded weights in every
      microbatch, stock DDP's once a step.
norm of all gradients
    The same, by the triangle inequality. With FP8 1%: the roundings of many tensors are of either
    sign.
loss of the first step
    One forward: the kernels' part alone.
later steps, and the movement of the weights
    Updates are nearly proportional to gradients (`Width.adam_eps`), so a gradient's error is the
    update's, in each of three steps (`GROWTH`). Compute weights of 16 bits
    add their own roundings, since main weights that differ a little may round differently.
FP8 weights
    As FP8 with bf16 weights, but that the first step may be off by nothing where sums have one
    order (`is_exact`): both begin with the same bytes, and quantize them once a step.
movement of Muon's weights
    One Newton-Schulz step is a polynomial of the singular values, whose slope is largest at zero:
    an error of a gradient is at most so many times as large in the update, relative to the update
    that there is (`muon.py`). Beside that, products and rows on the wire are of 16 bits in cells
    of 16 bits.
movement with FP8 and bf16 on the wire
    The first rounding differs in every element, and FP8's thresholds amplify that from step to
    step, by as much as the model makes them: gradients that are sums over many tokens cancel. So it
    is measured what stock DDP differs from itself by if its gradients are rounded to bf16, and
    `SENSITIVITY` times as much is allowed, if that is more: ours rounds on each rank and in each
    microbatch. Without bf16 on the wire no bit differs in most of these cells.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.lib.gpt.exact import U_BFLOAT16, U_FLOAT32, gamma

from .table import WITH_EXPERTS, Cell, has_fp8_weights

U_FLOAT16 = 2.0**-11
U_E5M2 = 2.0**-3
COMPUTE = {"fp32": U_FLOAT32, "bf16": U_BFLOAT16, "fp16": U_FLOAT16}
"""Unit roundoff of the compute dtype; FP8 has bf16 beside it."""

CANCELLATION = 8
KERNEL = 2
GROWTH = 3
FP8_NORM = 1e-2
PEAK = 4
"""Largest error of an element, relative to the largest element, in units of the tensor's bound."""
REROUTED = 4
"""A token that one flipped rounding sends to another expert: in units of the later bounds. Twice
as much with Muon, whose updates differ by roundings of 16 bits themselves."""

SENSITIVITY = 4
"""Of the movement of an FP8 cell with bf16 on the wire: units of what one rounding does to DDP."""


def is_sensitive(cell: Cell) -> bool:
    return str(cell["precision"]).startswith("fp8") and cell["wire"] == "bf16"


_ONE_ORDER: Cell = {
    "layers": "te", "trained": "all", "fusion": "off", "graph": "off", "wire": "fp32", "ranks": 2,
    "tp": 1, "cp": 1, "pp": 1, "outer": "plain", "start": "usual",
}  # fmt: skip


def is_exact(cell: Cell) -> bool:
    """Whether loss and gradients of the first step are stock DDP's bits: FP8 weights, and sums over
    two ranks of what each rank has added up over microbatches."""
    adds_up_first = cell["microbatches"] == 1 or cell["strategy"] in ("no_shard", "optim")
    plain = all(cell[name] == value for name, value in _ONE_ORDER.items())
    return has_fp8_weights(cell["precision"]) and adds_up_first and plain


@dataclass(frozen=True)
class Bounds:
    """All relative: of a tensor's norm, of the norm of all gradients, of the loss, of how far a
    weight tensor has moved."""

    gradient: float
    norm: float
    loss: float
    later: float
    movement: float


def bounds_of(cell: Cell) -> Bounds:
    ranks = int(cell["ranks"])
    microbatches = int(cell["microbatches"])
    fp8 = str(cell["precision"]).startswith("fp8")
    compute = COMPUTE.get(str(cell["precision"]), U_BFLOAT16)
    if cell["target"] == "gpu":
        kernel = gamma(KERNEL, compute)
    else:
        kernel = 0.0
    sums = CANCELLATION * gamma(ranks * microbatches + 2, U_FLOAT32)
    if cell["wire"] == "bf16":
        wire = gamma(1 + ranks, U_BFLOAT16)
    else:
        wire = 0.0
    # Autograd adds two graphs' gradients of a tied weight up in bf16; stock DDP takes each away.
    two_graphs = cell["ep_overlap"] == "on" and cell["trained"] == "tied"
    gradient = sums + kernel + wire + (2 * compute if two_graphs else 0.0)
    loss = CANCELLATION * U_FLOAT32 + kernel
    casts = gamma(KERNEL, compute) if compute != U_FLOAT32 else 0.0
    later = GROWTH * (gradient + casts)
    if cell["layers"] in WITH_EXPERTS and compute != U_FLOAT32:
        later *= REROUTED * (1 if cell["optimizer"] == "adam" else 2)
    if fp8:
        gradient += gamma(1, U_E5M2)
        later = 2 * FP8_NORM + wire
        if is_exact(cell):
            return Bounds(0.0, CANCELLATION * U_FLOAT32, 0.0, later, 2 * gradient)
        return Bounds(gradient, FP8_NORM + wire, FP8_NORM, later, 2 * gradient)
    return Bounds(gradient, gradient, loss, later, later)


def movement_of(cell: Cell, bounds: Bounds, gain: float | None) -> float:
    """Of one weight; `gain`: of a gradient's relative error in the update, None but for Muon's."""
    if gain is None:
        return bounds.movement
    if cell["precision"] == "fp32":
        half = 0.0
    else:
        half = gamma(KERNEL, U_BFLOAT16)
    return gain * (bounds.movement + half)
