"""Twenty steps beside Megatron's DDP: eager, in graphs of layers, and in these with a budget that
is found, each with 1 and 4 microbatches, in bf16 and with FP8 weights. How far losses and norms may
be apart: tests/lib/gpu/losses.py.

    python -m pytest -q -rA tests/gpu/test_gpu_losses.py        # two GPUs
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.lib.gpt.gpt import Case, Trainer, init_megatron
from tests.lib.gpu.gpu_ranks import DETERMINISTIC, Check, Outcomes, expecting
from tests.lib.gpu.losses import KINDS, ZERO_3, Kind, beside_ddp
from tests.lib.gpu.runs import layers_captured, te_trainer

CHECKS = ("graphs/layer_graphs.py", "build/auto_budget.py", "quantized/weights.py")

MIDDLE = Case(
    num_layers=4,
    hidden=1024,
    heads=16,
    ffn=2816,
    vocab=8192,
    seq=1024,
    batch=1,
    swiglu=True,
    bias=False,
    bf16=True,
    fused=True,
    lr=3e-4,
    adam_eps=1e-6,
)
WIDTHS: Mapping[str, Case] = {
    "hidden 1024": MIDDLE,
    # At 3e-4 it learns the batches by heart in 20 steps: norms near zero, which differ by chance.
    "hidden 4096": MIDDLE.but(num_layers=2, hidden=4096, heads=32, ffn=14336, seq=4096, lr=3e-5),
}
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    "FP8 weights": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True},
}
MICROBATCHES = (1, 4)


def check(
    rank: int, world: int, width: str, precision: str, microbatches: int, kind_name: str
) -> str:
    device = init_megatron()

    def make(case: Case, kind: Kind | None) -> Trainer:
        fields = dict(PRECISIONS[precision])
        if kind is not None and kind.captures:
            fields |= layers_captured()
        return te_trainer(
            case,
            None if kind is None else ZERO_3,
            device,
            fields,
            lambda model: torch.cuda.synchronize(),
            {} if kind is None else kind.ddp,
            te_rng_tracker=True,
            force_reset_rng=True,
        )

    case = WIDTHS[width].but(microbatches=microbatches)
    say = f"{width}, {precision}, {microbatches} microbatches, {kind_name}"
    return beside_ddp(rank, make, case, KINDS[kind_name], precision, say)


DEVICE_CHECKS = {}
# Those with one reference follow each other: it is trained once.
for _width in WIDTHS:
    for _precision in PRECISIONS:
        for _number in MICROBATCHES:
            for _kind in KINDS:
                _name = f"{_width}, {_precision}, {_number} microbatches, {_kind}"
                DEVICE_CHECKS[_name] = Check(check, (_width, _precision, _number, _kind))
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=540.0, needs=("te", "fp8"), environment=DETERMINISTIC)

test_trains_like_stock_ddp = expecting(OUTCOMES)
