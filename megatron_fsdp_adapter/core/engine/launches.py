"""Checks whether all ranks launched the same collectives.

Collectives are matched by their order. Ranks that use different units, or use them in another
order, therefore add up gradients of unlike parameters, without any error where the units are of
one size. So each launch is folded into a number (`LaunchLog`), which the ranks compare once a step,
behind its last reduction. Only if the numbers differ are the launches themselves exchanged, to name
the first difference. Comparing before each launch was rejected: the host would wait for the device,
and for the slowest rank, in every unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_fsdp_adapter.core.comm.communicator import (
    CommunicationError,
    Communicator,
    Launched,
    LaunchLog,
)
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, REDUCE, Runtime

GATHERED = "weights of {} gathered"
REDUCED = "gradients of {} reduced"
GATHERED_OUTER = "weights of {} gathered (outer axis)"
FEWER = "weights of {} gathered (fewer ranks)"
REDUCED_OUTER = "gradients of {} reduced (outer axis)"
AGREED = "scales of weights from {} on agreed"

CAUSE_S = 10.0
"""After an exchange has failed, this rank's watch has so much time to say why."""


@dataclass
class _Comparison:
    """A comparison that was started."""

    # What is compared.
    launched: Launched
    # This rank's numbers. The largest of each over the ranks is asked for.
    numbers: Sequence[int] = ()
    # A row for each communicator. Among its ranks: the largest `Launched.folded`; the largest
    # complement of that, which is the complement of the smallest; the largest of each number.
    table: torch.Tensor | None = None
    # Waits for the table and gives its rows; none without a table.
    read: Callable[[], list[list[int]]] = list


class LaunchComparison:
    """Compares the launches of a step between ranks.

    Args:
        communicators: those of reductions, over each axis. One for each set of ranks is used, one
            after the other. In each, ranks compare the result of the one before. So a difference in
            one group of ranks is known in all groups that share weights with it.
    """

    def __init__(self, runtime: Runtime, communicators: Iterable[Communicator]) -> None:
        found: dict[tuple[int, ...], Communicator] = {}
        for communicator in communicators:
            if communicator.size > 1:
                found.setdefault(tuple(communicator.ranks), communicator)
        self._runtime = runtime  # streams
        self._communicators = list(found.values())  # in the order in which ranks compare
        self.log = LaunchLog()  # of the step that runs, and the one before
        for communicator in self._communicators:
            communicator.log = self.log
        self._started: _Comparison | None = None  # whose result has not been read
        self._last = _Comparison(self.log.launched)  # of the last step

    def compare(self, numbers: Sequence[int] = ()) -> None:
        """Compares what was launched since the last time, behind the last reduction of a step.
        numbers: equally many on all ranks; `largest` gives the largest of each.

        Where the host does not wait for the device, the result is read a step later. A captured
        step is not compared: the same launches were compared in the steps before.

        Raises:
            RuntimeError: the launches differ; on all ranks that were compared, with one text.
            CommunicationError: ranks wait for each other.
        """
        self.raise_failed()
        is_compared = bool(self._communicators) and not self._runtime.is_capturing()
        if is_compared:
            # The host may wait here, for ever if ranks differ. The log still has the step that is
            # compared, as the step before.
            self._raise_found()
        started = _Comparison(self.log.launched, numbers)
        self.log.end_step()
        self._last = started
        if not is_compared:
            return
        self._started = started
        stages = [partial(self._compare, started, i) for i in range(len(self._communicators))]
        self._runtime.submit(REDUCE, *stages, partial(self._fetch, started))
        if self._runtime.host_waits:
            self._runtime.wait(COMPUTE, self._runtime.record(REDUCE))
            self._raise_found()

    def raise_failed(self) -> None:
        """Raises the CommunicationError that ranks wait for each other, if that is known."""
        if self.log.failed:
            raise CommunicationError(self.log.failed)

    def largest(self) -> Sequence[int]:
        """The largest over the ranks of each number of the last comparison. The host waits."""
        rows = self._last.read()
        return rows[-1][2:] if rows else self._last.numbers

    def _compare(self, started: _Comparison, stage: int) -> list[Any]:
        # On communicator number `stage`; the first stage makes the table.
        table = started.table
        if table is None:
            table = self._first_row(started)
            started.table = table
        else:
            table[stage].copy_(table[stage - 1])
        return self._communicators[stage].all_reduce_max(table[stage])

    def _first_row(self, started: _Comparison) -> torch.Tensor:
        """A new table, whose first row has this rank's values."""
        numbers = started.numbers
        size = (len(self._communicators), 2 + len(numbers))
        table = torch.empty(size, dtype=torch.int64, device=self._runtime.device)
        folded = started.launched.folded - (1 << 63)  # as a signed number
        row = table[0]
        # `fill_` takes its value as an argument of a kernel: nothing is copied from the host.
        row[0].fill_(folded)
        row[1].fill_(~folded)
        if all(number == 1 for number in numbers):
            row[2:].fill_(1)
        else:
            row[2:].copy_(torch.tensor(numbers, device="cpu"), non_blocking=True)
        return table

    def _fetch(self, started: _Comparison) -> None:
        if started.table is not None:
            started.read = self._runtime.fetch(started.table)

    def _raise_found(self) -> None:
        started = self._started
        if started is None:
            return
        self._started = None
        rows = started.read()
        self.raise_failed()  # the device's answer means nothing then
        found: str | None = None
        for communicator, row in zip(self._communicators, rows, strict=False):
            # The largest is not the smallest. All ranks of a row see that, so all come here.
            if row[0] != ~row[1]:
                every = self._exchanged(communicator, (found, started.launched))
                texts = [text for text, _ in every.values() if text is not None]
                launched = {rank: one for rank, (_, one) in every.items()}
                found = texts[0] if texts else _difference(launched)
        if found is not None:
            raise RuntimeError(found)

    def _exchanged(self, communicator: Communicator, value: Any) -> dict[int, Any]:
        """Every rank's `value`. If the exchange was aborted, raises the error of that."""
        try:
            return communicator.all_objects(value)
        except Exception:  # an abort leaves bytes that cannot be read
            until = time.monotonic() + CAUSE_S
            while not self.log.failed and time.monotonic() < until:
                time.sleep(0.1)
            self.raise_failed()
            raise


def _difference(every: Mapping[int, Launched]) -> str:
    """The text of the error: the first difference, and what to do about it. every: by rank."""
    count = max(launched.count for launched in every.values())
    for index in range(count):
        texts: dict[str, list[int]] = {}
        for rank, launched in every.items():
            texts.setdefault(launched.text_of(index), []).append(rank)
        if len(texts) > 1:
            break
    lines = [
        "ranks have launched different collectives, so weights or gradients of different units "
        f"are mixed and the step's results are wrong. First difference, launch {index + 1} of "
        f"{count}:"
    ]
    if len(texts) > 1:
        lines += [f"  - ranks {ranks}: {text}" for text, ranks in texts.items()]
    lines.append(
        "Call the same units in the same order on every rank, and use their outputs in its loss: "
        "call a unit that a rank's data does not need as well, and add its output times 0"
    )
    return "\n".join(lines)
