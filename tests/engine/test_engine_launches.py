"""What ranks launched is compared, without processes: the other ranks are played."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.engine import launches
from megatron_fsdp_adapter.core.engine.launches import GATHERED, REDUCED, LaunchComparison, Launched
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.engine.engine_cases import Setup, build
from tests.engine.pretended import PretendCommunicator, pretended_world


class Group:
    def __init__(self, name: str) -> None:
        self.name = name


class Played:
    """Ranks 0, which is this one, and `number`, which is `other`. `asked` counts exchanges."""

    size = 2

    def __init__(self, number: int, other: Callable[[], tuple[str | None, Launched]]) -> None:
        self.ranks, self.other, self.asked = [0, number], other, 0

    def all_reduce_max(self, pair: torch.Tensor) -> list[Any]:
        number = self.other()[1].folded - (1 << 63)
        pair.copy_(torch.maximum(pair, torch.tensor([number, ~number])))
        return []

    def all_objects(self, value: Any) -> dict[int, Any]:
        self.asked += 1
        return {0: value, self.ranks[1]: self.other()}


class Device(HostRuntime):
    """Does not wait for results; `read` counts how often one was asked for."""

    host_waits = False

    def __init__(self) -> None:
        super().__init__()
        self.read, self.capturing = 0, False

    def fetch(self, tensor: torch.Tensor) -> Callable[[], Any]:
        values = tensor.tolist()

        def read() -> Any:
            self.read += 1
            return values

        return read

    def is_capturing(self) -> bool:
        return self.capturing


def launched(*names: str) -> Launched:
    """What a rank has launched that gathered these groups."""
    comparison = LaunchComparison(HostRuntime(), [])
    for name in names:
        comparison.note(GATHERED, [Group(name)], Played(1, Launched))  # type: ignore[list-item,arg-type]
    return comparison._launched


def compared(runtime: Any, other: Launched, *names: str) -> LaunchComparison:
    comparison = LaunchComparison(runtime, [Played(1, lambda: (None, other))])  # type: ignore[list-item]
    comparison._launched = launched(*names)
    comparison.compare()
    return comparison


def test_order_number_and_kind_tell() -> None:
    numbers = {
        launched(*names).folded for names in ("ab", "ba", "aab", "a", "b", "aba", "abab", "")
    }
    assert len(numbers) == 8
    gathered, reduced = (LaunchComparison(HostRuntime(), []) for _ in range(2))
    for comparison, kind in ((gathered, GATHERED), (reduced, REDUCED)):
        comparison.note(kind, [Group("a")], Played(1, Launched))  # type: ignore[list-item,arg-type]
    assert gathered._launched.folded != reduced._launched.folded


def test_equal_launches_exchange_two_numbers_and_nothing_else() -> None:
    comparison = compared(HostRuntime(), launched("a", "b"), "a", "b")
    assert comparison._communicators[0].asked == 0  # type: ignore[attr-defined]
    assert comparison._launched.count == 0  # the next step begins anew


@pytest.mark.parametrize(
    ("mine", "other", "told"),
    [
        ("abc", "acb", r"launch 2 of 3:.*ranks \[0\]: weights of b .*ranks \[1\]: weights of c "),
        ("ab", "a", r"launch 2 of 2:.*ranks \[0\]: weights of b .*ranks \[1\]: nothing more"),
        ("", "a", r"launch 1 of 1:.*ranks \[0\]: nothing more.*ranks \[1\]: weights of a "),
    ],
)
def test_the_first_difference_is_told(mine: str, other: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s){told}"):
        compared(HostRuntime(), launched(*other), *mine)


def test_a_difference_that_is_no_longer_remembered_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launched("a").last.maxlen == launches.KEPT
    one, other = launched(*"abcd"), launched(*"abcde")
    for each in (one, other):
        each.last = type(each.last)(each.last, maxlen=2)
    text = launches._difference({0: one, 1: other})
    assert "launch 3 of 5" in text and "ranks [1]: no longer remembered" in text


def test_where_the_host_does_not_wait_the_result_is_read_a_step_later() -> None:
    runtime = Device()
    comparison = compared(runtime, launched("a"), "b")
    assert runtime.read == 0
    with pytest.raises(RuntimeError, match="launch 1 of 1"):
        comparison.compare()
    assert runtime.read == 1


def test_a_capture_launches_and_reads_nothing() -> None:
    runtime = Device()
    comparison = compared(runtime, launched("a"), "a")
    runtime.capturing = True
    comparison._launched, before = launched("c"), comparison._started
    comparison.compare()
    assert (runtime.read, comparison._started) == (0, before)
    runtime.capturing, comparison._launched = False, launched("a")
    comparison.compare()
    assert runtime.read == 1


def test_what_one_group_of_ranks_found_is_passed_on_to_the_next() -> None:
    """In the words of the first, though here nothing differs between the two."""
    mine = launched("a")
    inner = Played(1, lambda: (None, launched("b")))
    outer = Played(2, lambda: ("ranks 2 and 3 have found something", launched("b")))
    comparison = LaunchComparison(HostRuntime(), [inner, outer])  # type: ignore[list-item]
    comparison._launched = mine
    with pytest.raises(RuntimeError, match=r"ranks \[1\]: weights of b"):
        comparison.compare()
    outer = Played(2, lambda: ("ranks 2 and 3 have found something", launched("b")))
    inner = Played(1, lambda: (None, launched("a")))
    comparison = LaunchComparison(HostRuntime(), [inner, outer])  # type: ignore[list-item]
    comparison._launched = launched("a")
    with pytest.raises(RuntimeError, match="ranks 2 and 3 have found something"):
        comparison.compare()
    assert (inner.asked, outer.asked) == (0, 1)


def test_one_rank_compares_nothing() -> None:
    runtime = Device()
    runtime.submit = None  # type: ignore[assignment,method-assign]
    alone = Played(1, Launched)
    alone.size = 1
    comparison = LaunchComparison(runtime, [alone])  # type: ignore[list-item]
    comparison.note(GATHERED, [Group("a")], alone)  # type: ignore[list-item,arg-type]
    comparison.compare()
    assert comparison._launched.count == 0


def test_groups_of_the_same_ranks_are_compared_once() -> None:
    ones = [Played(1, Launched), Played(2, Launched), Played(1, Launched)]
    comparison = LaunchComparison(HostRuntime(), ones)  # type: ignore[arg-type]
    assert [one.ranks for one in comparison._communicators] == [[0, 1], [0, 2]]


COLLECTIVES = ("all_gather", "reduce_scatter", "reduce_scatter_by_exchange", "all_reduce")
SETUPS = [
    Setup(),
    Setup(strategy="no_shard"),
    Setup(strategy="optim"),
    Setup(strategy="optim_grads"),
    Setup(world=4, outer=2),
    Setup(world=4, outer=2, shard_outer=True),
    Setup(world=4, split=True),
    Setup(slots=True, exchange=True),
    Setup(overlap=False, strategy="optim"),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_every_collective_of_a_step_is_noted(setup: Setup) -> None:
    """And compared once a step, behind all others."""
    reported: list[str] = []

    class Reporting(PretendCommunicator):
        def all_reduce_max(self, tensor: torch.Tensor) -> list[Any]:
            reported.append("all_reduce_max")
            return []

    with pretended_world(setup.world):
        rig = build(setup, None, Reporting)
        rig.mark = reported.append  # type: ignore[method-assign]
        noted: list[str] = []
        note = rig.engine.launches.note

        def noting(kind: str, groups: Any, on: Any) -> None:
            noted.extend(group.name for group in groups)
            note(kind, groups, on)

        rig.engine.launches.note = noting  # type: ignore[method-assign]
        for _ in range(2):
            reported.clear(), noted.clear()
            rig.step(microbatches=2, sync=False)
            collectives = [line for line in reported if line.split()[0] in COLLECTIVES]
            carried = [unit for line in collectives for unit in line.split()[1:]]
            if setup.slots:  # whose buffers have the name of one unit for all
                assert len(noted) == len(carried)
            else:
                assert [n.split("/")[0] for n in noted] == [u.split("#")[0] for u in carried]
            sets = 1 + (setup.outer > 1) + setup.split
            assert [line for line in reported if line == "all_reduce_max"] == [
                "all_reduce_max"
            ] * sets
            last = max(i for i, line in enumerate(reported) if line.split()[0] in COLLECTIVES)
            assert reported.index("all_reduce_max") > last
            assert rig.engine.launches._launched.count == 0
