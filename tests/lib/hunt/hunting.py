"""Runs programs by their seeds, shrinks those that fail, and writes down what became of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.lib.gpu import journal
from tests.lib.hunt import known, verdict
from tests.lib.hunt.pair import Pair
from tests.lib.hunt.programs import Program, Statement, generated, listing
from tests.lib.hunt.shrinking import MOST_TRIALS, shrunk
from tests.lib.hunt.verdict import Verdict

QUIET_S = 10.0
"""Ranks that compute nothing for so long hang."""
ENOUGH = 2
FEW_TRIALS = 40
"""For failures that take seconds each, as a rank waits."""
OURS = ("unsharded", "ours")
TORCH = ("unsharded", "torch")


class Hunt:
    """Programs on one pair of ranks. fault: of `FAULTS`; quiet: seconds without
    computing after which a program hangs;
    without: kinds of statements that no program has; device: "cpu" or "cuda"."""

    def __init__(
        self,
        fault: str | None = None,
        quiet: float = QUIET_S,
        without: Collection[str] = (),
        device: str = "cpu",
    ) -> None:
        self.without = without
        self.pair = Pair(fault, device)
        self.quiet = quiet
        # How often an error has been found: its program is shrunk a few times alone.
        self.seen: Counter[str] = Counter()

    def end(self) -> None:
        """Ends the ranks."""
        self.pair.end()

    def judged(self, program: Program, sides: tuple[str, str] = OURS) -> Verdict:
        """The verdict on a program."""
        return verdict.verdict_of(self.pair.run(program.text, sides, self.quiet))

    def judged_anew(self, program: Program) -> Verdict:
        """The verdict of a pair that has run nothing else."""
        self.pair.end()
        return self.judged(program)

    def smallest(self, program: Program, found: Verdict) -> Program:
        """The smallest program that fails like this one."""

        def fails_alike(smaller: Program) -> bool:
            other = self.judged(smaller)
            return (other.outcome, other.signature) == (found.outcome, found.signature)

        waits = found.outcome == verdict.HANG or "on one rank" in found.signature
        return shrunk(program, fails_alike, FEW_TRIALS if waits else MOST_TRIALS)

    def looked_at(self, seed: int) -> dict[str, Any]:
        """What became of the program of a seed: a line of the results."""
        program = generated(seed, self.without)
        found = self.judged(program)
        line: dict[str, Any] = {"seed": seed, "outcome": found.outcome}
        if found.outcome in (verdict.INVALID, verdict.REFUSED):
            line["signature"] = found.signature
        if found.outcome not in verdict.FINDINGS:
            return line
        alone = self.judged_anew(program)
        if alone.outcome not in verdict.FINDINGS:
            # Programs that ran before it on the same ranks, or the load, were the cause.
            return {
                **line,
                "outcome": "unsteady",
                "signature": found.signature,
                "detail": found.detail,
            }
        self.seen[alone.signature] += 1
        if not verdict.has_many_causes(alone) and self.seen[alone.signature] > ENOUGH:
            return {**line, "outcome": alone.outcome, "signature": alone.signature}
        small = self.smallest(program, alone)
        last = self.judged_anew(small)
        return {
            **line,
            "outcome": alone.outcome,
            "signature": verdict.signature_of(alone, small),
            "detail": (last if last.outcome == alone.outcome else alone).detail,
            "small": [asdict(one) for one in small.statements],
            "torch": self._by_torch(small),
        }

    def _by_torch(self, small: Program) -> str:
        """What torch's FSDP2 makes of a program."""
        if "fully_shard_model" in small.text:
            return "has no such door"
        found = self.judged(small, TORCH)
        return " ".join([found.outcome, found.signature]).strip()


def seeds_left(seeds: Iterable[int], results: Path) -> Iterator[int]:
    """Those of which the results have no line."""
    done = {line.get("seed") for line in journal.read(results)}
    return (seed for seed in seeds if seed not in done)


def hunt(
    look: Callable[[int], dict[str, Any]],
    seeds: Iterable[int],
    results: Path,
    is_over: Callable[[], bool],
) -> None:
    """Looks at the seeds that are left until `is_over`, and writes a line for each."""
    for seed in seeds_left(seeds, results):
        if is_over():
            return
        write(look(seed), results)


def write(line: dict[str, Any], results: Path) -> None:
    """Adds a line to the results, and prints a finding."""
    results.parent.mkdir(parents=True, exist_ok=True)
    journal.note(results, **line)
    if line["outcome"] in verdict.FINDINGS:
        print(told(line), flush=True)


def small_of(line: dict[str, Any]) -> Program:
    """The smallest program of a line of results."""
    return Program(tuple(Statement(**one) for one in line.get("small", ())))


def told(line: dict[str, Any]) -> str:
    """A finding for a reader; a file with this text is a program that runs alone."""
    program = small_of(line)
    head = [f"seed {line['seed']}: {line['signature']}"]
    head += [f"torch's FSDP2: {line['torch']}"] if "torch" in line else []
    head += line.get("detail", "").splitlines()[-6:]
    comments = "\n".join(f"# {text}" for text in head)
    return f"{comments}\n{listing(program.statements)}\n"


def summary(results: Path) -> str:
    """Counts of outcomes, and of each signature the smallest program; new findings first."""
    lines = journal.read(results)
    counts = Counter(line["outcome"] for line in lines)
    parts = [", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())]
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["outcome"] in verdict.FINDINGS:
            groups.setdefault(line["signature"], []).append(line)
    order = sorted(groups, key=lambda one: (known.reason_for(one) is not None, -len(groups[one])))
    for signature in order:
        smallest = min(groups[signature], key=lambda line: len(line.get("small", ())) or math.inf)
        reason = known.reason_for(signature)
        state = f"known: {reason}" if reason else "NEW"
        parts.append(f"{len(groups[signature])} x {signature}\n{state}\n{told(smallest)}")
    return "\n\n".join(parts)


def new_findings(results: Path) -> list[str]:
    """Signatures of findings that are not known."""
    found = {
        line["signature"] for line in journal.read(results) if line["outcome"] in verdict.FINDINGS
    }
    return sorted(one for one in found if known.reason_for(one) is None)
