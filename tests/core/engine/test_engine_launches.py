"""What ranks launched is compared, without processes: the other ranks are played."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.core.comm import communicator
from megatron_fsdp_adapter.core.comm.communicator import Launched, LaunchLog
from megatron_fsdp_adapter.core.engine import launches
from megatron_fsdp_adapter.core.engine.launches import GATHERED, LaunchComparison
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.lib.engine.engine_cases import built
from tests.lib.engine.pretended import REPORTED
from tests.lib.engine.scenarios import SCENARIOS, cells

CHECKS = ("core/engine/launches.py",)


class Played:
    """Ranks 0, which is this one, and `number`, which is `other`. `asked` counts exchanges."""

    size = 2

    def __init__(self, number: int, other: Callable[[], tuple[str | None, Launched]]) -> None:
        self.ranks = [0, number]
        self.other = other
        self.asked = 0

    def all_reduce_max(self, pair: torch.Tensor) -> list[Any]:
        number = self.other()[1].folded - (1 << 63)
        pair.copy_(torch.maximum(pair, torch.tensor([number, ~number])))
        return []

    def all_objects(self, value: Any) -> dict[int, Any]:
        self.asked += 1
        return {0: value, self.ranks[1]: self.other()}


def device() -> Any:
    """A runtime that does not wait for results."""
    runtime = HostRuntime()
    runtime.host_waits = False
    return runtime


def launched(*names: str, kind: str = GATHERED) -> Launched:
    """What a rank has launched that gathered, or reduced, these groups."""
    log = LaunchLog()
    for name in names:
        log.note(kind, [SimpleNamespace(name=name)], Played(1, Launched))  # type: ignore[list-item,arg-type]
    return log.launched


def compared(runtime: Any, other: Launched, *names: str) -> LaunchComparison:
    comparison = LaunchComparison(runtime, [Played(1, lambda: (None, other))])  # type: ignore[list-item]
    comparison.log.launched = launched(*names)
    comparison.compare()
    return comparison


def test_order_number_and_kind_tell() -> None:
    orders = ("ab", "ba", "aab", "a", "b", "aba", "abab", "")
    numbers = {launched(*names).folded for names in orders}
    numbers.add(launched("a", kind=launches.REDUCED).folded)
    assert len(numbers) == 9


def test_equal_launches_exchange_two_numbers_and_nothing_else() -> None:
    comparison = compared(HostRuntime(), launched("a", "b"), "a", "b")
    assert comparison._communicators[0].asked == 0  # type: ignore[attr-defined]
    assert comparison.log.launched.count == 0  # the next step begins at zero


@pytest.mark.parametrize(
    ("mine", "other", "kept", "told"),
    [
        ("abc", "acb", 9, r"launch 2 of 3:.*\[0\]: weights of b .*ranks \[1\]: weights of c "),
        ("ab", "a", 9, r"launch 2 of 2:.*ranks \[0\]: weights of b .*ranks \[1\]: nothing more"),
        ("", "a", 9, r"launch 1 of 1:.*ranks \[0\]: nothing more.*ranks \[1\]: weights of a "),
        ("abcd", "abcde", 2, r"launch 3 of 5:.*weights of c .*ranks \[1\]: no longer remembered"),
    ],
)
def test_the_first_difference_is_told(
    monkeypatch: pytest.MonkeyPatch, mine: str, other: str, kept: int, told: str
) -> None:
    """Or that it is the first of those that are remembered."""
    monkeypatch.setattr(communicator, "KEPT", kept)
    with pytest.raises(RuntimeError, match=f"(?s){told}"):
        compared(HostRuntime(), launched(*other), *mine)


def test_where_the_host_does_not_wait_the_result_is_read_a_step_later() -> None:
    comparison = compared(device(), launched("a"), "b")
    with pytest.raises(RuntimeError, match="launch 1 of 1"):
        comparison.compare()


def test_a_capture_launches_and_reads_nothing() -> None:
    comparison = compared(device(), launched("a"), "b")
    comparison.log.launched = launched("a")  # in which nothing would differ
    with mock.patch.object(HostRuntime, "is_capturing", lambda self: True):
        comparison.compare()
    with pytest.raises(RuntimeError, match="launch 1 of 1"):
        comparison.compare()


@pytest.mark.parametrize(
    ("inner_launched", "told", "asked"),
    [
        ("b", r"ranks \[1\]: weights of b", (1, 1)),
        ("a", "ranks 2 and 3 have found something", (0, 1)),
    ],
)
def test_what_one_group_of_ranks_found_is_passed_on_to_the_next(
    inner_launched: str, told: str, asked: tuple[int, int]
) -> None:
    """In the words of the first, though here nothing differs between the two."""
    inner = Played(1, lambda: (None, launched(inner_launched)))
    outer = Played(2, lambda: ("ranks 2 and 3 have found something", launched("b")))
    comparison = LaunchComparison(HostRuntime(), [inner, outer])  # type: ignore[list-item]
    comparison.log.launched = launched("a")
    with pytest.raises(RuntimeError, match=told):
        comparison.compare()
    assert (inner.asked, outer.asked) == asked


def test_groups_of_the_same_ranks_are_compared_once_and_those_of_one_rank_not_at_all() -> None:
    ones = [Played(number, Launched) for number in (1, 2, 1, 3)]
    ones[-1].size = 1
    comparison = LaunchComparison(HostRuntime(), ones)  # type: ignore[arg-type]
    assert [one.ranks for one in comparison._communicators] == [[0, 1], [0, 2]]


NOTED = ("steps", "no_overlap", "two_instances", "sharded_instances", "two_domains", "exchange",
         "kept")  # fmt: skip


@pytest.mark.parametrize(("strategy", "scenario"), cells(*NOTED))
def test_every_collective_of_a_step_is_noted(strategy: str, scenario: str) -> None:
    """And compared once a step, behind all others."""
    setup = SCENARIOS[scenario].setup(strategy)
    reported: list[str] = []
    with built(setup) as rig, mock.patch.dict(REPORTED, all_reduce_max=0):
        log = rig.engine.launches.log
        rig.mark = reported.append  # type: ignore[method-assign]
        rig.step()
        reported.clear()
        with mock.patch.object(log, "note", wraps=log.note) as note:
            rig.step(microbatches=2, sync=False)
    noted = [group.name.split("/")[0] for call in note.call_args_list for group in call.args[1]]
    times = 1 + (setup.outer > 1) + setup.split
    carried = [
        unit.split("#")[0].removesuffix(".inner")
        for line in reported[:-times]
        for unit in line.split()[1:]
    ]
    compares = ["all_reduce_max" in line for line in reported]
    assert compares[-times:] == [True] * times
    assert not any(compares[:-times])
    assert len(noted) == len(carried) > 0
    assert setup.slots or noted == carried  # buffers in slots have the name of one unit for all
    assert log.launched.count == 0
