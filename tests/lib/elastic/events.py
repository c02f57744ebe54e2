"""What happens to three replicas that train, of plain programs and of Megatron-LM's, which then go
on together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from tests.lib.elastic.run import Lighthouse, Replica
from tests.lib.elastic.watched import goes_on_without

Event = Callable[[Sequence[Replica], Lighthouse], None]


def two_are_killed_and_join_at_once(found: Sequence[Replica], lighthouse: Lighthouse) -> None:
    for one in found[1:]:
        one.kill()
    goes_on_without(found, found[1:])
    for one in found[1:]:
        one.start()


def one_is_stopped_for_a_while(found: Sequence[Replica], lighthouse: Lighthouse) -> None:
    found[2].signal(signal.SIGSTOP)
    try:
        goes_on_without(found, found[2:])
    finally:
        found[2].signal(signal.SIGCONT)


def the_lighthouse_restarts(found: Sequence[Replica], lighthouse: Lighthouse) -> None:
    lighthouse.kill()
    time.sleep(2.0)
    lighthouse.start()


EVENTS: dict[str, Event] = {
    event.__name__: event
    for event in (
        two_are_killed_and_join_at_once,
        one_is_stopped_for_a_while,
        the_lighthouse_restarts,
    )
}
