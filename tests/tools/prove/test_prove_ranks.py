"""Proofs on processes: a right engine is proven, of a broken one the error is named."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fsdp_adapter.tools.cli import doctor
from megatron_fsdp_adapter.tools.cli import prove as cli
from megatron_fsdp_adapter.tools.prove import run, source
from megatron_fsdp_adapter.tools.prove.compare import ComparedRow
from megatron_fsdp_adapter.tools.prove.scale_down import Room, shrink
from tests.lib.tools import faults

CHECKS = (
    "tools/cli/prove.py",
    "tools/prove/run.py",
    "tools/prove/build.py",
    "tools/prove/report.py",
    "tools/prove/compare.py",
    "megatron/wrapper/gpt_model.py",
)

MODEL: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "seq_length": 8,
    "swiglu": True,
    "global_batch_size": 8,
    "position_embedding_type": "rope",
}


OWN_REPLICAS = {
    "num_moe_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_topk": 2,
    "expert_num_distributed_optimizer_instances": 1,
    "expert_data_parallel_sharding_strategy": "optim",
}


def prove(
    folder: Path, prepare: Callable[[], None] | None, ranks: int = 2, **options: Any
) -> list[ComparedRow]:
    recipe = source.of_options({**MODEL, **options}, "a test", ranks)
    small = shrink(recipe.options, Room(ranks, False, False))
    plan = run.ProofPlan(small, folder, 2, 1, prepare)
    return run.prove(plan, "gloo", 300.0)


WORDS = [f"--set={name}={value!r}" for name, value in MODEL.items()]
"""Words of the model for doctor."""

ROWS = [
    ComparedRow("trained", 1, "loss", 0.0, 0.1),
    ComparedRow("trained", 1, "norm", math.inf, 0.1),
]


@pytest.mark.parametrize(("rows", "status"), [(ROWS[:1], 0), (ROWS, 1)])
def test_json_has_the_options_the_sizes_and_every_comparison(
    rows: list[ComparedRow],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "prove", lambda *_: rows)
    assert doctor.main(["--prove", "--json", "--ranks=2", *WORDS]) == status
    printed = capsys.readouterr().out
    found = json.loads(printed)
    compared = [row["holds"] for row in found["comparisons"]]
    assert found["holds"] is (status == 0)
    assert compared == ([True] if status == 0 else [True, False])
    assert found["options"]["num_layers"] == 3
    assert found["small"]["microbatches"] == 3


def test_the_documented_preset_is_proven(capsys: pytest.CaptureFixture[str]) -> None:
    """By the command of docs/doctor.md, of which fewer steps are run."""
    root = Path(__file__).parents[3]
    page = (root / "docs" / "doctor.md").read_text()
    [command] = re.findall(r"megatron-fsdp-adapter doctor (--prove --preset .*)", page)
    status = doctor.main([*shlex.split(command), "--ranks=2", "--steps=1", "--more=1"])
    out = capsys.readouterr().out
    last = out.splitlines()[-1]
    assert status == 0
    assert "step 1  gradients of" in out
    assert re.fullmatch(r"doctor --prove: (\d+) of \1 .* hold: proven", last)


@pytest.mark.parametrize(
    "more", [{}, pytest.param(OWN_REPLICAS, id="and experts in one", marks=pytest.mark.full)]
)
def test_two_instances_are_proven(tmp_path: Path, more: dict[str, Any]) -> None:
    """The reference reduces over all ranks, not over those of an instance."""
    rows = prove(
        tmp_path,
        None,
        4,
        data_parallel_sharding_strategy="optim_grads_params",
        num_distributed_optimizer_instances=2,
        outer_dp_sharding_strategy="optim",
        **more,
    )
    assert [row for row in rows if not row.holds] == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (faults.fail_on_one, ["ValueError: of rank 1"]),
        pytest.param(faults.wait_for_ever, ["in wait_for_ever"] * 2, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_fails_or_hangs_ends_all_and_their_stacks_are_shown(
    fault: Callable[[], None],
    says: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it would print elsewhere
    planned = functools.partial(run.ProofPlan, prepare=fault)
    monkeypatch.setattr(cli, "run", SimpleNamespace(ProofPlan=planned, prove=run.prove))
    assert doctor.main(["--prove", "--ranks=2", "--timeout=30", *WORDS]) == 1
    lines = capfd.readouterr().err.splitlines()
    shown = [line for line in lines if says[0] in line]
    assert len(shown) == len(says)
    assert lines[-1] == "doctor --prove: a rank failed (above), nothing is proven"


FAULTS = [
    (faults.scale_twice, "optim_grads_params", "gradients", "^39 of 39 parameters"),
    (faults.keep_old_weights, "optim", "loss", ""),
    (
        faults.load_rows_of_others,
        "optim_grads_params",
        "weights as loaded",
        r"parameters, in decoder\.layers\.1$",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("fault", "strategy", "quantity", "says"), FAULTS)
def test_a_broken_engine_is_told_what_is_wrong(
    tmp_path: Path, fault: Callable[[], None], strategy: str, quantity: str, says: str
) -> None:
    rows = prove(tmp_path, fault, data_parallel_sharding_strategy=strategy)
    first = next(row for row in rows if not row.holds)
    assert first.quantity == quantity
    assert re.search(says, first.remark), first.remark
