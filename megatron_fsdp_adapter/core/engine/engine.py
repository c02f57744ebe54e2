"""The engine: one wrapper's units, and what happens at each event of a training step.

root_pre_forward      show unsharded parameters, unshard the root
pre_forward           unshard, and prefetch what comes next
post_forward          reshard, unless the unit's backward comes next
pre_backward          unshard, and prefetch what comes next; open buckets that modules write
post_backward         reshard, reduce
end_backward          the same for units that no hook has completed
finish_grads          reduce the rest, wait, show sharded parameters with `.grad`
main_weights_changed  mark gathered weights stale
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.comm.communicator import Communicator
from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.runtime.device import Runtime
from megatron_fsdp_adapter.core.runtime.host_stash import HostStash
from megatron_fsdp_adapter.core.topology import ShardDomain

from . import construction, hooks
from .between_passes import BetweenPasses
from .buffer import BUFFER_KINDS, READ, AllocateSlots, check_here, ordinary_memory
from .gather import GatherPipeline
from .grad_callbacks import at_end_of_backward, grad_callback
from .grad_states import GradState
from .group import laid_out
from .launches import LaunchComparison
from .microbatches import Microbatches
from .params import make_pairs
from .partition import UnitPlan
from .prefetch_order import BACKWARD, FORWARD
from .quantized import QuantizedWeights
from .reduce import REDUCED_STATES, ChecksGradients, ReducePipeline
from .saved_tensors import SavedTensorFilter
from .step import Backward, Last, RootCall, RootName, Step, StepBudget
from .unit import Unit


class FsdpEngine(Microbatches, BetweenPasses):
    """Shards the parameters of `module`, which then shows sharded ones, and trains them.

    Args:
        module: the model. Its parameters move into the engine's buffers.
        plans: units with their parameters, root last, from `partition`.
        domains: the `ShardDomain` behind each domain name in the plans.
        config: strategy, dtypes, overlap.
        runtime: streams and storage of the device the parameters are on.
        make_communicator: of a process group and device; tests pass a recording one.
        grad_check: looks at gradients before they are communicated; None costs nothing.
        allocate_slots: makes the memory of fixed slots, for which the configuration asks; by
            default ordinary memory.
        prepare: called with each plan before its parameters are read, to give them their values.
        quantized: knows the parameters whose format in the plans is a quantized one.
        budget: chooses units that stay unsharded over a step; None: units stay as the plans say.
    """

    def __init__(
        self,
        module: nn.Module,
        plans: list[UnitPlan],
        domains: Mapping[str, ShardDomain],
        config: EngineConfig,
        runtime: Runtime,
        make_communicator: construction.MakeCommunicator = Communicator,
        grad_check: ChecksGradients | None = None,
        allocate_slots: AllocateSlots | None = None,
        prepare: Callable[[UnitPlan], None] = lambda plan: None,
        quantized: QuantizedWeights | None = None,
        budget: StepBudget | None = None,
    ) -> None:
        super().__init__()
        runtime.poison = config.poison_buffers
        used = construction.used_domains(plans, domains)
        plans = laid_out(plans, used, config)
        comms = construction.communicators(used, make_communicator, runtime)
        allocate = allocate_slots or ordinary_memory(runtime.device)
        self.config = config  # strategy, dtypes, overlap
        self.runtime = runtime  # streams and storage
        self.units = construction.build_units(  # in module order, root last
            plans, used, config, runtime, allocate, comms, prepare, quantized
        )
        self.root = self.units[-1]  # of all parameters that are in no other unit
        self.groups = [group for unit in self.units for group in unit.groups]  # of all units
        # Gradients of the groups that have them.
        self.grads = [group.grads for group in self.groups if group.key.requires_grad]
        reducing = [*comms.reduce.values(), *comms.outer.values()]
        self.launches = LaunchComparison(runtime, reducing)  # with those of other ranks
        log = self.launches.log
        # Gathers weights.
        self.gather = GatherPipeline(self.units, config, runtime, comms.gather, comms.outer, log)
        self.order = self.gather.order  # in which units are gathered
        received = construction.memory_of_exchanges(self.groups, config, runtime, allocate)
        inner = construction.domain_reduces(config, used, comms.reduce, received)
        outer = construction.outer_reduces(config, comms)
        # Reduces gradients.
        self.reduce = ReducePipeline(config, runtime, inner, outer, log, grad_check)
        self.budget = budget  # chooses the units that stay unsharded over a step, if it may
        self.has_ordinary_slots = allocate_slots is None  # torch's own memory, which may go
        self.away: dict[str, Any] = {}  # by kind, memory that was given back
        self.stash = HostStash(runtime, self.away)  # has its contents
        self.quantization = quantized and quantized.made(self.groups, self.gather)  # if any
        self.pairs = make_pairs(self.groups)  # both `Parameter` objects of each weight
        self.trained = [pair for pair in self.pairs if pair.grad is not None]  # with gradients
        self.switch = construction.switch_of(self.units, self.pairs, config)  # what modules show
        self.saved = SavedTensorFilter()  # keeps other hooks off the engine's buffers
        self.step = Step()  # the one that runs
        self.calls_parts = False  # whether a part of a pass runs that a schedule calls by itself
        # Whether the last forward was with gradients: calls of its units are counted.
        self.counts_calls = True
        self.late_seen = False  # whether kept gradients ever came after they had been reduced
        self.pinned_by = ""  # the holder of addresses in the memory; "" if that may be freed
        self.loads = 0  # number of reported writes of weights that are not trained
        # Ordinals in the order in which the last backward that accumulates completed the units, so
        # that a rank on which none runs launches as the others do.
        self.completed: Iterable[int] = construction.first_completed(self.units)
        hooks.register(self, module, [plan.modules for plan in plans])
        self.to_sharded()
        construction.abandon_after(self, runtime)

    # A step, in the order in which it happens.

    def root_pre_forward(self, name: RootName) -> None:
        """A module that holds all parameters is called."""
        in_backward = hooks.in_backward()
        if not in_backward and self.step.running in (None, RootCall.RAISED, name):
            self.begin_forward(name)
        else:
            self.to_unsharded()
            if in_backward and self.step.in_flight <= 0:
                # A reentrant checkpoint of all: its forward, without gradients, was not counted.
                self.step.in_flight = 1
                for unit in self.units:
                    unit.forward_calls = 1
        self.gather.unshard(self.root)

    def begin_forward(self, name: RootName) -> None:
        """A forward begins that is inside of no other."""
        self.to_unsharded()
        if not self.step.is_between_passes:
            self.recover()
        self.order.begin(FORWARD)
        self.gather.drop_parts()
        self.gather.forward_follows = False
        self.gather.microbatch_follows = True
        # Evaluations between a forward and its backward do not count; recomputed units do.
        self.counts_calls = torch.is_grad_enabled()
        if self.counts_calls:
            check_here(self.away, "a forward with gradients", BUFFER_KINDS)
            self.step.in_flight += 1
            for unit in self.units:
                unit.forward_calls = 0
        self.step.running = name
        self.root.busy = True

    def pre_forward(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """A unit's module is called, in forward or while recomputing in backward."""
        if hooks.in_backward():
            # Where a large layer is recomputed, the units inside it run one after the other. The
            # one before this is resharded: its backward comes after this one's.
            backward = self.begin_backward()
            before = backward.last_returned
            backward.last_returned = None
            if before is not None and before is not unit and before.inside and not before.busy:
                self.gather.reshard(before)
        else:
            self.to_unsharded()
            if self.counts_calls or self.step.running is None:
                unit.forward_calls += 1
            if 2 * unit.ordinal >= len(self.units):  # from the middle of a forward on
                self.reduce.retire_all()
        self.gather.unshard(unit)
        unit.busy = True
        if torch.is_grad_enabled():
            done = grad_callback(self.post_backward, unit)
            on_double_backward = grad_callback(self.pre_backward, unit)
            return hooks.on_inputs_done(args, kwargs, done, on_double_backward)
        return args, kwargs

    def post_forward(self, unit: Unit, output: Any, given: Any = (), ends: bool = True) -> None:
        """A unit's module, which was `given` inputs, returns. ends: it is the unit's last module.
        The unit stays if its backward may be next: in recomputation, and if it is the last unit."""
        in_backward = hooks.in_backward()
        with_gradients = torch.is_grad_enabled()
        unit.busy = in_backward and not with_gradients
        self.step.backward.last_returned = unit
        if with_gradients:
            hooks.on_outputs_needed(output, grad_callback(self.pre_backward, unit), given)
            if given:
                hooks.put_back(given)
            if ends:
                for group in unit.direct_groups:
                    group.grads.direct.expect(overwrites=not group.grads.is_kept)
        if in_backward or not ends:
            return
        if not (with_gradients and self.order.is_last(unit.ordinal)):
            self.gather.reshard(unit, keeps=with_gradients)
        unit.hide_after_forward()

    def root_post_forward(self, name: RootName, output: Any) -> None:
        """A module that holds all parameters returns."""
        if hooks.in_backward() or name != self.step.running:
            return
        self.step.running = None
        self.root.busy = False
        self.gather.show_sharded(staying=False)
        if hooks.has_grad_output(output):
            hooks.on_outputs_needed(output, grad_callback(self.pre_backward, self.root))
        else:
            self.end_evaluation()

    def end_evaluation(self) -> None:
        """A forward without a backward has ended."""
        another_waits = self.step.in_flight > 0
        shown = [unit.ordinal for unit in self.units if unit.stays_shown]
        self.gather.reshard_all(but=shown if another_waits else ())

    def begin_backward(self) -> Backward:
        """The backward that runs; the first call begins it."""
        before = self.step.backward
        if before.running and before.known() is not None:
            return before
        if before.running and self.step.running in (None, RootCall.RAISED):
            self.recover()
        check_here(self.away, "a backward", BUFFER_KINDS)
        accumulates = hooks.accumulates(self.groups)
        if self.step.running is None:  # else it runs inside of a forward, which goes on after it
            self.order.begin(BACKWARD)
        known = at_end_of_backward(self.end_backward)
        self.start_backward(accumulates)
        self.step.backward.known = known
        self.gather.unshard(self.root)
        self.reduce.backward_begins(self.root, accumulates=accumulates)
        return self.step.backward

    def start_backward(self, accumulates: bool) -> None:
        """A backward begins, whether its units are reached by hooks or by a schedule."""
        step = self.step
        may_be_last = self.is_last is not Last.NO
        # Kept gradients can be reduced only once.
        waits = accumulates and may_be_last and (step.in_flight > 1 or self.late_seen)
        around = frozenset([unit.ordinal for unit in self.units if unit.busy])
        step.backward = Backward(accumulates, self.is_last, waits, around)
        self.gather.microbatch_follows = not may_be_last
        if accumulates:
            step.grads_attached = False
            # Without a pipeline a forward follows, unless this is the step's last microbatch. In a
            # pipeline other forwards may still wait for their backward, which then follows.
            self.gather.forward_follows = step.in_flight == 1 and not may_be_last
            self.gather.updates.begin_backward()

    def pre_backward(self, unit: Unit) -> None:
        """The first gradient of a unit's output arrives."""
        backward = self.begin_backward()
        if unit.backward_reads_weights:
            self.gather.unshard(unit)
            unit.busy = True
        self.reduce.backward_begins(unit, accumulates=backward.accumulates)

    def post_backward(self, unit: Unit) -> None:
        """All gradients of one call of a unit are known. Completes the unit when those of all its
        calls in forward are."""
        backward = self.begin_backward()
        unit.check_gathered()
        backward.calls[unit.ordinal] += 1
        waits = backward.waits and not unit.reduces_each
        if backward.calls[unit.ordinal] == unit.forward_calls and not waits:
            self.complete(unit)

    def complete(self, unit: Unit) -> None:
        """All gradients of a unit are known: reshards it, and reduces it if that is due."""
        backward = self.step.backward
        backward.done[unit.ordinal] = backward.calls[unit.ordinal]
        if unit.ordinal not in backward.around:
            unit.busy = False
            self.gather.reshard_unless_next(unit)
        if not backward.accumulates:
            return
        if torch.is_grad_enabled():  # a backward with `create_graph`, or none
            with torch.no_grad():
                self._take_grads(unit)
        else:
            self._take_grads(unit)

    def _take_grads(self, unit: Unit) -> None:
        backward = self.step.backward
        self.reduce.backward_done(
            unit,
            backward.is_last,
            # A unit that reduces some gradients in each backward gives its bucket to the next.
            more_may_come=backward.waits and unit.reduces_each,
        )

    def end_backward(self) -> None:
        """The backward ends. Completes in the same order on all ranks: units whose inputs needed no
        gradient or that were not reached, and units to which gradients came late. They come late if
        a part of the graph between a weight and the loss is older than the unit's call (autocast
        keeps casts), or if a unit ran more often than was counted."""
        backward = self.step.backward
        if not backward.running:  # its gradients were forgotten meanwhile
            return
        if backward.accumulates:
            for unit in reversed(self.units):
                self._complete_at_end(unit)
        self.gather.reshard_all(but=backward.around)
        backward.running = False
        if backward.accumulates:
            self.completed = backward.done
            self.step.in_flight -= 1
            if self.ends_by_itself:
                self.finish_grads()

    def _complete_at_end(self, unit: Unit) -> None:
        backward = self.step.backward
        if unit.ordinal not in backward.done:
            self.complete(unit)
            return
        # Further calls count on all ranks, also if they gave weights no gradient on this one.
        is_late = backward.calls[unit.ordinal] > backward.done[unit.ordinal]
        if not is_late:
            is_late = any(group.grads.has_untaken() for group in unit.trainable_groups)
        if is_late and unit.keeps_grads:
            with torch.no_grad():
                self.late_seen |= self.reduce.reduce_late_grads(unit)
        elif is_late:
            self.complete(unit)

    @torch.no_grad()
    def reduce_grads(self) -> None:
        """Starts every reduction of this step that has not been started."""
        check_here(self.away, "reducing gradients", BUFFER_KINDS)
        self.gather.updates.order_compute()
        if self.config.overlap_grad_reduce:
            units = [self.units[ordinal] for ordinal in self.completed]
        else:
            units = self.units[::-1]
        self.reduce.reduce_rest(units)

    @torch.no_grad()
    def finish_grads(self) -> None:
        """Reduces all gradients and shows sharded parameters, which have them. Compute is ordered
        behind the reductions.

        Raises:
            RuntimeError: gradients of this rank were not finite, with a `grad_check`; or ranks have
                launched different collectives in this step, on CUDA in the one before.
        """
        if not self.step.grads_attached and not self._is_idle:
            self.reduce_grads()
            self.reduce.finish()
            self.to_sharded()
            self.launches.compare(self.compared_numbers())
            self.attach_grads()
            self.grads_finished()
        self.to_sharded()
        self.gather.updates.load_ahead()

    def compared_numbers(self) -> Sequence[int]:
        """Numbers of which ranks compare the largest, once a step; the budget's are the last."""
        return () if self.budget is None else self.budget.numbers(self)

    def attach_grads(self) -> None:
        """Gives every parameter its reduced gradient. A frozen one gets none, so that no optimizer
        moves it."""
        for pair in self.trained:
            grads = pair.group.grads
            if grads.state not in REDUCED_STATES or grads.is_withheld:
                continue
            if pair.sharded.requires_grad or pair.sharded.grad is not None:
                pair.attach_grad()
        self.step.grads_attached = True

    def grads_finished(self) -> None:
        """All gradients of a step are attached."""
        if self.reduce.check is not None:
            self.reduce.check.raise_found()

    @torch.no_grad()
    def main_weights_changed(self, loaded: bool = False, stepped: bool = False) -> None:
        """The optimizer, or a load, has written main weights. Gathered weights become stale.
        Quantized ones are made again once, when unsharded parameters are shown; that is collective.
        loaded: weights that are not trained were written too. stepped: an optimizer's step did."""
        if loaded:
            self.loads += 1
        if not stepped:
            self.mark_main_weights_stale()
        if self.quantization is not None:
            self.quantization.changed(loaded, needed=self.switch.shows_unsharded)
        self.gather.mark_stale()

    def zero_grads(self) -> None:
        """Forgets all gradients. Gradient shards take no memory until the next backward."""
        if not self.step.is_between_passes or self.gather.holds_any:
            self.recover()
        self.step = Step()
        self.gather.updates.drop_loads()
        self.reduce.finish()
        if self.reduce.check is not None:
            self.reduce.check.clear()
        for pair in self.trained:
            pair.drop_grad()
        for grads in self.grads:
            grads.drop()
        if self.budget is not None:
            self.budget.choose(self)

    def recover(self) -> bool:
        """Forgets a forward or backward that raised. Nothing is in flight or in use afterwards.
        Returns whether that pass was one with gradients."""
        with_gradients = self.counts_calls or self.step.backward.running
        # Attached gradients stay: it may have been an evaluation in front of the optimizer's step.
        self.step = Step(grads_attached=self.step.grads_attached)
        self.reduce.abandon(self.units)
        self.gather.reshard_held(stay=not with_gradients)
        if self.budget is not None:
            self.budget.pass_raised(self, with_gradients)
        return with_gradients

    # What an optimizer or a graph tells.

    def begin_step(self) -> None:
        """An optimizer of torch, which the engine does not know, is about to step."""

    def pin(self, holder: str) -> None:
        """Refuses to release memory from now on, as `holder` has its addresses."""
        self.pinned_by = holder

    # What modules show while they compute.

    def to_unsharded(self) -> None:
        """Shows unsharded parameters and marks gathered weights as stale: sharded parameters may
        have been written."""
        if not self.switch.shows_unsharded or self.away:
            check_here(self.away, "using the model", READ)
            self.switch.show(unsharded=True, before=self.before_unsharded)

    def before_unsharded(self) -> None:
        """Prepares for hiding sharded parameters, which may have been written."""
        if self.quantization is not None:
            self.quantization.catch_up()
        self.gather.mark_stale()

    # Gradients between passes.

    @property
    def has_grads(self) -> bool:
        """True if a backward of this step has left gradients on this rank."""
        return any(grads.state is not GradState.EMPTY for grads in self.grads)

    @property
    def _is_idle(self) -> bool:
        """True if the user has frozen all parameters, and there are no gradients of before."""
        return not self.has_grads and all(grads.is_idle for grads in self.grads)

    @torch.no_grad()
    def scale_grads(self, factor: float | torch.Tensor) -> None:
        """Multiplies the main gradients that the optimizer will read."""
        for grads in self.grads:
            if grads.state in REDUCED_STATES:
                for segment in grads.held_segments:
                    segment.mul_(factor)
