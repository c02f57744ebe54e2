"""Life cycles of `python -m tests.hunt cycles`: how they are drawn, judged and shrunk."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.lib.hunt import cycle_hunting, verdict
from tests.lib.hunt.cycle_grammar import (
    LAYOUTS,
    MODELS,
    ON_GPUS_LAYOUTS,
    ON_GPUS_MODELS,
    ON_GPUS_OURS,
    ON_GPUS_RUNS,
    RUNS,
    SCHEDULES,
    STOCK,
    TE,
    Flags,
)
from tests.lib.hunt.cycle_hunting import CycleHunt, counts_of, cycle_of
from tests.lib.hunt.cycle_verdict import BOTH_STOP, STOCK_STOPS, digits, verdict_of_cycle
from tests.lib.hunt.cycles import (
    ON_CPU,
    Done,
    Machine,
    Stage,
    drawn,
    generated_cycle,
    has_saved,
    known_rows,
    parser_options,
    stages_of,
    with_stock,
)
from tests.lib.hunt.jobs import lines_of
from tests.lib.hunt.programs import Program, Statement, listing
from tests.lib.integration.lm_runs import Run

CHECKS = ("checkpoint/convert/conversion.py", "megatron/checkpoint/megatron_saves.py")

EVERY_OPTION: dict[str, list[str] | None] = {
    word: ["one", "two"] if row.values is None else None
    for row in (*MODELS, *RUNS, *SCHEDULES, *LAYOUTS, *cycle_hunting.ON_GPUS)
    for word in row.text.split()
    if word.startswith("--")
}
"""As if Megatron's parser had all flags of the tables."""

CYCLE = Program(
    (
        Statement("model", "--swiglu"),
        Statement("stage", "optim kill"),
        Statement("flag", "--lr 1"),
        Statement("stage", "stock exit"),
        Statement("world", "4"),
        Statement("flag", "--seed 7"),
    )
)


def log(loss: float, iteration: int = 2) -> str:
    return f" iteration {iteration}/ 6 | lm loss: {loss:.6E} | grad norm: 1.0 |"


def failed(error: str, place: str = "/lib/torch/a.py") -> Run:
    return Run(1, f'  File "{place}", line 3, in load\n[rank0]: {error}\n')


def test_a_cycle_is_drawn_from_flags_that_the_parser_knows() -> None:
    for seed in range(50):
        stages = stages_of(generated_cycle(seed, EVERY_OPTION))
        assert 2 <= len(stages) <= 3
        assert {stage.world for stage in stages} <= {1, 2, 4}
    without = {name: known for name, known in EVERY_OPTION.items() if name != "--lr"}
    rows = known_rows(SCHEDULES, without)
    assert len(SCHEDULES) - len(rows) == sum("--lr " in row.text for row in SCHEDULES)
    choices: dict[str, list[str] | None] = {"--style": ["a", "b"]}
    texts = {drawn(Flags("--style {}", 1, ("b", "c")), choices, random.Random(n)) for n in range(9)}
    assert texts == {"--style b"}


def test_flags_are_drawn_with_those_that_they_need_and_without_those_that_they_exclude() -> None:
    seen = set()
    for seed in range(400):
        cycle = generated_cycle(seed, EVERY_OPTION)
        for stage in stages_of(cycle):
            words = " ".join(stage.flags).split()
            seen.update(words)
            has_experts = "--num-experts" in words
            assert has_experts or "--expert-model-parallel-size" not in words
            assert not has_experts or "--tensor-model-parallel-size" not in words
            assert stage.world > 1 or not any("parallel-size" in word for word in words)
        assert "--use-checkpoint-args" not in stages_of(cycle)[0].flags
    assert {"--expert-model-parallel-size", "--use-checkpoint-args", "--num-experts"} <= seen


def test_what_a_machine_lacks_is_not_drawn() -> None:
    def statements_on(machine: Machine) -> list[tuple[str, str]]:
        cycles = [generated_cycle(seed, EVERY_OPTION, EVERY_OPTION, machine) for seed in range(150)]
        return [(one.kind, one.text) for cycle in cycles for one in cycle.statements]

    words_of = {
        name: {*" ".join(text for _, text in statements_on(machine)).split()}
        for name, machine in {
            "cpu": ON_CPU,
            "one GPU": Machine("cuda", 1),
            "GPUs": Machine("cuda", 2, frozenset({TE})),
        }.items()
    }
    assert not {"--fsdp-double-buffer", "--sequence-parallel"} & words_of["cpu"]
    assert not {"--te-rng-tracker", "--sequence-parallel"} & words_of["one GPU"]
    wanted = {"--fsdp-double-buffer", "--te-rng-tracker", "--sequence-parallel", "--fp8-recipe"}
    assert wanted <= words_of["GPUs"]
    worlds = {text for kind, text in statements_on(Machine("cuda", 2)) if kind == "world"}
    assert worlds == {"1", "2"}


def test_flags_of_ours_are_drawn_for_its_own_runs_and_left_out_with_stock() -> None:
    machine = Machine("cuda", 2, frozenset({TE}))
    seen = 0
    for seed in range(150):
        cycle = generated_cycle(seed, EVERY_OPTION, EVERY_OPTION, machine)
        assert cycle_of(listing(cycle.statements)) == cycle
        stages = stages_of(cycle)
        seen += sum(bool(stage.own) for stage in stages)
        assert not any(stage.own for stage in stages if stage.wrapper == STOCK)
        assert not any(stage.own for stage in with_stock(stages))
    assert seen > 50


def test_a_printed_cycle_is_read_again() -> None:
    assert cycle_of(listing(CYCLE.statements)) == CYCLE
    assert cycle_of("net = Net()\n").statements == ()
    first, second = stages_of(CYCLE)
    assert first == Stage("optim", 2, "kill", ("--swiglu", "--lr 1"))
    assert second == Stage(STOCK, 4, "exit", ("--swiglu", "--seed 7"))
    assert {stage.wrapper for stage in with_stock((first, second))} == {STOCK}


def test_the_log_says_what_was_saved() -> None:
    text = "  successfully saved checkpoint from iteration       2 to /root"
    assert has_saved(text, 2)
    assert not has_saved(text, 4)


PRINTED = Run(
    1,
    "--use-megatron-fsdp cannot be used with this configuration:\n  - lr=1: it differs. Use 2\n",
)
REFUSAL = "ValueError: lr=1: differs from 2. Use 2"
OWN = "/site/megatron_fsdp_adapter/checkpoint/a.py"
OTHER = "RuntimeError: shapes differ"


@pytest.mark.parametrize(
    ("stock", "ours", "outcome"),
    [
        ([Run(0, log(5.0))], [Run(0, log(5.0))], verdict.OK),
        ([Run(0, log(5.0))], [Run(0, log(5.001))], verdict.WRONG),
        ([Run(0, log(5.0))], [Run(0, log(5.0, iteration=3))], verdict.WRONG),
        ([failed(OTHER)], [], verdict.INVALID),
        ([Run(0, log(5.0))], [failed(REFUSAL, OWN)], verdict.REFUSED),
        ([Run(0, log(5.0))], [PRINTED], verdict.REFUSED),
        ([Run(0, log(5.0))], [Run(1, "killed")], verdict.ERROR),
        ([Run(0, log(5.0))], [failed(REFUSAL)], verdict.ERROR),
        ([Run(0, log(5.0))], [failed(OTHER, OWN)], verdict.ERROR),
        ([Run(0, log(5.0))], [Run(-1, "")], verdict.HANG),
        ([Run(0, ""), failed(OTHER)], [Run(0, ""), Run(0, "")], STOCK_STOPS),
        ([Run(0, "exiting ...")], [Run(0, log(5.0))], STOCK_STOPS),
        ([Run(0, ""), failed(OTHER)], [Run(0, ""), failed(OTHER)], BOTH_STOP),
    ],
)
def test_a_cycle_is_judged(stock: list[Run], ours: list[Run], outcome: str) -> None:
    stages = stages_of(CYCLE)[: len(stock)]
    is_invalid = outcome == verdict.INVALID
    found = verdict_of_cycle(stages, Done(stock), Done(stock if is_invalid else ours))
    assert found.outcome == outcome


@pytest.mark.parametrize(
    ("device", "flags", "loss", "outcome"),
    [
        ("cpu", (), 5.0003, verdict.WRONG),
        ("cuda", (), 5.0003, verdict.OK),
        ("cuda", (), 5.001, verdict.WRONG),
        ("cuda", ("--bf16", "--fp8-format hybrid"), 5.1, verdict.OK),
    ],
)
def test_bounds_depend_on_device_and_dtype(
    device: str, flags: tuple[str, ...], loss: float, outcome: str
) -> None:
    stages = [Stage("optim", 1, "exit", flags)]
    sides = Done([Run(0, log(5.0))]), Done([Run(0, log(loss))])
    assert verdict_of_cycle(stages, *sides, device).outcome == outcome
    assert digits(*sides) == (2, 1)  # the loss, and the norm


def test_norms_of_weights_that_megatron_takes_otherwise_are_left_out() -> None:
    """Only those: with bf16 and two optimizer instances, stock's norm is sqrt(2) of the model's; in
    fp32, with gathers in the next forward, it is that of older weights."""
    flags = "--bf16", "--num-distributed-optimizer-instances 2"
    late = ("--overlap-param-gather",)
    line = "iteration 1/ 4 | lm loss: {loss} | params norm: {norm} |"
    stock = Done([Run(0, line.format(loss=5.0, norm=27.2))])
    for given, loss, outcome in (
        (flags, 5.0, verdict.OK),
        (flags, 6.0, verdict.WRONG),
        (flags[:1], 5.0, verdict.WRONG),
        (late, 5.0, verdict.OK),
        (late, 6.0, verdict.WRONG),
        ((*late, "--bf16"), 5.0, verdict.WRONG),
    ):
        ours = Done([Run(0, line.format(loss=loss, norm=19.2))])
        found = verdict_of_cycle([Stage("optim", 2, "exit", given)], stock, ours)
        assert found.outcome == outcome


@pytest.mark.parametrize(
    ("text", "outcome"),
    [("KeyError: 'x'", verdict.ERROR), ("ValueError: a=1: no. Use 2", verdict.REFUSED)],
)
def test_a_failed_conversion_is_an_error_or_a_refusal(text: str, outcome: str) -> None:
    ours = Done([Run(0, "")], converting=text)
    found = verdict_of_cycle(stages_of(CYCLE), Done([Run(0, "")] * 2), ours)
    assert found.outcome == outcome
    assert found.signature.startswith("convert: ")


class FaultyRunner:
    """Runs in which the wrapper loses a rate that changes, and prints what it has computed."""

    def __init__(self, checkout: Path, device: str) -> None:
        self.chains = 0

    def done(self, stages: Any) -> Done:
        self.chains += 1
        is_wrong = len(stages) > 1 and "--lr 2" in stages[1].flags and stages[1].wrapper != STOCK
        return Done(
            [Run(0, log(6.0 if is_wrong and stage == stages[1] else 5.0)) for stage in stages]
        )

    def forget(self) -> None:
        return None


def test_a_lost_flag_is_found_and_the_cycle_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycle_hunting, "Runner", FaultyRunner)
    monkeypatch.setattr(cycle_hunting, "parser_options", lambda *given: (EVERY_OPTION,) * 2)
    cycle = Program(
        tuple(
            Statement(kind, text)
            for kind, text in (
                ("model", "--swiglu"),
                ("stage", "optim exit"),
                ("flag", "--lr 1"),
                ("world", "4"),
                ("stage", "optim exit"),
                ("world", "1"),
                ("flag", "--lr 2"),
                ("flag", "--clip-grad 1.0"),
                ("stage", "stock exit"),
            )
        )
    )
    monkeypatch.setattr(cycle_hunting, "generated_cycle", lambda seed, *given: cycle)
    line = CycleHunt(Path()).looked_at(0)
    assert line["signature"] == "wrong: optim > optim: --lr"
    assert [one["text"] for one in line["small"]] == ["optim exit", "optim exit", "--lr 2"]


class FaultyHunter:
    """Raises at seed 3, and is killed at seed 5."""

    def looked_at(self, seed: int) -> dict[str, Any]:
        if seed == 3:
            raise TypeError("three")
        if seed == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"seed": seed, "outcome": verdict.OK}

    def end(self) -> None:
        return None


def test_seeds_at_once_have_the_lines_that_they_have_one_after_another() -> None:
    found = {line["seed"]: line for line in lines_of(FaultyHunter, 3, range(9), lambda: False)}
    assert sorted(found) == [*range(9)]
    assert found.pop(3)["signature"] == "the hunt itself: TypeError: three"
    assert found.pop(5)["outcome"] == verdict.CRASH
    hunter = FaultyHunter()
    assert found == {seed: hunter.looked_at(seed) for seed in found}


def test_no_seed_is_begun_when_the_time_is_over() -> None:
    assert [*lines_of(FaultyHunter, 2, range(3), lambda: True)] == []


def test_a_summary_says_what_became_of_rows_for_gpus() -> None:
    drawn_texts = ["--bf16", "--fsdp-unsharded-budget-gib auto"]
    lines: list[dict[str, Any]] = [
        {"outcome": outcome, "drawn": drawn_texts, "compared": 4, "equal": 3}
        for outcome in (verdict.OK, verdict.OK, verdict.WRONG)
    ]
    lines.append({**lines[0], "outcome": verdict.INVALID, "signature": "a b", "drawn": []})
    first, *rest, last = counts_of(lines).splitlines()
    assert first == "16 numbers compared, 12 of them equal in every digit"
    assert last == "1 x invalid: a b"
    assert [line.split() for line in rest] == [
        ["2", "ok,", "1", "wrong", "--bf16"],
        ["2", "ok,", "1", "wrong", "--fsdp-unsharded-budget-gib", "{}"],
    ]
    assert counts_of([{"seed": 1, "outcome": verdict.OK}]) == ""


@pytest.mark.full
def test_the_checkouts_parser_knows_all_rows_for_gpus() -> None:
    checkout = os.environ.get("MEGATRON_LM_PATH")
    if checkout is None:
        pytest.skip("needs MEGATRON_LM_PATH, a checkout of Megatron-LM")
    stock, ours = parser_options(Path(checkout).resolve())
    rows = (*ON_GPUS_MODELS, *ON_GPUS_RUNS, *ON_GPUS_LAYOUTS)
    assert known_rows(rows, stock, {TE}) == [*rows]
    assert known_rows(ON_GPUS_OURS, ours) == [*ON_GPUS_OURS]


@pytest.mark.full
def test_a_resume_in_another_layout_equals_stock() -> None:
    checkout = os.environ.get("MEGATRON_LM_PATH")
    if checkout is None:
        pytest.skip("needs MEGATRON_LM_PATH, a checkout of Megatron-LM")
    hunter = CycleHunt(Path(checkout).resolve())
    cycle = Program(
        (
            Statement("model", "--swiglu"),
            Statement("stage", "optim_grads_params kill"),
            Statement("stage", "stock exit"),
            Statement("stage", "optim exit"),
            Statement("flag", "--tensor-model-parallel-size 2"),
        )
    )
    try:
        found = hunter.judged(cycle)
    finally:
        hunter.end()
    assert found.outcome == verdict.OK, found.detail
