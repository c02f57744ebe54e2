"""Times and memory of wrappers: interleaved blocks of steps, one wrapper's memory at a time.

A *block* is a number of steps between two synchronisations; its time per step is one sample. All
ranks start a block together, and the slowest rank's time counts. Within a round every wrapper
runs one block, in an order that rotates from round to round, so that a slow moment of the machine
hits all alike, and ratios are taken within a round.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lib.bench_subjects import Plan, Subject
from lib.bench_trace import Trace, read_trace
from lib.bench_wrappers import Batch, Runner, build, forget_fp8
from lib.data import vocabulary
from lib.distributed import Place
from lib.options import Options

BATCH_POOL = 2
"""Different batches a rank cycles through. Few, so that the model learns them and the loss falls:
on ever new random tokens it would stay at the start, whatever a wrapper did to the weights."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one wrapper alone, the largest of any rank; None where it cannot be known.

    held: in live tensors between two steps, gradients forgotten.
    peak, reserved: the most that the CUDA caching allocator had in tensors, and from the device.
    device: in use on the device, by whatever, after the steps (NCCL's buffers and contexts too).
    """

    held: int
    peak: int | None = None
    reserved: int | None = None
    device: int | None = None


@dataclass(frozen=True)
class Sample:
    """Seconds of a step on the clock, and of processor time."""

    clock: float
    cpu: float


@dataclass
class Result:
    """All that is known of one wrapper. `seconds` and `floor_seconds` are samples of the same
    rounds; `error` tells why there are none. `steps` holds (loss of this rank, norm) of each step.
    `host` is seconds of the host in forward and backward, and in the optimizer, of one step;
    `cpu_seconds` is processor time of one step, all threads of the busiest rank: on a machine that
    others use it is steadier than time on the clock. `trace` is known on the first rank of a GPU
    run that was asked for a profile."""

    subject: Subject
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    floor_seconds: list[float] = field(default_factory=list)
    memory: Memory | None = None
    host: tuple[float, float] | None = None
    steps: list[tuple[float, float | None]] = field(default_factory=list)
    left_behind: int = 0
    trace: Trace | None = None
    error: str | None = None


class Bench:
    """Args:
    options: what all wrappers have in common.
    say: prints a line of progress (first rank only).
    note: is given the results there are, each time one is complete. A run that is cut short has
        told what it knows.
    """

    def __init__(
        self,
        options: Options,
        plan: Plan,
        place: Place,
        say: Callable[[str], None],
        note: Callable[[Sequence[Result]], None] = lambda results: None,
    ) -> None:
        self.options, self.plan, self.place, self.say = options, plan, place, say
        self.note = note
        self.pool = make_batches(options, plan.num_microbatches, place)

    # Pieces

    def step(self, runner: Runner) -> None:
        """The next step of `runner`, on the batch that is next in its own order."""
        runner.step(self.pool[len(runner.losses) % len(self.pool)])

    def synchronize(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)

    def block(self, runner: Runner) -> Sample:
        """One block, on the slowest rank."""
        self.synchronize()
        dist.barrier()
        self.synchronize()
        started, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(self.plan.steps):
            self.step(runner)
        self.synchronize()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
        return Sample(self.largest(seconds / self.plan.steps), self.largest(cpu / self.plan.steps))

    def largest(self, value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64, device=self.place.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def host_times(self, runner: Runner) -> tuple[float, float]:
        """Seconds until the host has launched forward and backward, and the optimizer step, each
        on an idle device: medians. Where the device's queue fills up, its waiting is included."""
        samples = []
        for _ in range(self.plan.host_steps):
            self.synchronize()
            dist.barrier()
            self.synchronize()
            started = time.perf_counter()
            total = runner.forward_backward(self.pool[len(runner.losses) % len(self.pool)])
            launched = time.perf_counter() - started
            self.synchronize()
            started = time.perf_counter()
            norm = runner.optimize()
            samples.append((launched, time.perf_counter() - started))
            runner.losses.append(total[0] / total[1])
            runner.norms.append(norm)
        middle = len(samples) // 2
        forward, optimizer = (sorted(column)[middle] for column in zip(*samples, strict=True))
        return self.largest(forward), self.largest(optimizer)

    def probed(self, subject: Subject) -> tuple[Runner, Memory]:
        """Builds a wrapper, warms it up, and reads its memory: nothing else may be alive."""
        forget_fp8()
        before = free_memory(self.place.device)
        reserved = _reserved(self.place.device)
        runner = build(subject, self.options, self.place)
        if self.place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.place.device)
        for _ in range(self.plan.warmup):
            self.step(runner)
        self.synchronize()
        peaks = _cuda_peaks(self.place.device, before, reserved)
        runner.zero()
        engine = getattr(runner.model, "engine", None)
        if engine is not None:
            engine.gather.updates.settle()  # a step may have returned before its updates are over
        held = live_bytes(self.place.device) - before
        rest = (None if peak is None else int(self.largest(peak)) for peak in peaks)
        return runner, Memory(int(self.largest(held)), *rest)

    def attempt(self, result: Result, task: Callable[[], Any]) -> Any:
        """`task()`, or None with the reason in `result` when it failed on any rank."""
        value, error = None, None
        try:
            value = task()
        except Exception as raised:
            error = reason(raised)
            where = f"{result.subject.name} failed on rank {self.place.rank}"
            print(f"{where}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        result.error = next((one for one in errors if one is not None), None)
        return value if result.error is None else None

    # The two ways to measure

    def run(self, subjects: Sequence[Subject]) -> list[Result]:
        """Measures all of them. A wrapper that cannot run has a result that says why.

        Raises:
            ValueError: a wrapper in a CUDA graph beside others: core has one graph a process.
        """
        captured = [subject.name for subject in subjects if subject.is_captured]
        if captured and not self.plan.isolated:
            names = ",".join(captured)
            raise ValueError(f"--wrappers {names}: core has one CUDA graph; add --isolated")
        results = [Result(subject) for subject in subjects]
        self._measure(results)
        return results

    def _measure(self, results: Sequence[Result]) -> None:
        subjects = [result.subject for result in results]
        self._warm_libraries(subjects)
        if self.plan.isolated:
            for number, result in enumerate(results, start=1):
                floor = result.subject.floor
                self._alone(result, with_floor=floor in subjects and result.subject != floor)
                self.note(results[:number])
        else:
            self._together(results)
            self.note(results)

    def _warm_libraries(self, subjects: Sequence[Subject]) -> None:
        """Steps of the bare model, in each precision: compiled kernels and the libraries'
        workspaces, which stay, would otherwise be counted as the first wrapper's. One layer does
        it, unless recomputation counts them, or core does: what it notes of each layer of experts
        has the length that the first model of the process had."""
        if self.place.device.type != "cuda":
            return
        self.say("warming up libraries")
        counted = self.options.recompute_granularity or self.options.num_experts
        layers = self.options.num_layers if counted else 1
        options = dataclasses.replace(self.options, num_layers=layers)
        for floor_subject in dict.fromkeys(subject.floor for subject in subjects):
            floor = build(floor_subject, options, self.place)
            for _ in self.pool:  # a second size of the experts' inputs compiles once more
                self.step(floor)
            self.synchronize()
            del floor
            free_memory(self.place.device)

    def _alone(self, result: Result, with_floor: bool) -> None:
        """One wrapper, and beside it a floor of its own."""
        self.say(f"{result.subject.name}: building, warming up")
        baseline = free_memory(self.place.device)
        self.attempt(result, lambda: self._alone_samples(result, with_floor))
        result.left_behind = free_memory(self.place.device) - baseline

    def _alone_samples(self, result: Result, with_floor: bool) -> None:
        runner, result.memory = self.probed(result.subject)
        try:
            self._samples_beside_floor(result, runner, with_floor)
        finally:
            runner.close()

    def _samples_beside_floor(self, result: Result, runner: Runner, with_floor: bool) -> None:
        runners = [runner]
        if with_floor:
            floor = build(result.subject.floor, self.options, self.place)
            for _ in range(self.plan.warmup):
                self.step(floor)
            runners.append(floor)
        samples = self._rounds(runners)
        _take(result, samples[0])
        if with_floor or result.subject == result.subject.floor:
            result.floor_seconds = [sample.clock for sample in samples[-1]]
        runners.clear()
        self._finish(result, runner)

    def _together(self, results: Sequence[Result]) -> None:
        """First each wrapper alone, for its memory and to learn whether it runs; then all."""
        for result in results:
            self.say(f"{result.subject.name}: memory")
            baseline = free_memory(self.place.device)
            result.memory = self.attempt(result, lambda r=result: self._probed_and_closed(r))
            result.left_behind = free_memory(self.place.device) - baseline
        able = [result for result in results if result.error is None]
        self.say("all wrappers together: building, warming up")
        runners = [build(result.subject, self.options, self.place) for result in able]
        for runner in runners:
            for _ in range(self.plan.warmup):
                self.step(runner)
        samples = self._rounds(runners)
        for result, runner, mine in zip(able, runners, samples, strict=True):
            _take(result, mine)
            self._finish(result, runner)
        seconds = {result.subject: result.seconds for result in able}
        for result in able:
            result.floor_seconds = seconds.get(result.subject.floor, [])

    def _probed_and_closed(self, result: Result) -> Memory:
        runner, memory = self.probed(result.subject)
        runner.close()
        return memory

    def _rounds(self, runners: Sequence[Runner]) -> list[list[Sample]]:
        """Samples of each runner, one a round."""
        columns: list[list[Sample]] = [[] for _ in runners]
        for number in range(self.plan.repeats):
            self.say(f"round {number + 1} of {self.plan.repeats}")
            for offset in range(len(runners)):
                index = (number + offset) % len(runners)
                columns[index].append(self.block(runners[index]))
        return columns

    def _finish(self, result: Result, runner: Runner) -> None:
        """What is read after the timed steps."""
        if self.place.device.type == "cuda" and self.plan.host_steps:
            result.host = self.host_times(runner)
        if self.plan.profile is not None:
            result.trace = self._profile(runner, self.plan.profile)
        result.steps = runner.history()

    def _profile(self, runner: Runner, folder: Path) -> Trace | None:
        """A trace of one step on the first rank, and what it tells about a GPU; the others take
        the same steps."""
        # Markers tell streams apart, and kernels of a CUDA graph run on streams of its own.
        runner.marked = (
            self.place.device.type == "cuda"
            and self.plan.num_microbatches == 1
            and not runner.subject.is_captured
        )
        if not self.place.first:
            self.step(runner)
            return None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.place.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            self.step(runner)
            self.synchronize()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file_name(runner.subject)}.json.gz"
        profiler.export_chrome_trace(str(path))
        return read_trace(path) if self.place.device.type == "cuda" else None


def file_name(subject: Subject) -> str:
    """Of what is written about one wrapper, without an ending."""
    return re.sub(r"[:@/]", "-", subject.name)


def _take(result: Result, samples: Sequence[Sample]) -> None:
    result.seconds = [sample.clock for sample in samples]
    result.cpu_seconds = [sample.cpu for sample in samples]


def make_batches(options: Options, microbatches: int, place: Place) -> list[list[Batch]]:
    """`BATCH_POOL` batches of random tokens, other ones on each rank, the same in each run."""
    generator = torch.Generator().manual_seed(options.seed + 7919 * place.data_parallel_rank)
    shape = (options.micro_batch_size, options.seq_length + 1)
    tokens = vocabulary(options).vocab_size
    positions = torch.arange(options.seq_length, device=place.device)

    def one() -> Batch:
        text = torch.randint(0, tokens, shape, generator=generator).to(place.device)
        return {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape[0], options.seq_length, device=place.device),
            "position_ids": positions.expand(shape[0], -1),
        }

    return [[one() for _ in range(microbatches)] for _ in range(BATCH_POOL)]


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _cuda_peaks(
    device: torch.device, before: int, reserved: int
) -> tuple[int | None, int | None, int | None]:
    """(allocated, reserved, in use on the device), less what another wrapper had left behind."""
    if device.type != "cuda":
        return None, None, None
    free, total = torch.cuda.mem_get_info(device)
    return (
        torch.cuda.max_memory_allocated(device) - before,
        torch.cuda.max_memory_reserved(device) - reserved,
        total - free - reserved,
    )


def live_bytes(device: torch.device) -> int:
    """Bytes in live tensors: the allocator's count on CUDA; on the host the storages of all
    tensors that Python's collector knows, each once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    storages: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects of torch warn when they are looked at
        tensors = [value for value in gc.get_objects() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        _note_storage(tensor, storages)
        if tensor.is_leaf:
            _note_storage(tensor.grad, storages)
    return sum(storages.values())


def _note_storage(tensor: torch.Tensor | None, storages: dict[int, int]) -> None:
    local = getattr(tensor, "_local_tensor", tensor)
    if local is None or local.device.type != "cpu" or local.layout != torch.strided:
        return
    storage = local.untyped_storage()
    if storage.nbytes() > 0:
        storages[storage.data_ptr()] = storage.nbytes()


def free_memory(device: torch.device) -> int:
    """Collects what is no longer reachable, returns cached blocks, and counts what is left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return live_bytes(device)


def reason(error: Exception) -> str:
    """One line that tells what is wrong."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def as_plain(result: Result) -> dict[str, Any]:
    """For JSON."""
    values = dataclasses.asdict(result)
    values["subject"] = result.subject.name
    return values
