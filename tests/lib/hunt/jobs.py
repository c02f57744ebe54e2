"""Looks at several seeds at once, each in a process of its own with its own ranks and folders."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

from tests.lib.hunt import verdict
from tests.lib.ranks.ranks import end_with_parent, running


class Hunter(Protocol):
    """What looks at seeds, such as `CycleHunt`."""

    def looked_at(self, seed: int) -> dict[str, Any]: ...

    def end(self) -> None: ...


def lines_of(
    make: Callable[[], Hunter], jobs: int, seeds: Iterable[int], is_over: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """The lines of the seeds as they come, from `jobs` processes that call `make` (importable)
    each. Those that have been begun when it `is_over` are waited for."""
    left = iter(seeds)
    context = mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(jobs)]
    processes = [context.Process(target=job, args=(make, theirs)) for _, theirs in pipes]
    busy: dict[Connection, int] = {}

    def give(connection: Connection) -> None:
        """Gives a process its next seed, or lets it end."""
        seed = None if is_over() else next(left, None)
        if seed is not None:
            busy[connection] = seed
        connection.send(seed)

    with running(processes):
        for ours, theirs in pipes:
            theirs.close()
            give(ours)
        while busy:
            for connection in cast("list[Connection]", wait([*busy])):
                seed = busy.pop(connection)
                try:
                    yield connection.recv()
                except EOFError:
                    # It was killed, by the memory's end for example. The others go on.
                    yield {
                        "seed": seed,
                        "outcome": verdict.CRASH,
                        "signature": "crash: the process that looked at the seed",
                    }
                    continue
                give(connection)
        for process in processes:
            process.join()


def job(make: Callable[[], Hunter], connection: Connection) -> None:
    """Looks at the seeds that come, until there are no more."""
    end_with_parent()
    hunter = make()
    try:
        while (seed := connection.recv()) is not None:
            connection.send(line_of(hunter, seed))
    finally:
        hunter.end()


def line_of(hunter: Hunter, seed: int) -> dict[str, Any]:
    """The line of a seed, also if looking at it raises: the other seeds are not lost then."""
    try:
        return hunter.looked_at(seed)
    except Exception as error:
        text = str(error).split("\n")[0][:110]
        return {
            "seed": seed,
            "outcome": verdict.ERROR,
            "signature": f"the hunt itself: {type(error).__name__}: {text}",
            "detail": traceback.format_exc(),
        }
