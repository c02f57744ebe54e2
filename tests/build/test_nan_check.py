"""A gradient that is not finite is one error, with the place where it was made."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest

from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    batches,
    build_trainer,
    init_megatron,
    run_passes,
    train_step,
)
from tests.lib.gpt.injected_faults import Spoiler
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("build/grad_check.py",)

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=3)
RANK = 1
MICROBATCH = 1
UNIT = "decoder.layers.1"
BAD = "mlp.linear_fc2.weight"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("option", "value"),
    (("check_for_nan_in_grad", math.nan), ("report_nan_in_param_grad", -math.inf)),
)
@on_ranks(2)
def test_it_is_named_by_rank_microbatch_unit_and_parameter(
    rank: int, strategy: str, option: str, value: float
) -> None:
    """The value is in one gradient of one microbatch on one rank. Only that rank raises."""
    spoiler = Spoiler(f"layers.1.{BAD}", MICROBATCH)
    device = init_megatron()
    trainer = build_trainer(CASE, strategy, device, spoiler.attach, ddp={option: True})
    data = batches(CASE, 0, rank, device)
    run_passes(trainer, data)
    spoiler.value = value
    spoiler.calls = 0
    with pytest.raises(RuntimeError) if rank == RANK else nullcontext() as caught:
        run_passes(trainer, data)  # without any collective behind the reductions
    if rank == RANK:
        error = str(caught.value)
        assert f"rank {RANK}, microbatch {MICROBATCH}, unit {UNIT}" in error, error
        named = f"parameter {UNIT}.{BAD}: {abs(value)}"
        assert (named in error) is (option == "report_nan_in_param_grad"), error
        assert error.count("microbatch ") == 1, error
    spoiler.value = None
    loss, norm = train_step(trainer, data)  # the next step is as if nothing had been
    assert math.isfinite(loss)
    assert math.isfinite(norm)
