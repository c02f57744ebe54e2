"""Checks whether all ranks launched the same collectives.

Collectives are matched by their order. Ranks that use different units, or use them in another
order, therefore add up gradients of unlike parameters, without any error where the units are of
one size. So each launch is folded into a number, which the ranks compare once a step, behind its
last reduction. Only if the numbers differ are the launches themselves exchanged, to name the first
difference. Comparing before each launch was rejected: the host would wait for the device, and for
the slowest rank, in every unit.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron_fsdp_adapter.core.comm.communicator import Communicator
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, REDUCE, Runtime

from .group import ParamGroup

GATHERED, REDUCED = "weights of {} gathered", "gradients of {} reduced"
GATHERED_OUTER, REDUCED_OUTER = GATHERED + " (outer axis)", REDUCED + " (outer axis)"
AGREED = "scales of weights from {} on agreed"

KEPT = 20_000
"""Number of a step's launches that are kept, to name the first difference: 160 kB."""

_MASK, _PRIME = (1 << 64) - 1, 0x100000001B3


@dataclass
class Launched:
    """The launches of one rank in a step: how many, the number that they are folded into (64 bits),
    and the last ones in words."""

    count: int = 0
    folded: int = 0
    last: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, text: str, code: int) -> None:
        self.count += 1
        self.folded = ((self.folded * _PRIME) ^ code) & _MASK
        self.last.append(text)

    def at(self, index: int) -> str:
        """The launch with that number, from 0, in words."""
        if index >= self.count:
            return "nothing more"
        place = index - (self.count - len(self.last))
        return self.last[place] if place >= 0 else "no longer remembered"


@dataclass
class _Comparison:
    """One that was started. table: a row for each communicator: the largest number among its ranks,
    the largest complement, which is that of the smallest, and the largest of each number.
    read: waits for the table."""

    launched: Launched
    numbers: Sequence[int] = ()
    table: torch.Tensor | None = None
    read: Callable[[], list[list[int]]] = list


class LaunchComparison:
    """Args:
    communicators: those of reductions, over each axis. One for each set of ranks is used. In each,
        the ranks compare what was found in the one before, so that what is found in one group of
        ranks is known in all that share weights with it.
    """

    def __init__(self, runtime: Runtime, communicators: Iterable[Communicator]) -> None:
        self._runtime = runtime
        found: dict[tuple[int, ...], Communicator] = {}
        for communicator in communicators:
            if communicator.size > 1:
                found.setdefault(tuple(communicator.ranks), communicator)
        self._communicators = list(found.values())
        self._known: dict[tuple[str, str], tuple[str, int]] = {}
        self._launched = Launched()
        self._started: _Comparison | None = None
        self._last = _Comparison(self._launched)

    def note(self, kind: str, groups: Sequence[ParamGroup], communicator: Communicator) -> None:
        """A collective of `kind`, which carries `groups`, is launched on `communicator`."""
        communicator.carries = groups[0].name
        for group in groups if communicator.size > 1 else ():
            known = self._known.get((kind, group.name))
            if known is None:
                text = kind.format(group.name)
                digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                known = self._known[kind, group.name] = text, int.from_bytes(digest, "big")
            self._launched.add(*known)

    def compare(self, numbers: Sequence[int] = ()) -> None:
        """Behind the last reduction of a step: compares what was launched since the last time.
        numbers: as many numbers on all ranks, of each of which `largest` gives the largest.

        Where the host does not wait for the device, the result is read a step later. A CUDA graph
        takes no part: what is captured has been compared in the steps before, and replays launch
        the same.

        Raises:
            RuntimeError: the launches differ; on all ranks that were compared, with one text.
        """
        launched, self._launched = self._launched, Launched()
        self._last = started = _Comparison(launched, numbers)
        if not self._communicators or self._runtime.is_capturing():
            return
        self._raise_found()
        self._started = started
        stages = (partial(self._compare, started, i) for i in range(len(self._communicators)))
        self._runtime.submit(REDUCE, *stages, partial(self._fetch, started))
        if self._runtime.host_waits:
            self._runtime.wait(COMPUTE, self._runtime.record(REDUCE))
            self._raise_found()

    def largest(self) -> Sequence[int]:
        """The largest over the ranks of each number in the last comparison, once the device has
        it."""
        rows = self._last.read()
        return rows[-1][2:] if rows else self._last.numbers

    def _compare(self, started: _Comparison, stage: int) -> list[Any]:
        if started.table is None:
            size = (len(self._communicators), 2 + len(started.numbers))
            started.table = torch.empty(size, dtype=torch.int64, device=self._runtime.device)
            number = started.launched.folded - (1 << 63)  # as a signed one
            # Arguments of kernels: nothing is copied from the host.
            started.table[0, 0].fill_(number)
            started.table[0, 1].fill_(~number)
            if all(number == 1 for number in started.numbers):
                started.table[0, 2:].fill_(1)
            else:
                started.table[0, 2:].copy_(torch.tensor(started.numbers), non_blocking=True)
        else:
            started.table[stage].copy_(started.table[stage - 1])
        return self._communicators[stage].all_reduce_max(started.table[stage])

    def _fetch(self, started: _Comparison) -> None:
        if started.table is not None:
            started.read = self._runtime.fetch(started.table)

    def _raise_found(self) -> None:
        started, self._started = self._started, None
        found: str | None = None
        for communicator, row in zip(
            self._communicators, started.read() if started else (), strict=False
        ):
            assert started is not None
            if row[0] != ~row[1]:  # so on all of its ranks, which therefore come here together
                every = communicator.all_objects((found, started.launched))
                found = next((text for text, _ in every.values() if text is not None), None)
                found = found or _difference({rank: one for rank, (_, one) in every.items()})
        if found is not None:
            raise RuntimeError(found)


def _difference(every: Mapping[int, Launched]) -> str:
    """Text of the first difference, and what to do about it."""
    count = max(launched.count for launched in every.values())
    lines: list[str] = []
    for index in range(count):
        texts: dict[str, list[int]] = {}
        for rank, launched in every.items():
            texts.setdefault(launched.at(index), []).append(rank)
        if len(texts) > 1:
            lines = [f"  - ranks {ranks}: {text}" for text, ranks in texts.items()]
            break
    return "\n".join((
        "ranks have launched different collectives, so weights or gradients of different units "
        f"are mixed and the step's results are wrong. First difference, launch {index + 1} of "
        f"{count}:",
        *lines,
        "Call the same units in the same order on every rank, and use their outputs in its loss: "
        "call a unit that a rank's data does not need as well, and add its output times 0",
    ))  # fmt: skip
