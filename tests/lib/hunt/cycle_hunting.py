"""Runs life cycles by their seeds, and shrinks those that fail."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.lib.hunt import verdict
from tests.lib.hunt.cycle_verdict import signature_of_cycle, verdict_of_cycle
from tests.lib.hunt.cycles import Runner, generated_cycle, parser_options, stages_of, with_stock
from tests.lib.hunt.programs import Program, Statement
from tests.lib.hunt.shrinking import shrunk
from tests.lib.hunt.verdict import Verdict

MOST_TRIALS = 25
"""A trial takes as long as the runs that no other cycle had."""

_LISTED = re.compile(r"^# (model|stage|world|flag)\n(.+)$", re.M)


def cycle_of(text: str) -> Program:
    """The cycle that a file has, as it was printed; without statements if it has none."""
    cycle = Program(tuple(Statement(*found) for found in _LISTED.findall(text)))
    # A user program has statements of the kind "model", too.
    return cycle if "stage" in cycle.kinds else Program(())


class CycleHunt:
    """Life cycles with a checkout of Megatron-LM."""

    def __init__(self, checkout: Path) -> None:
        self.runner = Runner(checkout)
        self.options = parser_options(checkout)

    def judged(self, cycle: Program) -> Verdict:
        """The verdict on a cycle."""
        stages = stages_of(cycle)
        stock = self.runner.done(with_stock(stages))
        if stock.runs and stock.runs[0].status:
            return verdict_of_cycle(stages, stock, stock)  # invalid, whatever the wrapper does
        return verdict_of_cycle(stages, stock, self.runner.done(stages))

    def smallest(self, cycle: Program, found: Verdict) -> Program:
        """The smallest cycle that fails like this one."""

        def fails_alike(smaller: Program) -> bool:
            if not stages_of(smaller):
                return False
            other = self.judged(smaller)
            return (other.outcome, other.signature) == (found.outcome, found.signature)

        return shrunk(cycle, fails_alike, MOST_TRIALS)

    def looked_at(self, seed: int) -> dict[str, Any]:
        """What became of the cycle of a seed: a line of the results."""
        self.runner.forget()
        cycle = generated_cycle(seed, self.options)
        found = self.judged(cycle)
        line: dict[str, Any] = {"seed": seed, "outcome": found.outcome}
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
