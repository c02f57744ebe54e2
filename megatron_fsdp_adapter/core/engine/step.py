"""The state of the step that runs, and what chooses the units that stay unsharded over it."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .unit import Unit


class Last(enum.Enum):
    """An answer to the question whether a backward is the last one of its step."""

    YES = "yes"
    NO = "no"
    # Counts as the last in a model that keeps gradients. In one that shards them several may run,
    # and units that keep theirs wait for `ReducePipeline.reduce_rest`.
    UNKNOWN = "unknown"


class RootCall(enum.Enum):
    """`Step.running` where it is no module that is called."""

    # A method of the root, of torch's `register_fsdp_forward_method`, runs. The root may be called
    # inside of it.
    METHOD = "a registered method"
    # Until another forward begins, of whatever module.
    RAISED = "a forward that raised"


RootName = str | RootCall
"""The name of a module that holds all parameters, or what is in its place."""


@dataclass
class Backward:
    """A backward, while it runs and until the next begins."""

    # Whether it accumulates gradients of weights.
    accumulates: bool = True
    # `FsdpEngine.is_last` as it begins.
    is_last: Last = Last.UNKNOWN
    # Whether units that keep gradients are completed at its end, as more may come to them.
    waits: bool = False
    # Ordinals of units whose forward goes on after it, which runs inside of it.
    around: Collection[int] = ()
    # False once it has ended.
    running: bool = True
    # Returns None once autograd does not know of it any more.
    known: Callable[[], Any] = lambda: True
    # By ordinal, how many calls of a unit have all their gradients.
    calls: Counter[int] = field(default_factory=Counter)
    # By ordinals of completed units, in that order: `calls` of the unit when it was completed.
    done: dict[int, int] = field(default_factory=dict)
    # The unit whose module has returned last; None before, and when a unit is called in backward.
    last_returned: Unit | None = None

    @property
    def has_raised(self) -> bool:
        """True if it is over and has not ended."""
        return self.running and self.known() is None


@dataclass
class Step:
    """A step, from the time when gradients are forgotten. A new one takes its place when they are
    forgotten again, and when a pass has raised.

    What outlives a step is an attribute of the engine."""

    # The module whose forward runs, or what runs in its place; None between forwards.
    running: RootName | None = None
    # Number of forwards that wait for their backward.
    in_flight: int = 0
    # The backward that runs, or the last one.
    backward: Backward = field(default_factory=lambda: Backward(running=False))
    # Whether `.grad` of the sharded parameters are the step's gradients. False from the beginning
    # of a backward until all that it gave is reduced.
    grads_attached: bool = False

    @property
    def is_between_passes(self) -> bool:
        """True if neither a forward nor a backward runs, or has raised."""
        return self.running is None and not self.backward.running

    @property
    def awaits_nothing(self) -> bool:
        """True if no pass runs, and no forward waits for its backward."""
        return self.is_between_passes and self.in_flight <= 0

    def forward_raised(self) -> None:
        """Notes that the forward that runs has raised, so that any other may begin."""
        self.running = RootCall.RAISED

    def forget_forward(self) -> None:
        """Counts one forward less: no backward follows it."""
        self.in_flight = max(0, self.in_flight - 1)

    def forget_forwards(self) -> None:
        """Counts no forward any more: no backward follows."""
        self.in_flight = 0

    def keep_grads(self) -> None:
        """Notes that the gradients that are attached are those of the step again."""
        self.grads_attached = True

    def forget_grads(self) -> None:
        """Notes that no gradient is attached any more."""
        self.grads_attached = False


class StepBudget(Protocol):
    """Chooses the units that stay unsharded over a step (`Unit.keep`), from what an engine tells
    it. is_settled: the choice stays, unless an error changes it. may_keep: False if it only
    measures, and no unit is ever kept."""

    may_keep: bool

    @property
    def is_settled(self) -> bool: ...

    def numbers(self, engine: Any) -> Sequence[int]:
        """This rank's numbers, of which ranks compare the largest, once a step."""

    def choose(self, engine: Any) -> None:
        """Chooses units for the next step, which begins now; alike on all ranks."""

    def forgo_grads(self, engine: Any) -> None:
        """Keeps no gradients from now on."""

    def pass_raised(self, engine: Any, with_gradients: bool) -> None:
        """A pass was forgotten that has raised."""
