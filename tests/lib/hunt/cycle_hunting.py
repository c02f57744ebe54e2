"""Runs life cycles by their seeds, and shrinks those that fail."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.lib.hunt import verdict
from tests.lib.hunt.cycle_grammar import (
    ON_GPUS_LAYOUTS,
    ON_GPUS_MODELS,
    ON_GPUS_OURS,
    ON_GPUS_RUNS,
)
from tests.lib.hunt.cycle_verdict import digits, signature_of_cycle, verdict_of_cycle
from tests.lib.hunt.cycles import (
    ON_CPU,
    Done,
    Machine,
    Options,
    Runner,
    Stage,
    generated_cycle,
    parser_options,
    stages_of,
    with_stock,
)
from tests.lib.hunt.programs import Program, Statement
from tests.lib.hunt.shrinking import shrunk
from tests.lib.hunt.verdict import Verdict

ON_GPUS = (*ON_GPUS_MODELS, *ON_GPUS_RUNS, *ON_GPUS_LAYOUTS, *ON_GPUS_OURS)
MOST_TRIALS = 25
"""A trial takes as long as the runs that no other cycle had."""

_LISTED = re.compile(r"^# (model|stage|world|flag|own)\n(.+)$", re.M)


def cycle_of(text: str) -> Program:
    """The cycle that a file has, as it was printed; without statements if it has none."""
    cycle = Program(tuple(Statement(*found) for found in _LISTED.findall(text)))
    # A user program has statements of the kind "model", too.
    return cycle if "stage" in cycle.kinds else Program(())


class CycleHunt:
    """Life cycles with a checkout of Megatron-LM. trials: most smaller cycles after a failure;
    parsers: `parser_options`, if they are known."""

    def __init__(
        self,
        checkout: Path,
        machine: Machine = ON_CPU,
        trials: int = MOST_TRIALS,
        parsers: tuple[Options, Options] | None = None,
    ) -> None:
        self.machine = machine
        self.trials = trials
        self.parsers = parsers or parser_options(checkout, machine)
        self.runner = Runner(checkout, machine.device)

    def sides(self, stages: tuple[Stage, ...]) -> tuple[Done, Done]:
        """The runs with stock DDP, and those with the wrappers that were drawn."""
        stock = self.runner.done(with_stock(stages))
        if stock.runs and stock.runs[0].status:
            return stock, stock  # invalid, whatever the wrapper does
        return stock, self.runner.done(stages)

    def judged(self, cycle: Program) -> Verdict:
        """The verdict on a cycle."""
        stages = stages_of(cycle)
        return verdict_of_cycle(stages, *self.sides(stages), self.machine.device)

    def smallest(self, cycle: Program, found: Verdict) -> Program:
        """The smallest cycle that fails like this one."""

        def fails_alike(smaller: Program) -> bool:
            if not stages_of(smaller):
                return False
            other = self.judged(smaller)
            return (other.outcome, other.signature) == (found.outcome, found.signature)

        return shrunk(cycle, fails_alike, self.trials)

    def looked_at(self, seed: int) -> dict[str, Any]:
        """What became of the cycle of a seed: a line of the results."""
        self.runner.forget()
        begin = time.monotonic()
        cycle = generated_cycle(seed, *self.parsers, self.machine)
        stages = stages_of(cycle)
        stock, ours = self.sides(stages)
        found = verdict_of_cycle(stages, stock, ours, self.machine.device)
        compared, equal = digits(stock, ours)
        line: dict[str, Any] = {
            "seed": seed,
            "outcome": found.outcome,
            "device": self.machine.device,
            "drawn": [one.text for one in cycle.statements],
            "compared": compared,
            "equal": equal,
            "seconds": round(time.monotonic() - begin, 1),
        }
        if found.outcome == verdict.OK:
            return line
        line["signature"] = found.signature
        line["detail"] = found.detail[-2000:]
        if found.outcome in verdict.FINDINGS:
            small = self.smallest(cycle, found)
            line["signature"] = signature_of_cycle(found, small)
            line["small"] = [asdict(one) for one in small.statements]
        elif found.outcome != verdict.INVALID:
            line["small"] = [asdict(one) for one in cycle.statements]
        return line

    def end(self) -> None:
        self.runner.end()


def counts_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """How many numbers of cycles were compared, what became of cycles with each row that is drawn
    on GPUs alone, and why others were not compared; "" if the lines are not of cycles."""
    told = [line for line in lines if "drawn" in line]
    if not told:
        return ""
    compared = sum(line["compared"] for line in told)
    equal = sum(line["equal"] for line in told)
    parts = [f"{compared} numbers compared, {equal} of them equal in every digit"]
    outcomes: dict[str, Counter[str]] = {}
    for line in told:
        for row in ON_GPUS:
            shape = re.escape(row.text).replace(r"\{\}", r"\S+")
            if any(re.fullmatch(shape, text) for text in line["drawn"]):
                outcomes.setdefault(row.text, Counter())[line["outcome"]] += 1
    for text, found in sorted(outcomes.items()):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in found.most_common())
        parts.append(f"{counts:40} {text}")
    # Each finding is printed by itself. What stock DDP does not run is counted here.
    others = Counter(
        f"{line['outcome']}: {line['signature']}"
        for line in told
        if line["outcome"] not in (verdict.OK, *verdict.FINDINGS)
    )
    parts += [f"{count} x {what}" for what, count in others.most_common()]
    return "\n".join(parts)
