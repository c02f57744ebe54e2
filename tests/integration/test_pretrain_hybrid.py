"""Megatron-LM's own pretrain_hybrid.py, unmodified: layers of attention, of an MLP and of experts
train as with its own DDP. Layers of Mamba are left out: their kernels are CUDA only.

Opt-in like `test_pretrain_gpt.py`; needs a checkout that has the script.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.integration import lm_log
from tests.integration.lm_runs import STEPS, Run, train

pytestmark = pytest.mark.full

SCRIPT = "pretrain_hybrid.py"
COMMON = shlex.split("--mock-data --spec hybrid_cpu STACK")
MOE = shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-ffn-hidden-size 48 --disable-bias-linear --moe-token-dispatcher-type alltoall"
)
DENSE = ("--hybrid-layer-pattern", "*-*-")
EXPERTS = ("--hybrid-layer-pattern", "*-*E", *MOE, "--expert-model-parallel-size", "2")
STAGES = ("--hybrid-layer-pattern", "*-|*-", "--pipeline-model-parallel-size", "2")
MODELS = {"dense": (DENSE, 2), "experts-ep2": (EXPERTS, 2), "stages-pp2": (STAGES, 4)}
"""Layers of a pattern, and with how many ranks they are trained."""


@pytest.fixture(scope="module")
def hybrid(megatron_lm: Path) -> Path:
    if not (megatron_lm / SCRIPT).is_file():
        pytest.skip(f"this Megatron-LM has no {SCRIPT}")
    return megatron_lm


@pytest.fixture(scope="module")
def stock(hybrid: Path) -> Callable[[str], lm_log.Values]:
    """Losses and norms with Megatron-LM's own DDP, for a model; run once for each."""

    @functools.cache
    def values(model: str) -> lm_log.Values:
        arguments, world = MODELS[model]
        run = train(
            hybrid,
            [*COMMON, *arguments, "--use-distributed-optimizer",
             "--no-gradient-accumulation-fusion"],
            world, script=SCRIPT,
        )  # fmt: skip
        assert run.status == 0, run.end
        assert "FullyShardedDataParallel" not in run.log
        return run.values

    return values


def _ours(checkout: Path, model: str, *more: str, script: str = SCRIPT) -> Run:
    arguments, world = MODELS[model]
    run = train(
        checkout, [*COMMON, *arguments, "--use-megatron-fsdp", *more], world, script=script
    )
    assert run.status == 0, run.end
    assert "FullyShardedDataParallel: strategy" in run.log, "the wrapper was not constructed"
    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_norms_are_those_of_ddp(
    hybrid: Path, stock: Callable[[str], lm_log.Values], model: str, strategy: str
) -> None:
    """In fp32, in every printed digit: training, evaluation while training and at the end."""
    run = _ours(hybrid, model, "--data-parallel-sharding-strategy", strategy)
    assert sum(what == "grad norm" for _, what in run.values) == STEPS
    assert lm_log.differences(stock(model), run.values) == []


def test_the_script_under_its_older_name_is_the_same(
    hybrid: Path, stock: Callable[[str], lm_log.Values]
) -> None:
    run = _ours(hybrid, "dense", script="pretrain_mamba.py")
    assert lm_log.differences(stock("dense"), run.values) == []


def test_saves_and_resumes(
    hybrid: Path, stock: Callable[[str], lm_log.Values], tmp_path: Path
) -> None:
    """What follows a resume is what an uninterrupted DDP run printed. Megatron-LM averages the
    first two losses that it logs after a resume, so the comparison begins at the third."""
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "2"]
    _ours(hybrid, "experts-ep2", *saving, "--exit-interval", "2")
    assert (tmp_path / "saved" / "iter_0000002" / ".metadata").is_file()
    resumed = _ours(hybrid, "experts-ep2", *saving, "--load", str(tmp_path / "saved"))
    expected = stock("experts-ep2")
    assert (2, "lm loss") not in resumed.values, "it started again from the beginning"
    assert resumed.values[3, "grad norm"] == expected[3, "grad norm"]
    assert lm_log.differences(expected, resumed.values, start=5) == []
