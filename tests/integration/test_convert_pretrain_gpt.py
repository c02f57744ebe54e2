"""Megatron-LM's own pretrain_gpt.py with stock DDP goes on from a converted checkpoint of ours, and
with ours from one of its own.

Opt-in, as `test_pretrain_gpt.py`:

    MEGATRON_LM_PATH=path/to/Megatron-LM python -m pytest --full \
        tests/integration/test_convert_pretrain_gpt.py
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_adapter.checkpoint.convert import convert
from tests.integration.lm_runs import train

pytestmark = pytest.mark.full

COMMON = shlex.split(
    "--mock-data --swiglu --position-embedding-type rope --normalization RMSNorm "
    "--group-query-attention --num-query-groups 2 --disable-bias-linear --train-iters 4"
)
MOE = shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-ffn-hidden-size 48"
)
OURS = shlex.split("--use-megatron-fsdp --ckpt-format fsdp_dtensor")
STOCK = shlex.split(
    "--use-distributed-optimizer --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable "
    "--no-gradient-accumulation-fusion"
)
SAVED = 2


@pytest.fixture(scope="module")
def megatron_lm() -> Path:
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path or not (Path(path) / "pretrain_gpt.py").is_file():
        pytest.skip("set MEGATRON_LM_PATH to a checkout of Megatron-LM at core_v0.16.1")
    for module in ("six", "regex"):
        pytest.importorskip(module, reason="Megatron-LM's training modules import it")
    sys.path.append(path)  # saved arguments hold its classes
    return Path(path)


@pytest.mark.parametrize("model", [[], MOE], ids=["dense", "experts"])
def test_stock_ddp_goes_on_with_the_same_losses(
    megatron_lm: Path, tmp_path: Path, model: list[str]
) -> None:
    """In fp32, every printed digit of loss and gradient norm is that of our own resume."""
    common = [*COMMON, *model]
    ours = tmp_path / "ours"
    saving = ["--save", str(ours), "--save-interval", str(SAVED)]
    first = train(megatron_lm, [*common, *OURS, *saving], world=2)
    assert first.status == 0, first.end
    convert(ours, tmp_path / "td", "torch_dist", iteration=SAVED)

    (ours / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    expected = train(megatron_lm, [*common, *OURS, "--load", str(ours)], world=2)
    resumed = train(megatron_lm, [*common, *STOCK, "--load", str(tmp_path / "td")], world=2)
    _assert_resumed_alike(expected, resumed)


@pytest.mark.parametrize("model", [[], MOE], ids=["dense", "experts"])
def test_ours_goes_on_from_what_a_run_with_stock_ddp_saved(
    megatron_lm: Path, tmp_path: Path, model: list[str]
) -> None:
    """The move of somebody who has checkpoints already: what stock's own resume prints. (An
    uninterrupted run of stock prints other losses where its optimizer does not keep its steps.)"""
    common, stock = [*COMMON, *model], tmp_path / "stock"
    saving = ["--save", str(stock), "--save-interval", str(SAVED)]
    first = train(megatron_lm, [*common, *STOCK, *saving], world=2)
    assert first.status == 0, first.end
    convert(stock, tmp_path / "ours", "fsdp_dtensor", iteration=SAVED)
    (stock / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    expected = train(megatron_lm, [*common, *STOCK, "--load", str(stock)], world=2)
    resumed = train(megatron_lm, [*common, *OURS, "--load", str(tmp_path / "ours")], world=2)
    _assert_resumed_alike(expected, resumed)


def _assert_resumed_alike(*runs: Any) -> None:
    expected = runs[0]
    for run in runs:
        assert run.status == 0, run.end
        assert (SAVED, "lm loss") not in run.values, "it started again from the beginning"
        for step in range(SAVED + 1, 5):
            for what in ("lm loss", "grad norm"):
                assert run.values[step, what] == expected.values[step, what], (step, what)
