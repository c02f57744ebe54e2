"""A unit: the groups that are gathered and reduced together, and its phase.

Updates of its weights may go on behind the step that queued them, and gathers have to wait for
them:

    update stream    unit 1 | unit 2   | unit 3 ...
    gather stream             gather 1 | gather 2 ...
    compute stream                       forward 1 ...

A unit's gather waits for the update of that unit. The update reads the unit's gradients: if those
are forgotten meanwhile, they keep their memory until the compute stream is behind the gather. No
backward begins before all updates are over. Readers of main weights or their state wait for all.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.core.config import Strategy
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, Runtime

from .extensions import inner_names
from .grad_dtypes import set_grad_dtypes
from .grad_states import GradState
from .group import ParamGroup
from .kept_parts import KeptParts
from .params import (
    GatheredParameter,
    PresentParameter,
    ReshardedDTensor,
    ReshardedParameter,
    UnitSlots,
    resharded_class,
)
from .partition import UnitPlan
from .quantized import QuantizedWeights
from .tensor_parallel import keep_partial


class Phase(enum.Enum):
    """The phase of a unit's compute weights.

    SHARDED: resharded, or kept but older than the main weights. GATHERING: a gather was launched.
    READY: the compute stream has been ordered behind the gather.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    READY = "ready"

    __hash__ = object.__hash__  # Enum's own is a function of Python's


TRANSITIONS = {
    (Phase.SHARDED, Phase.GATHERING),
    (Phase.GATHERING, Phase.READY),
    (Phase.READY, Phase.SHARDED),
    (Phase.GATHERING, Phase.SHARDED),
}


class Unit:
    """The groups of parameters that are gathered and reduced together.

    Args:
        strategy: of this unit.
        library: of quantized weights, for those of `groups` that have such.
    """

    def __init__(
        self,
        plan: UnitPlan,
        ordinal: int,
        groups: list[ParamGroup],
        strategy: Strategy,
        library: QuantizedWeights | None = None,
    ) -> None:
        self.name = plan.name  # of its module, or "root"
        # Position in module order; collectives are issued in an order made of ordinals.
        self.ordinal = ordinal
        self.groups = groups  # its parameters
        self.inside = plan.inside  # of how many other units it is a part, the root aside
        # False for an embedding, whose backward is not given weights.
        self.backward_reads_weights = plan.backward_reads_weights
        # Whether all weights stay while it does not compute.
        self.keeps_weights = not strategy.shard_weights
        if groups:
            self.keeps_weights = all(group.weights.is_kept for group in groups)
        self.strategy = strategy  # what is sharded between its passes
        # Whether gathered weights, which do not stay, are kept from one microbatch to the next.
        self.stays = False
        # Parts of them that are kept between a forward and its backward; None if they are not.
        self.parts: KeptParts | None = None
        # Whether the user keeps its gradients on each rank, to be reduced in a later backward; None
        # if the user has not set it.
        self.defers: bool | None = None
        # Whether the user leaves out reductions over the outer axis until a later backward; None
        # if the user has not set it.
        self.withholds: bool | None = None
        self._find_trainable()
        gathered = [one for one in groups if one.weights.is_kept == self.keeps_weights]
        # Bytes that a gather takes.
        self.weight_bytes = sum(group.weights.nbytes for group in gathered)
        self.forward_calls = 0  # of its module, in the last forward pass with gradients
        self.gathered: Any = None  # event after which the weights are there, while GATHERING
        # Whether main weights have changed since they were last gathered.
        self.stale = False
        # Whether its module is between the hooks of a forward or of a backward.
        self.busy = False
        # Event after which main weights have changed, where a step's update of them may still run.
        self.updated: Any = None
        # Whether the gather that was launched last waits for it.
        self.behind_update = False
        # Number of the fixed memory that its weights are gathered into; None without.
        self.weight_slot = next((one.weights.slot.number for one in gathered), None)
        self.phase = Phase.READY  # of its compute weights
        self._library = library  # of the weights of `quantized`
        # Weights of parameters that are gathered by functions of their own.
        self.extended = [group.weights for group in groups if group.key.extended]
        # Those that are copies of what was gathered.
        self.joined = [weights for weights in self.extended if weights.are_joined]
        self._find_params()
        # The places of its parameters in modules; None until the engine gives them.
        self.slots: UnitSlots | None = None
        # Whether modules go on to show unsharded parameters after its forward, while weights are
        # there, where units switch by themselves.
        self.stays_shown = False
        self.stays_shown_after_backward = False  # likewise after its backward
        for group in groups:
            _label(group, f"unit {self.name}")
        if self.extended:
            set_classes(self._own_classes)

    def _find_params(self) -> None:
        # That of one with extensions is another object once it is made.
        params: list[tuple[ParamGroup, nn.Parameter]] = []
        for group in self.groups:
            params += [(group, param) for param in group.unsharded]
        given = [one.dtensor for group in self.groups for one in group.managed]
        dtensors = [param for param in given if param is not None]
        # The parameters whose weights are quantized.
        self.quantized = [param for group, param in params if group.key.quantized]
        # Those whose weights are not main weights: what is written to them is lost.
        self._lossy = [param for group, param in params if not group.main.is_compute_weight]
        # How often each of these has been written, when that was last looked at.
        self._versions = self._count_writes()
        # Classes of the parameters while their weights are there.
        self._own_classes = [(param, _present_class(group, param)) for group, param in params]
        self._own_classes += [(param, DTensor) for param in dtensors]
        # And while they are not.
        self._guarding = [(param, self._guard_class(group, param)) for group, param in params]
        self._guarding += [(param, ReshardedDTensor) for param in dtensors]

    def write_by_graphs(self, groups: Collection[ParamGroup], adds: bool) -> None:
        """From now on CUDA graphs write gradients of `groups`, and of no others, into their
        buckets, which are open from the beginning of the unit's backward. adds: as of
        `GradBuffers.write_by_graphs`."""
        for group in self.trainable_groups:
            group.grads.write_by_graphs(group in groups, adds)
        self._find_direct()

    def keep_weight_memory(self, groups: Collection[ParamGroup]) -> None:
        """Keeps the memory of gathered weights of `groups`, and of no others, on the current
        stream."""
        for group in self.groups:
            group.weights.keep_memory(group in groups)
            for param in group.params if group.key.quantized else ():
                self._library.keep_padded(param, group in groups)  # type: ignore[union-attr]

    def begin_training(self, groups: Collection[ParamGroup]) -> None:
        """Makes the gradients of those of `groups` that are the unit's and have none yet."""
        for group in self.groups:
            if group in groups:
                group.begin_training()
                _label(group, f"unit {self.name}")
        self._find_trainable()

    def _find_trainable(self) -> None:
        # Groups that have gradients.
        self.trainable_groups = [group for group in self.groups if group.key.requires_grad]
        self._find_direct()
        self._count_kept_grads()

    def _find_direct(self) -> None:
        # Groups with gradients that modules, or CUDA graphs, write into the bucket by themselves.
        self.direct_groups = [group for group in self.trainable_groups if group.grads.direct.any]

    def _count_kept_grads(self) -> None:
        kept = [group.grads.is_kept for group in self.trainable_groups]
        # Whether gradients of any group add up over microbatches.
        self.keeps_grads = any(kept)
        # Whether those of any group are reduced in each backward.
        self.reduces_each = not all(kept) if kept else self.strategy.shard_grads

    def keep(self, row: Strategy) -> None:
        """Keeps from one microbatch to the next what `row` does not shard, from the next step on.

        Shards stay as they are. Must be called between two steps, and alike on all ranks."""
        self.strategy = row
        self.stays = not row.shard_weights and not self.keeps_weights
        for group in self.trainable_groups:
            group.grads.keep(not row.shard_grads)
        self._count_kept_grads()

    def stay(self, stays: bool) -> None:
        """Sets whether gathered weights are kept from one microbatch to the next."""
        self.stays = stays

    def defer(self, deferred: bool) -> None:
        """Sets whether gradients of the next backwards are kept on each rank and not reduced, alike
        on all ranks. Groups that cannot keep theirs (`GradBuffers.can_be_kept`) are reduced in each
        backward all the same."""
        self.defers = deferred

    def withhold(self, withheld: bool) -> None:
        """Sets whether gradients of the next backwards are reduced over the shard axis alone, alike
        on all ranks. They are attached when a later backward reduces them over the outer axis."""
        self.withholds = withheld

    @property
    def gives_grads(self) -> bool:
        """True if the user has asked for reductions in the next backwards, over all axes."""
        return False in (self.defers, self.withholds) and True not in (self.defers, self.withholds)

    def follow_deferral(self) -> None:
        """Has groups keep the gradients of the backward that begins, if that was asked for. What is
        kept stays so until it is reduced."""
        for group in self.trainable_groups:
            group.grads.withhold(bool(self.withholds))
        if self.defers is None:
            return
        for group in self.trainable_groups:
            if not group.grads.is_summed:
                can = group.grads.keeps_beside or group.grads.state is GradState.EMPTY
                group.grads.keep(can and bool(self.defers))
            begins_sums = bool(self.defers) and not group.grads.is_summed
            set_grad_dtypes(group.managed, group.config.policy, begins_sums)
            is_kept = bool(self.defers) and group.grads.is_kept
            keep_partial(group.managed, is_kept and group.grads.has_own_dtype)
        self._count_kept_grads()

    @property
    def active_groups(self) -> list[ParamGroup]:
        """The groups whose gradients the present backward collects: those that are not idle, and
        idle ones that have gradients."""
        for group in self.trainable_groups:
            if group.grads.is_idle:
                return [
                    one
                    for one in self.trainable_groups
                    if not one.grads.is_idle or one.grads.has_untaken()
                ]
        return self.trainable_groups

    def saves_through_hooks(self) -> None:
        """Notes that its module runs while hooks on saved tensors are set."""
        for group in self.direct_groups:
            group.grads.direct.hooked = True

    def check_gathered(self) -> None:
        """Raises RuntimeError if a backward that is over had no weights to read. Looks only at
        weights in a slot, where it may have read those of another unit in their place."""
        if not self.backward_reads_weights or self.weight_slot is None:
            return
        if self.phase is not Phase.READY:
            raise RuntimeError(
                f"unit {self.name}: its backward ran without its weights, because no tensor that "
                "requires a gradient was found in its output. Return tensors, or containers, "
                "dataclasses or objects that have them as attributes"
            )

    def advance(self, phase: Phase) -> None:
        """Moves to `phase`. Raises RuntimeError if that is not a legal transition."""
        if (self.phase, phase) not in TRANSITIONS:
            raise RuntimeError(
                f"unit {self.name}: {self.phase.name} -> {phase.name} is not a legal transition"
            )
        if phase is Phase.READY:
            set_classes(self._own_classes)
            self._versions = self._count_writes()
        elif phase is Phase.SHARDED:
            if self.quantized:
                self.drop_derived()
            set_classes(self._guarding)
            self.show(False)
        self.phase = phase

    def take_slots(self, slots: UnitSlots) -> None:
        """Gives the unit the places of its parameters."""
        self.slots = slots

    def show(self, unsharded: bool) -> None:
        """Shows its unsharded or sharded parameters, if it does that by itself."""
        slots = self.slots
        if slots is not None and slots.by_itself:
            slots.show(unsharded)

    def hide_after_forward(self) -> None:
        """Shows sharded parameters, unless unsharded ones are to stay after a forward."""
        if not self.stays_shown:
            self.show(False)

    def hide_after_backward(self) -> None:
        """Shows sharded parameters, unless unsharded ones are to stay after a backward."""
        if not self.stays_shown_after_backward:
            self.show(False)

    def stay_shown(self, *, forward: bool | None = None, backward: bool | None = None) -> None:
        """Sets whether unsharded parameters stay after a forward, or after a backward."""
        if forward is not None:
            self.stays_shown = forward
        if backward is not None:
            self.stays_shown_after_backward = backward

    def _count_writes(self) -> list[int]:
        return [param._version for param in self._lossy]

    def take_written(self) -> list[str]:
        """Labels of the parameters whose gathered weights were written since they were gathered, or
        since the last call. Parameters whose gathered weights are main weights are left out."""
        if self.phase is not Phase.READY:
            return []
        before = self._versions
        now = self._count_writes()
        if before == now:
            return []
        self._versions = now
        found = []
        for param, old_count, count in zip(self._lossy, before, now, strict=True):
            if old_count != count:
                found.append(param._fsdp_label)  # type: ignore[attr-defined]
        return found

    def _guard_class(self, group: ParamGroup, param: nn.Parameter) -> type:
        original = type(param)
        if group.key.quantized and self._library is not None:
            return self._library.guard_class(original)
        if group.key.extended and original not in _PLAIN:
            return resharded_class(original, tuple(inner_names(param)))
        return ReshardedParameter

    def make_extended(self) -> None:
        """Makes what modules get of weights that were gathered by functions of their own."""
        made = [weights.finish() for weights in self.extended]
        if any(made):
            self._find_params()
            set_classes(self._own_classes)
        self._versions = self._count_writes()

    def release_joined(self) -> None:
        """Gives back the memory of gathered weights that are copied, on the current stream."""
        for weights in self.joined:
            weights.release_joined()

    def prepare(self) -> None:
        """Makes quantized weights, which are gathered, ready for a pass."""
        for param in self.quantized:
            self._library.prepare(param)  # type: ignore[union-attr]

    def release_weights(self) -> None:
        """Gives back the memory of gathered weights, on the current stream."""
        for group in self.groups:
            if not group.weights.is_kept:
                group.weights.release()

    def update_passed(self) -> None:
        """Forgets the unit's update, which the compute stream is behind now."""
        self.updated = None
        self.behind_update = False
        for group in self.trainable_groups:
            group.grads.were_read()

    def drop_derived(self) -> None:
        """Drops what was derived from quantized weights: it is old, or no longer needed."""
        for param in self.quantized:
            self._library.drop_derived(param)  # type: ignore[union-attr]


def set_classes(classes: Iterable[tuple[nn.Parameter, type]]) -> None:
    """Gives each parameter the class beside it: one that makes reads raise, or its own again."""
    for param, kind in classes:
        param.__class__ = kind


_PLAIN = (nn.Parameter, PresentParameter, GatheredParameter, ReshardedParameter)
"""Classes of parameters that are plain tensors."""


def _present_class(group: ParamGroup, param: nn.Parameter) -> type:
    for entry in group.managed if group.key.extended else ():
        if param is entry.unsharded and not entry.extension.is_made:  # type: ignore[union-attr]
            return ReshardedParameter  # it has no memory: nothing was gathered yet
    if type(param) is not nn.Parameter:
        return type(param)
    return PresentParameter if group.main.is_compute_weight else GatheredParameter


def _label(group: ParamGroup, unit: str) -> None:
    """Labels parameters and buffers, for messages."""
    for entry in group.managed:
        for param in (entry.param, entry.in_module):
            param._fsdp_label = f"parameter {entry.fqns[0]} of {unit}"  # type: ignore[attr-defined]
    for full in group.weights.unsharded:
        name = f" ({full.plane.name})" if group.key.quantized else ""
        full.label = f"the gathered weights{name} of {unit}"
    if group.key.requires_grad:
        group.grads.bucket.label = f"the reduce bucket of {unit}"
        group.grads.main.label = f"the main gradients of {unit}"  # which may be the bucket too


class DeferredUpdates:
    """Updates of weights that go on behind the step that queued them.

    Args:
        units: of one engine.
    """

    def __init__(self, units: Sequence[Unit], runtime: Runtime) -> None:
        self._units = units  # of one engine
        self._runtime = runtime  # streams
        self._updaters: list[weakref.ref[Any]] = []  # see `join`
        self._began: Any = None  # event of the last backward's beginning, if a step may follow
        self._last: Any = None  # event of the last update that compute does not follow yet

    def join(self, updater: Any) -> None:
        """Adds an updater of some units (`optim/residency.py`), which has a stream of its own.

        `load_ahead`, `drop_loads` and `settle` call its methods of the same names. It is held
        weakly."""
        self._updaters.append(weakref.ref(updater))

    def queued(self, unit: Unit, event: Any) -> None:
        """Notes that the update of `unit`, which reads its gradients, was queued.

        It is over when `event` has happened, and so are the updates that were queued before it."""
        self._last = event
        unit.updated = event
        unit.behind_update = False
        for group in unit.trainable_groups:
            group.grads.read_by_update()

    def begin_backward(self) -> None:
        """Orders the compute stream behind all updates: gradients may be written after this."""
        self.order_compute()
        if self._updaters:
            self._began = self._runtime.record(COMPUTE)

    def order_compute(self) -> None:
        """Orders the compute stream, and the gathers that follow, behind all updates."""
        if self._last is None:
            return
        self._runtime.wait(COMPUTE, self._last)
        self._runtime.wait(GATHER, self._last)
        self._last = None
        for unit in self._units:
            if unit.updated is not None:
                unit.update_passed()

    def load_ahead(self) -> None:
        """Has updaters load what the first updates need. Called when all gradients of a step are on
        their way. The copy may start once the last backward has begun: host memory is final then.
        """
        if self._began is not None:
            for updater in self._alive():
                updater.load_ahead(self, self._began)

    def drop_loads(self) -> None:
        """Drops what was loaded ahead, because main weights or state may have been written, or no
        step follows."""
        self._began = None
        for updater in self._alive():
            updater.drop_loads()

    def settle(self) -> None:
        """Waits for updates: main weights and state may be read and written after this, on the
        compute stream and, where they are in host memory, by the host."""
        for updater in self._alive():
            updater.settle()

    def _alive(self) -> Iterator[Any]:
        for ref in self._updaters:
            updater = ref()
            if updater is not None:
                yield updater
