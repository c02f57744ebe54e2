"""Measures times and memory of wrappers: interleaved blocks of steps, one wrapper's memory at a
time.

A *block* is a number of steps between two synchronizations; its time per step is one sample. All
ranks start a block together, and the slowest rank's time counts. Within a round every wrapper
runs one block, in an order that rotates from round to round, so that a slow moment of the machine
hits all alike, and ratios are taken within a round.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lib import distributed
from lib.bench_subjects import STEP, Subject
from lib.bench_trace import budget, read_events
from lib.bench_wrappers import Batch, Runner, build, forget_fp8
from lib.data import vocabulary
from lib.distributed import Place
from lib.options import Options

BATCH_POOL = 2
"""Number of batches that a rank cycles through. With few batches the loss falls; with new random
tokens it would not, whatever a wrapper did to the weights."""
HOST_STEPS = 3
"""Steps after the timed ones that time the host's launches, on a GPU."""


@dataclass
class Result:
    """The measurements of one wrapper.

    seconds, floor_seconds: of a step, samples of the same rounds of it and of its floor.
    cpu_seconds: processor time of a step, all threads of the busiest rank; on a shared machine it
    varies less than wall-clock time.
    memory: on a GPU, bytes of this wrapper alone, the largest of any rank: `held` in tensors
    between two steps, without gradients; `peak` in tensors and `reserved` from the device, the
    maxima of the caching allocator.
    host: on a GPU, seconds of the host in forward and backward, and in the optimizer, of a step.
    steps: loss of this rank and gradient norm of each step.
    trace: on the first rank of a GPU run with --profile.
    error: the reason if there are no measurements."""

    subject: Subject
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    floor_seconds: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    host: list[float] | None = None
    steps: list[list[float | None]] = field(default_factory=list)
    trace: dict[str, float] | None = None
    error: str | None = None


class Bench:
    """Measures wrappers in this process group.

    Args:
        given: repetitions, from `benchmark.make_parser`.
        options: those common to all wrappers.
        say: prints a line of progress (first rank only).
        note: called with all results so far whenever one is complete.
    """

    def __init__(
        self,
        given: Namespace,
        options: Options,
        place: Place,
        say: Callable[[str], None],
        note: Callable[[Sequence[Result]], None] = lambda results: None,
    ) -> None:
        self.options = options
        self.given = given
        self.place = place
        self.say = say
        self.note = note
        self.pool = make_batches(options, given.num_microbatches, place)

    def run(self, subjects: Sequence[Subject]) -> list[Result]:
        """Measures all wrappers. A wrapper that cannot run has a result with the error.

        Raises:
            ValueError: a wrapper in a CUDA graph beside others: core has one graph a process.
        """
        names = ",".join(subject.name for subject in subjects if subject.captures == STEP)
        if names and not self.given.isolated:
            raise ValueError(f"--wrappers {names}: core has one CUDA graph. Add --isolated")
        results = [Result(subject) for subject in subjects]
        self._warm_libraries(subjects)
        if self.given.isolated:
            for number, result in enumerate(results, start=1):
                floor = result.subject.floor
                beside = [floor] if floor in subjects and result.subject != floor else []
                # Default arguments, because a closure would see the loop's later values.
                self._attempt(result, lambda r=result, b=beside: self._alone(r, b))
                free_memory(self.place.device)
                self.note(results[:number])
        else:
            self._together(results)
            self.note(results)
        return results

    def _attempt(self, result: Result, task: Callable[[], Any]) -> None:
        """Runs `task()`; sets the error of `result` if it failed on any rank."""
        self.say(f"{result.subject.name}: building, warming up")
        error = None
        try:
            task()
        except Exception as raised:
            error = reason(raised)
            print(
                f"{result.subject.name} failed on rank {self.place.rank}:\n"
                f"{traceback.format_exc()}",
                file=sys.stderr,
                flush=True,
            )
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        result.error = next((one for one in errors if one is not None), None)

    def _alone(self, result: Result, beside: Sequence[Subject]) -> None:
        """Measures one wrapper. beside: its floor, in the same rounds, or nothing."""
        runner = self._probed(result)
        try:
            runners = [runner, *map(self._warm, beside)]
            samples = self._rounds(runners)
            _take(result, samples[0])
            if beside or result.subject == result.subject.floor:
                result.floor_seconds = [clock for clock, _ in samples[-1]]
            del runners
            self._finish(result, runner)
        finally:
            runner.close()

    def _together(self, results: Sequence[Result]) -> None:
        """Measures the memory of each wrapper alone, which also shows if it runs; then the times of
        those that run, together."""
        for result in results:
            self._attempt(result, lambda r=result: self._probed(r).close())
            free_memory(self.place.device)
        able = [result for result in results if result.error is None]
        self.say("all wrappers together: building, warming up")
        runners = [self._warm(result.subject) for result in able]
        for result, runner, mine in zip(able, runners, self._rounds(runners), strict=True):
            _take(result, mine)
            self._finish(result, runner)
        seconds = {result.subject: result.seconds for result in able}
        for result in able:
            result.floor_seconds = seconds.get(result.subject.floor, [])

    def _warm_libraries(self, subjects: Sequence[Subject]) -> None:
        """Runs steps of the bare model in each precision, so that compiled kernels and workspaces
        of libraries do not count as the first wrapper's. One layer suffices, except with
        recomputation, and with experts, for which core keeps per-layer data with the length of the
        first model."""
        if self.place.device.type != "cuda":
            return
        counted = self.options.recompute_granularity or self.options.num_experts
        layers = self.options.num_layers if counted else 1
        options = dataclasses.replace(self.options, num_layers=layers)
        for one in dict.fromkeys(subject.floor for subject in subjects):
            floor = build(one, options, self.place)
            for _ in self.pool:  # a second size of the experts' inputs compiles once more
                self._step(floor)
            del floor  # its memory is freed next
            free_memory(self.place.device)

    def _warm(self, subject: Subject) -> Runner:
        """Builds a wrapper and runs its steps of warm-up."""
        runner = build(subject, self.options, self.place)
        for _ in range(self.given.warmup):
            self._step(runner)
        return runner

    def _probed(self, result: Result) -> Runner:
        """Builds a wrapper, warms it up, and reads its memory. No other wrapper may exist."""
        device = self.place.device
        cuda = torch.cuda
        forget_fp8()
        before = free_memory(device)
        if device.type != "cuda":
            return self._warm(result.subject)
        reserved = cuda.memory_reserved(device)
        cuda.reset_peak_memory_stats(device)
        runner = self._warm(result.subject)
        cuda.synchronize(device)
        found = {
            "peak": cuda.max_memory_allocated(device) - before,
            "reserved": cuda.max_memory_reserved(device) - reserved,
        }
        runner.zero()
        found["held"] = live_bytes(device) - before
        result.memory = {
            kind: int(distributed.largest(count, self.place)) for kind, count in found.items()
        }
        return runner

    def _rounds(self, runners: Sequence[Runner]) -> list[list[tuple[float, float]]]:
        """Samples of each runner, one per round: seconds of wall-clock and of processor time."""
        columns: list[list[tuple[float, float]]] = [[] for _ in runners]
        for number in range(self.given.repeats):
            self.say(f"round {number + 1} of {self.given.repeats}")
            for offset in range(len(runners)):
                index = (number + offset) % len(runners)
                with without_collections():
                    columns[index].append(self._block(runners[index]))
        return columns

    def _block(self, runner: Runner) -> tuple[float, float]:
        """Runs a block; returns seconds of wall-clock and of processor time per step, the largest
        of any rank."""
        self._synchronize()
        started = time.perf_counter()
        cpu_started = time.process_time()
        for _ in range(self.given.steps):
            self._step(runner)
        self._synchronize(barrier=False)
        spent = time.perf_counter() - started, time.process_time() - cpu_started
        clock, cpu = (distributed.largest(one / self.given.steps, self.place) for one in spent)
        return clock, cpu

    def _step(self, runner: Runner) -> None:
        """Runs the next step of `runner`, on its next batch."""
        runner.step(self.pool[len(runner.losses) % len(self.pool)])

    def _synchronize(self, barrier: bool = True) -> None:
        """Waits for the device, and with `barrier` for the other ranks."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)
        if barrier:
            dist.barrier()
            self._synchronize(barrier=False)

    def _finish(self, result: Result, runner: Runner) -> None:
        """Measures the host's times and the trace, after the timed steps, and reads the history."""
        on_gpu = self.place.device.type == "cuda"
        if on_gpu:
            with without_collections():
                samples = [self._launches(runner) for _ in range(HOST_STEPS)]
            columns = [median(column) for column in zip(*samples, strict=True)]
            result.host = [distributed.largest(one, self.place) for one in columns]
        if self.given.profile is not None:
            result.trace = self._profile(runner, Path(self.given.profile), on_gpu)
        result.steps = runner.history()

    def _launches(self, runner: Runner) -> tuple[float, float]:
        """Seconds for the host to launch forward and backward, and the optimizer's step, each on an
        idle device. They include waiting for a full device queue."""
        self._synchronize()
        started = time.perf_counter()
        runner.forward_backward(self.pool[len(runner.losses) % len(self.pool)])
        launched = time.perf_counter() - started
        self._synchronize(barrier=False)
        started = time.perf_counter()
        runner.optimize()
        return launched, time.perf_counter() - started

    def _profile(self, runner: Runner, folder: Path, on_gpu: bool) -> dict[str, float] | None:
        """Traces one step on the first rank and summarizes it on a GPU; other ranks run the same
        step."""
        if not self.place.first:
            self._step(runner)
            return None
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            self._step(runner)
            self._synchronize(barrier=False)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{runner.subject.file_name}.json.gz"
        profiler.export_chrome_trace(str(path))
        return budget(read_events(path)) if on_gpu else None


def _take(result: Result, samples: Sequence[tuple[float, float]]) -> None:
    """Sets the times of a result from its samples."""
    result.seconds = [clock for clock, _ in samples]
    result.cpu_seconds = [cpu for _, cpu in samples]


def make_batches(options: Options, microbatches: int, place: Place) -> list[list[Batch]]:
    """`BATCH_POOL` batches of random tokens, each a list of microbatches. They differ between
    data-parallel ranks, and are the same in each run."""
    generator = torch.Generator().manual_seed(options.seed + 7919 * place.data_parallel_rank)
    samples = options.micro_batch_size
    length = options.seq_length
    device = place.device
    tokens = vocabulary(options).vocab_size
    positions = torch.arange(length, device=device).expand(samples, -1)

    def random_batch() -> Batch:
        text = torch.randint(0, tokens, (samples, length + 1), generator=generator).to(device)
        return {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(samples, length, device=device),
            "position_ids": positions,
        }

    return [[random_batch() for _ in range(microbatches)] for _ in range(BATCH_POOL)]


def live_bytes(device: torch.device) -> int:
    """Bytes in live tensors, by CUDA's allocator; 0 on the CPU, which does not count them."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


@contextmanager
def without_collections() -> Iterator[None]:
    """Runs a block without Python's garbage collection, as Megatron's `--manual-gc` does. A full
    collection takes tenths of a second, in which the other ranks may wait."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def free_memory(device: torch.device) -> int:
    """Collects garbage, frees cached blocks, and returns the remaining bytes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return live_bytes(device)


def reason(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
