"""A thread that looks, once a second, whether this rank waits, and why.

It reads counters that the engine advances anyway, and touches no device. When nothing has been
launched for `QUIET_S` it asks the store whether another rank waits. Only then does it publish where
this rank is. Of the ranks of a process group that wait, one reads what all have published, and
looks for a proof that they can never go on (`waits.py`). The first proof that gets into the store
is the error that all ranks raise. So thousands of ranks make a few thousand small requests a
second, while they wait, and none otherwise.

With gloo the wait itself raises. With NCCL the thread aborts the communicators, which ends their
kernels, and the next call of the engine raises.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import util
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import waits
from .abort import abort, is_destroying, keep_groups, nccl_groups
from .communicator import CommunicationError, LaunchLog
from .place import place_of
from .waits import EngineState, Position, RankState

POLL_S = 1.0
QUIET_S = 3.0
"""A rank that has launched nothing for so long may be waiting."""
REPORT_S = 8.0
"""After a wait of so long, ranks that are late are reported."""
RAISE_S = 5.0
"""Time for the program to raise the error itself, before it is printed."""
CAUSE_S = 3.0
"""A rank whose connections have closed has so much time to say why."""
SLICE = timedelta(seconds=0.5)
"""A wait for gloo looks so often whether the error is known."""
STORE_S = 10.0
LEAD_LOST = 20
"""A lead that is seen so often without a change has stopped."""
GONE_KEPT = 4
"""Engines that are gone and still known: a rank may wait for one."""
READS_PER_S = 2000
"""States that a rank in search of a proof reads in a second, at most."""


class HostWait(Protocol):
    """A wait of the host for a launch of gloo."""

    @property
    def work(self) -> Any:
        """torch's handle."""

    @property
    def log(self) -> LaunchLog | None:
        """The log that noted the launch."""

    @property
    def at(self) -> Position:
        """The place of the launch in that log."""


@dataclass
class WatchedEngine:
    """An engine of this rank."""

    numbers: dict[str, int]
    """The number of engines that were made before over each set of ranks, by its name."""
    runs_ahead: bool
    log: LaunchLog = field(default_factory=LaunchLog)
    is_alive: Callable[[], Any] = object
    """Gives None when the engine is gone."""
    calls: Callable[[], dict[str, int]] = dict
    """Gives the number of calls of each unit in the last forward."""

    def state(self) -> EngineState:
        log = self.log
        launched, before = log.launched, log.before
        texts, texts_before = list(launched.latest), list(before.latest)
        return EngineState(
            numbers=self.numbers,
            exists=self.is_alive() is not None,
            step=log.step,
            before=texts_before,
            launches=texts,
            calls=self.calls(),
            before_skipped=before.count - len(texts_before),
            skipped=launched.count - len(texts),
        )


def has_ended(work: Any) -> bool:
    """Waits for `work`, but no longer than a slice. Returns True if it has ended. Raises torch's
    error if it has failed."""
    began = time.monotonic()
    try:
        work.wait(SLICE)
    except RuntimeError:
        if work.is_completed():
            work.wait()  # raises why it failed
            return True
        # Gloo's reduce-scatter is a handle that is never completed once it has failed. Its error
        # comes at once, and that of a slice which is over does not.
        if time.monotonic() - began < SLICE.total_seconds() / 2:
            raise
        return False
    return True


def set_name(ranks: Sequence[int]) -> str:
    """A short name for a set of ranks, equal on all of them."""
    text = ",".join(str(rank) for rank in ranks)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class WaitWatch:
    """Watches the engines of this process in the default process group that exists now.

    number: of watches that this process group had before. Another one comes after an error."""

    def __init__(self, number: int) -> None:
        self.world = id(dist.group.WORLD)
        self.number = number
        self._rank = dist.get_rank()
        store = c10d._get_default_store()
        self._address = _address(store)
        # A client of its own: the main thread may block in the other one, which has a lock.
        own = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=STORE_S))
        self._store = dist.PrefixStore(f"megatron_fsdp_adapter/waits/{number}", own)
        self._engines: list[WatchedEngine] = []  # and the last ones that are gone
        self._made: Counter[str] = Counter()  # engines so far, by name of their set of ranks
        self._sets: dict[str, Sequence[int]] = {}  # by name
        self._thread_id = threading.get_ident()  # of the program
        self._wait: HostWait | None = None  # of the program's thread
        self._seen: Any = None  # what the last look saw
        self._since = time.monotonic()  # it was seen first
        self._beat = 0
        self._published = False
        # By name of a set that this rank leads, the text in the store.
        self._leads: dict[str, str] = {}
        # By name of another set, what its lead published last, and how often that was seen.
        self._others: dict[str, tuple[str, int]] = {}
        self._reported: set[str] = set()  # causes of waits, without numbers
        self._reported_since: float | None = None  # `_since` of the wait that was reported last
        self._suspected: waits.Proof | None = None  # the proof of the last look
        self._told = ""  # the error
        self._raised = threading.Event()
        self._over = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="waits of ranks", daemon=True)
        self._thread.start()
        self._finalizer = util.Finalize(None, self._exit, exitpriority=1000)

    # Of the program's thread.

    @property
    def is_current(self) -> bool:
        """True while the process group exists."""
        return dist.is_initialized() and id(dist.group.WORLD) == self.world and not self._ended

    def expect(self, sets: Sequence[Sequence[int]], runs_ahead: bool) -> WatchedEngine:
        """An engine over these sets of ranks, which is about to be made on all of them."""
        numbers = {}
        for ranks in sets:
            if len(ranks) > 1:
                name = set_name(ranks)
                self._sets[name] = list(ranks)
                numbers[name] = self._made[name]
                self._made[name] += 1
        engine = WatchedEngine(numbers, runs_ahead)
        gone = [one for one in self._engines if one.is_alive() is None]
        for old in gone[:-GONE_KEPT]:
            self._engines.remove(old)
        self._engines.append(engine)
        return engine

    def wait(self, wait: HostWait) -> None:
        """Waits. Raises CommunicationError if that can never end, and else torch's error."""
        self._wait = wait
        try:
            while not has_ended(wait.work):
                if self._told:
                    self._raised.set()
                    raise CommunicationError(self._told)
        finally:
            self._wait = None

    def cause(self, ranks: Sequence[int], failed: HostWait) -> str:
        """The error that ranks wait for each other, or that one of `ranks` has ended; "" if neither
        is known. failed: the wait for a collective between them that has failed."""
        until = time.monotonic() + CAUSE_S
        with contextlib.suppress(RuntimeError):
            while self.is_current and not self._told:
                found = self._known_cause(ranks, failed)
                if found or time.monotonic() > until:
                    return found
                time.sleep(POLL_S / 5)
        return self._told

    def _known_cause(self, ranks: Sequence[int], failed: HostWait) -> str:
        told = self._read("verdict")
        if told:
            return told
        states = self._states_of(ranks)
        states[self._rank] = self._own_state(0.0, failed)
        for name in self._sets:
            proof = waits.proof(states, name)
            if proof is not None:
                return self._agree(proof.text)
        return ""

    # Of the watching thread.

    def _run(self) -> None:
        pause = POLL_S
        while not self._over.wait(pause):
            if not self.is_current or is_destroying(self._thread_id):
                self._end("it destroys its process group")
                self._engines.clear()
                self._finalizer.cancel()
                return
            try:
                pause = self._look()
            except RuntimeError:  # the store is gone, and with it what ranks could tell
                return
            if self._told:
                self._raise()
                return

    def _look(self) -> float:
        """Looks once. Returns the pause until the next time, in seconds."""
        now = time.monotonic()
        moved = [(id(one.log), one.log.step, one.log.launched.count) for one in self._engines]
        seen = moved, id(self._wait)
        if seen != self._seen:
            self._seen, self._since = seen, now
            if self._published:
                self._withdraw()
            return POLL_S
        still_s = now - self._since
        if still_s < QUIET_S or (self._wait is None and not is_served(self._address)):
            return POLL_S
        self._told = self._read("verdict")
        if self._told:
            return POLL_S
        waiting = [self._someone_waits(name) for name in self._sets]
        if any(waiting):
            self._publish(still_s)
        reads = 0
        for name in list(self._leads):
            reads += len(self._sets[name])
            self._judge(name, still_s)
        # Long after the last launch nothing new is to be expected soon.
        return max(POLL_S, reads / READS_PER_S, min(still_s / 20, 5 * POLL_S))

    def _waits(self) -> bool:
        """True if this rank waits in an engine, or may: the host is no witness with NCCL."""
        return self._wait is not None or any(one.runs_ahead for one in self._engines)

    def _someone_waits(self, name: str) -> bool:
        """True if a rank of that set waits. One of these, which may be this one, leads the set."""
        key = f"lead {name}"
        mine = self._leads.get(name)
        self._beat += 1
        text = f"{self._rank} {self._beat}"
        if mine is not None:
            found = self._swap(key, mine, text)
            if found == text:
                self._leads[name] = text
                return True
            del self._leads[name]  # another rank took this one for dead
        found = self._read(key)
        if found:
            before, times = self._others.get(name, ("", 0))
            times = times + 1 if found == before else 0
            self._others[name] = found, times
            if times < LEAD_LOST:
                return True
        if not self._waits():
            return bool(found)
        if self._swap(key, found, text) == text:
            self._leads[name] = text
        return True

    def _judge(self, name: str, still_s: float) -> None:
        ranks = self._sets[name]
        states = self._states_of(ranks)
        states[self._rank] = self._own_state(still_s, self._wait)
        proof = waits.proof(states, name)
        # A state may be a second old: what may pass has to be seen twice.
        if proof is not None and (proof.stays or self._suspected == proof):
            self._told = self._agree(proof.text)
        elif proof is None and still_s >= REPORT_S:
            self._report(waits.report(states, name, ranks, self._rank))
        self._suspected = proof

    def _report(self, text: str) -> None:
        """Prints a report, once in a wait, and once for all waits that seem to have one cause."""
        cause = re.sub(r"\d+", "", text.partition(": ")[2])
        if text and self._reported_since != self._since and cause not in self._reported:
            self._reported_since = self._since
            self._reported.add(cause)
            _print(text)

    def _publish(self, still_s: float) -> None:
        self._store.set(f"rank {self._rank}", self._own_state(still_s, self._wait).to_text())
        self._published = True

    def _withdraw(self) -> None:
        """This rank goes on: it no longer leads, and what it has published is no longer true."""
        self._published = False
        for name, text in self._leads.items():
            self._swap(f"lead {name}", text, "")
        self._leads.clear()
        self._store.set(f"rank {self._rank}", "")

    def _own_state(self, still_s: float, wait: HostWait | None, ended: str = "") -> RankState:
        self._beat += 1
        engines = list(self._engines)
        thread_id = None if ended else self._thread_id
        place, collective, members = place_of(thread_id)
        index = None
        if wait is not None:
            index = next((i for i, one in enumerate(engines) if one.log is wait.log), None)
        return RankState(
            rank=self._rank,
            ended=ended,
            still_s=still_s,
            place=place,
            collective=collective if wait is None else "",
            members=members,
            waits_in=index,
            waits_at=wait.at if wait is not None else (0, 0),
            runs_ahead=any(one.runs_ahead for one in engines),
            engines=[one.state() for one in engines],
            beat=self._beat,
        )

    # The store.

    def _swap(self, key: str, expected: str, wanted: str) -> str:
        """Sets a key that has the expected text ("": or is missing). Returns its text."""
        return self._store.compare_set(key, expected, wanted).decode()

    def _read(self, key: str) -> str:
        """The text of a key; "" without it. `get` would wait for one that is missing."""
        return self._swap(key, "", "")

    def _states_of(self, ranks: Sequence[int]) -> dict[int, RankState]:
        """The states that these ranks have published. Ranks that go on are missing."""
        found = {}
        for rank in ranks:
            text = self._read(f"rank {rank}")
            if text:
                found[rank] = RankState.from_text(text)
        return found

    def _agree(self, proof: str) -> str:
        """The error that all ranks raise: that of the first one with a proof."""
        return self._swap("verdict", "", proof)

    # The end.

    def _raise(self) -> None:
        """Makes the program raise the error, and prints it if it does not."""
        self._ended = True
        keep_groups()
        for engine in self._engines:
            engine.log.failed = self._told
        groups = nccl_groups()
        if not groups and self._raised.wait(RAISE_S):
            return
        _print(f"rank {self._rank}: {self._told}")
        if groups:
            # Before an abort shows on other ranks, these have read the error.
            self._over.wait(2 * POLL_S)
            if not is_destroying(self._thread_id):
                abort(groups)

    def _exit(self) -> None:
        """The process ends."""
        self._over.set()
        raised = sys.exc_info()[1] or getattr(sys, "last_value", None)
        how = "its process has exited"
        if raised is not None:
            how = f"{type(raised).__name__}: {raised}".strip(": ")
        self._end(how)
        # A thread that returns from a call of torch's store while the interpreter ends aborts the
        # process ("terminate called without an active exception").
        self._thread.join(STORE_S)

    def _end(self, how: str) -> None:
        """Publishes that this rank will launch nothing more."""
        if self._ended or not self._engines:
            return
        self._ended = True
        with contextlib.suppress(RuntimeError, OSError):
            if is_served(self._address):
                state = self._own_state(0.0, None, ended=how)
                self._store.set(f"rank {self._rank}", state.to_text())


def _address(store: Any) -> tuple[str, int] | None:
    """Host and port of the server of a store; None if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def is_served(address: tuple[str, int] | None) -> bool:
    """True if the server of a store answers. Asked where it may be gone rightly: torch prints a
    stack when a request fails."""
    if address is None:
        return True
    try:
        socket.create_connection(address, timeout=1.0).close()
    except OSError:
        return False
    return True


def _print(text: str) -> None:
    print(f"megatron_fsdp_adapter: {text}", file=sys.stderr, flush=True)


_current: WaitWatch | None = None


def watch_world() -> WaitWatch | None:
    """The watch of the default process group; None if that has one rank, or only pretends to have
    more, and with a torch whose stores have no `clone`."""
    global _current
    pretends = dist.get_backend() == "fake"
    if dist.get_world_size() == 1 or pretends or not hasattr(dist.Store, "clone"):
        return None
    last = _current
    if last is None or not last.is_current:
        again = last is not None and last.world == id(dist.group.WORLD)
        _current = WaitWatch(last.number + 1 if last is not None and again else 0)
    return _current
