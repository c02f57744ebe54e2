"""Of what all tests for GPUs consist, how much memory and time each part takes, and what a journal
says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lib.gpu.journal import FAILED, PASSED, SKIPPED

ROOT = Path(__file__).resolve().parents[3]
GIB = 24
"""Of device memory, for all ranks of a file and their contexts, where a row says no more."""
ALONE = 1000
"""For files that read the device's memory, look at when kernels run, or fill the device."""
MEMORY: Mapping[str, int] = {
    "test_gpu_estimate": ALONE, "test_gpu_experts": 34, "test_gpu_fp8": 40,
    "test_gpu_fp8_params": 40, "test_gpu_fully_shard": 60, "test_gpu_graphs": 46,
    "test_gpu_changed_models": 50, "test_gpu_cycles": 8, "test_gpu_layer_graphs": 46,
    "test_gpu_matrix": 95,
    "test_gpu_memory": 40, "test_gpu_offload": 118, "test_gpu_optimizer": 70,
    "test_gpu_precision": 93, "test_gpu_pretrain_gpt": 14, "test_gpu_slots": 55,
    "test_gpu_units": 48, "test_gpu_wgrad": 16, "test_gpu_wide": 128,
}  # fmt: skip
SECONDS: Mapping[str, float] = {
    "test_gpu_experts": 110, "test_gpu_fp8_weights": 85, "test_gpu_graphs": 120,
    "test_gpu_memory": 120, "test_gpu_numerics": 120, "test_gpu_optimizer": 130,
    "test_gpu_precision": 105, "test_gpu_pretrain_gpt": 117, "test_gpu_slots": 118,
    "test_gpu_wide": 123, "test_gpu_changed_models": 140, "test_gpu_fp8": 125,
    "test_gpu_fp8_params": 140, "test_gpu_layer_graphs": 150, "test_gpu_offload": 150,
    "test_gpu_wgrad": 140, "test_gpu_estimate": 120, "test_gpu_matrix": 400,
    "test_gpu_fully_shard": 170,
}  # fmt: skip
"""Guesses, for files of which no journal knows better. Only the order follows from them."""
USUAL_S = 75.0
LIMITS: Mapping[str, float] = {"test_gpu_estimate": 400}
"""Seconds that one test may take, where it is more than usual."""
ATTEMPTS = 2
"""How often a test is begun that does not end."""

HUNG = "hung"
UNREACHED = "not reached"


@dataclass
class Known:
    """Of one test: its outcome, how often it was begun since without one, and whether it failed
    since the device had no memory left."""

    outcome: str | None = None
    lacked_memory: bool = False
    attempts: int = 0
    seconds: float = 0.0
    why: str = ""

    @property
    def state(self) -> str:
        if self.outcome is not None:
            return self.outcome
        return HUNG if self.attempts >= ATTEMPTS else UNREACHED


@dataclass
class Shard:
    """A file of tests; what is known of its tests, by name, and `listed`: whether these are all of
    it. `broken`: how often its process ended before. `measured_gib`: the most memory that its
    processes had, 0 if not known. `alone`: whether it ran out of memory beside others, and has to
    run once more by itself."""

    name: str
    tests: dict[str, Known] = field(default_factory=dict)
    listed: bool = False
    broken: int = 0
    measured_gib: int = 0
    alone: bool = False

    @property
    def path(self) -> str:
        return f"tests/gpu/{self.name}.py"

    @property
    def gib(self) -> int:
        table = MEMORY.get(self.name, GIB)
        return ALONE if self.alone else max(table, self.measured_gib)

    @property
    def seconds(self) -> float:
        return sum(known.seconds for known in self.tests.values())

    @property
    def expected_s(self) -> float:
        if self.is_over:
            return self.seconds
        return SECONDS.get(self.name, USUAL_S)

    @property
    def unreached(self) -> list[str]:
        """Tests that have no outcome; those that were begun already are last."""
        left = [name for name, known in self.tests.items() if known.state == UNREACHED]
        return sorted(left, key=lambda name: self.tests[name].attempts)

    @property
    def is_over(self) -> bool:
        return (self.listed and not self.unreached) or self.broken >= ATTEMPTS

    def counts(self) -> Counter[str]:
        found = Counter(known.state for known in self.tests.values())
        if not self.listed:
            found[HUNG if self.broken >= ATTEMPTS else UNREACHED] += 1
        return found


def all_shards() -> dict[str, Shard]:
    names = [path.stem for path in sorted((ROOT / "tests/gpu").glob("test_*.py"))]
    return {name: Shard(name) for name in names}


def shard_of(test: str) -> str:
    return Path(test.partition("::")[0]).stem


def learn(shards: Mapping[str, Shard], lines: Iterable[Mapping[str, Any]]) -> None:
    """Fills in what a journal says, line by line."""
    for line in lines:
        shard = shards.get(line.get("shard", shard_of(line.get("test", ""))))
        if shard is None:
            continue
        if "ended" in line:
            shard.broken += int(line["idle"])
            shard.measured_gib = max(shard.measured_gib, line.get("gib", 0))
            if line.get("beside", 0):
                _repeat_without_others(shard)
        elif "again" in line:
            _forget(shard)
        else:
            _learn(shard.tests.setdefault(line["test"], Known()), line)
            shard.listed = True


def _learn(known: Known, line: Mapping[str, Any]) -> None:
    if "begun" in line:
        known.outcome, known.attempts = None, known.attempts + 1
    elif "outcome" in line:
        known.outcome = line["outcome"]
        known.attempts = 0
        known.seconds = line["seconds"]
        known.why = line["why"]
        known.lacked_memory = line.get("lacked_memory", False)


def _repeat_without_others(shard: Shard) -> None:
    """Failures for lack of memory beside other files say nothing of what is tested."""
    for name, known in shard.tests.items():
        if known.state == FAILED and known.lacked_memory:
            shard.tests[name] = Known()
            shard.alone = True


def _forget(shard: Shard) -> None:
    """What failed or hung is as if it had never run."""
    shard.broken = 0
    for name, known in list(shard.tests.items()):
        if known.state in (FAILED, HUNG):
            shard.tests[name] = Known()
            if name.endswith("::collection"):
                del shard.tests[name]
    shard.listed = bool(shard.tests)


def in_order(shards: Iterable[Shard]) -> list[Shard]:
    """What is left to run: what is quick first, and what must be alone last."""
    left = [shard for shard in shards if not shard.is_over]
    return sorted(left, key=lambda shard: (shard.gib >= ALONE, shard.expected_s, shard.name))


def next_of(left: list[Shard], running: list[Shard], jobs: int, memory_gib: float) -> Shard | None:
    """The first for which there is room beside those that run; one that nothing is beside may be
    larger than the device."""
    if len(running) >= jobs or any(shard.gib >= ALONE for shard in running):
        return None
    used = sum(shard.gib for shard in running)
    return next((s for s in left if not running or used + s.gib <= memory_gib), None)


def table(shards: Iterable[Shard]) -> str:
    """What became of everything: a row for each file, then what did not pass, and reasons."""
    chosen = list(shards)
    columns = (PASSED, FAILED, HUNG, SKIPPED, UNREACHED)
    width = max(len(shard.name) for shard in chosen)
    lines = ["  ".join([" " * width, *(f"{name:>11}" for name in columns), "    seconds"])]
    total: Counter[str] = Counter()
    for shard in chosen:
        counts = shard.counts()
        total += counts
        numbers = [f"{counts[name] or '':>11}" for name in columns]
        more = "  (its tests are not known)" if not shard.listed else ""
        lines.append("  ".join([f"{shard.name:{width}}", *numbers, f"{shard.seconds:11.0f}{more}"]))
    seconds = sum(shard.seconds for shard in chosen)
    numbers = [f"{total[name]:>11}" for name in columns]
    lines.append("  ".join([f"{'all':{width}}", *numbers, f"{seconds:11.0f}"]))
    reasons: Counter[str] = Counter()
    for shard in chosen:
        for name, known in shard.tests.items():
            if known.state in (FAILED, HUNG):
                lines.append(f"{known.state.upper()} {name}: {known.why}")
            if known.state == SKIPPED:
                reasons[f"{shard.name}: {known.why}"] += 1
    lines += [f"skipped {count:3}  {why}" for why, count in sorted(reasons.items())]
    return "\n".join(lines)


def is_clean(shards: Iterable[Shard]) -> bool:
    """Whether nothing failed, hung, or was left out."""
    return not any(shard.counts()[state] for shard in shards for state in (FAILED, HUNG, UNREACHED))
