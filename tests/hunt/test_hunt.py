"""The hunts of `python -m tests.hunt`: a few of their programs, and what hunters find."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hunt.__main__ import kinds_of
from tests.lib.gpu import journal
from tests.lib.hunt import known, verdict
from tests.lib.hunt.cycle_hunting import cycle_of
from tests.lib.hunt.hunting import Hunt, hunt, new_findings, seeds_left, summary
from tests.lib.hunt.programs import Program, Statement, generated, program_of
from tests.lib.hunt.shrinking import shrunk

CHECKS = ("plain/fsdp2.py", "plain/fully_shard.py", "plain/user_loop.py")

SEEDS = (4, 5, 7, 9, 11, 12, 13, 14)
"""Programs of both doors that are right: others take the time of shrinking."""


@pytest.fixture(scope="module")
def hunter() -> Iterator[Hunt]:
    one = Hunt()
    yield one
    one.end()


def test_programs_give_what_they_give_unsharded(hunter: Hunt, tmp_path: Path) -> None:
    results = tmp_path / "results"
    hunt(hunter.looked_at, SEEDS, results, lambda: False)
    assert new_findings(results) == [], summary(results)
    outcomes = [line["outcome"] for line in journal.read(results)]
    assert outcomes.count(verdict.OK) >= len(SEEDS) - 2


@pytest.mark.parametrize(
    ("fault", "seeds", "most", "needed"),
    [
        ("double beside frozen", range(179, 180), 5, {"freeze"}),
        ("error of a second backward", range(2137, 2138), 4, {"pass"}),
    ],
)
def test_a_fault_is_found_and_its_program_is_small(
    fault: str, seeds: range, most: int, needed: set[str]
) -> None:
    hunter = Hunt(fault)
    try:
        lines = (hunter.looked_at(seed) for seed in seeds)
        found = next(line for line in lines if line["outcome"] in verdict.FINDINGS)
    finally:
        hunter.end()
    kinds = {one["kind"] for one in found["small"]}
    assert len(found["small"]) <= most
    assert kinds >= needed
    assert known.reason_for(found["signature"]) is None


@pytest.mark.parametrize(
    ("text", "outcome", "detail"),
    [
        ("if rank == 0: torch.distributed.barrier()", verdict.HANG, "barrier"),
        ("if rank == 0: import os; os.kill(os.getpid(), 11)", verdict.CRASH, "exited with -11"),
        ("show('rank', rank)", verdict.OK, ""),
        ("raise KeyError('own')", verdict.INVALID, "KeyError"),
        ("show('side', str(fully_shard.__module__))", verdict.WRONG, "megatron_fsdp_adapter"),
    ],
)
def test_what_becomes_of_a_program(text: str, outcome: str, detail: str) -> None:
    hunter = Hunt(quiet=4.0)
    try:
        found = hunter.judged(program_of(text))
    finally:
        hunter.end()
    assert found.outcome == outcome
    assert detail in found.detail


def test_a_program_with_a_model_is_no_life_cycle() -> None:
    program = "# model\nmodel = fully_shard(net)\n"
    assert not cycle_of(program).statements
    assert cycle_of("# model\ngpt\n# stage\noptim exit\n").kinds == ["model", "stage"]


def test_only_statements_that_a_failure_needs_are_left() -> None:
    program = Program(tuple(Statement(str(number), "") for number in range(20)))
    trials = []

    def fails(smaller: Program) -> bool:
        trials.append(smaller)
        return {"3", "11"} <= {*smaller.kinds}

    assert shrunk(program, fails).kinds == ["11", "3"]
    assert len(trials) < 40


def test_a_seed_has_one_program_and_its_text_compiles() -> None:
    for seed in range(300):
        compile(generated(seed).text, f"seed {seed}", "exec")
    assert generated(5) == generated(5) != generated(6)


def test_kinds_that_are_left_out_exist() -> None:
    assert kinds_of(",".join(known.KINDS_OF_KNOWN)) == [*known.KINDS_OF_KNOWN]
    with pytest.raises(argparse.ArgumentTypeError, match="no such kind"):
        kinds_of("jvp,no such kind")


def test_results_are_continued_and_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "KNOWN", (known.Known("wrong: old.*", "waits"),))
    results = tmp_path / "results"

    def look(seed: int) -> dict[str, Any]:
        signature = "wrong: new" if seed == 2 else "wrong: old one"
        small = [{"kind": "net", "text": f"net = {seed}"}]
        outcome = verdict.OK if seed == 0 else verdict.WRONG
        return {"seed": seed, "outcome": outcome, "signature": signature, "small": small}

    hunt(look, range(3), results, lambda: False)
    assert list(seeds_left(range(5), results)) == [3, 4]
    hunt(look, range(5), results, lambda: False)
    assert new_findings(results) == ["wrong: new"]
    text = summary(results)
    assert text.index("1 x wrong: new\nNEW") < text.index("3 x wrong: old one\nknown: waits")
    assert "net = 2" in text
