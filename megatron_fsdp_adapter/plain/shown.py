"""The parameters that modules show within and between passes of a loop of the user's own.

Modules show sharded parameters whenever their weights are not being used, and before a program
lists them. So it may read and write them at any time, also while a forward waits for its backward.
Weights that it wrote are gathered again in the next forward of their unit, and refused in a
backward of an earlier one.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.engine import hooks
from ..core.engine.engine import FsdpEngine
from ..core.engine.step import RootCall, RootName
from ..core.engine.unit import Unit
from .listed import tell_of_lists
from .writes import WriteCounts


class ShowingEngine(FsdpEngine):
    """The engine, with what modules show; arguments are those of `FsdpEngine`."""

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        self._writes = WriteCounts()  # of sharded parameters, while passes read gathered weights
        self.is_made = False  # before that its attributes are not there
        tell_of_lists(module, self, ShowingEngine.before_list)
        super().__init__(module, *args, **options)
        self._writes.watch(self.units, self.pairs)
        self.is_made = True

    # Writes.

    def root_pre_forward(self, name: RootName) -> None:
        """Has the root read what was written to its parameters since weights were gathered."""
        self._follow_writes(self.root)
        super().root_pre_forward(name)

    def pre_forward(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """Has a unit read what was written to its parameters since weights were gathered."""
        self._follow_writes(unit)
        return super().pre_forward(unit, args, kwargs)

    def _follow_writes(self, unit: Unit) -> None:
        """Marks gathered weights of `unit` stale if its sharded parameters have been written."""
        if not hooks.in_backward() and self._writes.take(unit):
            self.mark_main_weights_stale()
            self.gather.mark_written(unit)

    def before_unsharded(self) -> None:
        """Marks gathered weights stale, also those of main weights in host memory. They are not if
        passes go on to read them: sharded parameters were shown meanwhile, and perhaps on one rank.
        """
        if not self._writes.are_counted:
            super().before_unsharded()
            self.mark_main_weights_stale()
            self._writes.begin()

    def start_backward(self, accumulates: bool) -> None:
        """RuntimeError if parameters were written since a forward has read them."""
        self._writes.refuse_before_backward()
        super().start_backward(accumulates)

    def main_weights_changed(self, loaded: bool = False, stepped: bool = False) -> None:
        """Also takes writes for known that were made while a forward waits for its backward."""
        super().main_weights_changed(loaded, stepped)
        if self._writes.are_counted:
            self._writes.begin()

    # What modules show.

    def to_sharded(self) -> None:
        """Shows sharded parameters, and ends the use of gathered weights, also if sharded ones are
        shown already although a pass was not over."""
        if self._writes.are_counted and not self.switch.shows_unsharded:
            self.gather.give_up()
        super().to_sharded()
        self._writes.end()

    def show_between_passes(self) -> None:
        """Shows sharded parameters, unless a forward or backward runs. If a pass is not over, as a
        forward waits for its backward or has raised, gathered weights stay as they are: other ranks
        may not read their parameters."""
        if self.step.awaits_nothing and not self.gather.holds_any:
            super().show_between_passes()
        elif not self._runs_pass():
            self._show_sharded_meanwhile()

    def before_list(self) -> None:
        """Shows sharded parameters, which are about to be listed, if a forward waits."""
        if self.is_made and self.switch.shows_unsharded and not self.step.awaits_nothing:
            self.show_between_passes()

    def _show_sharded_meanwhile(self) -> None:
        """Shows sharded parameters of all units but those that the program has unsharded."""
        if self.away:
            return
        self.gather.updates.settle()
        if not self.config.units_switch:
            self.switch.show(unsharded=False, before=self._show_meanwhile)
            return
        self._show_meanwhile()
        self.gather.show_sharded(staying=True)

    def _show_meanwhile(self) -> None:
        self.gather.check_writes()
        if not self.runtime.host_waits:  # or for a rank that reads no parameters
            self.gather.quiesce()

    def end_backward(self) -> None:
        """Ends what the program holds. Shows sharded parameters if gradients are attached, also
        after a backward of inputs alone."""
        if self.gather.holds_any:
            for unit in self.units:
                if unit.ordinal not in self.step.backward.around:
                    self.gather.unhold_once(unit)
        super().end_backward()
        if self.step.grads_attached and self.step.running in (None, RootCall.RAISED):
            self._show_sharded_meanwhile()

    def _runs_pass(self) -> bool:
        """True if this is called inside of a forward or backward."""
        return self.step.running not in (None, RootCall.RAISED) or hooks.in_backward()

    # What a program unshards by hand.

    def hold_unsharded(self, unit: Unit) -> None:
        """Starts gathering `unit`, and holds it until `release`, or until its next forward ends."""
        self.to_unsharded()
        self._follow_writes(unit)
        self.gather.hold_once(unit)
        self.gather.prefetch(unit)

    def show_unsharded(self, unit: Unit) -> None:
        """Waits for the gather of `unit`, and shows its unsharded parameters."""
        self.gather.unshard(unit, prefetches=False)

    def release(self, unit: Unit) -> None:
        """Reshards `unit`, if the program holds it, and shows its sharded parameters."""
        self.gather.unhold_once(unit)
        self.gather.reshard(unit)
        unit.show(False)
        if self.step.awaits_nothing:
            self.show_between_passes()

    def post_forward(self, unit: Unit, output: Any, given: Any = (), ends: bool = True) -> None:
        """Ends the hold of a unit whose module the program has unsharded."""
        if ends and self.gather.holds_any and not hooks.in_backward():
            self.gather.unhold_once(unit)
        super().post_forward(unit, output, given, ends)

    def root_post_forward(self, name: RootName, output: Any) -> None:
        """Ends the hold of the root, if the program has unsharded it."""
        if name == self.step.running and not hooks.in_backward():
            self.gather.unhold_once(self.root)
        super().root_post_forward(name, output)
