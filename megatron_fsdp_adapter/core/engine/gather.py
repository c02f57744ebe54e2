"""Compute weights: gathered ahead of use, released after it.

    gather stream    cast own slice, all-gather(1) | cast, all-gather(2) | release(1) ...
    compute stream              wait(1)  unit 1 ............  wait(2)  unit 2 ....

Storage is taken, filled and given back on the gather stream, so that a block freed by one unit is
reused by the next one's gather in stream order, without the host waiting for anything. The next
gather is launched after the wait for the present one, so that it is never in front of it.

The next unit is that of the last pass (`prefetch_order.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from megatron_fsdp_adapter.core.comm.communicator import Communicator, LaunchLog
from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, Runtime

from .domain_gathers import DomainGather, PairsOf, domain_gathers
from .group import ParamGroup
from .kept_parts import KeptParts
from .launches import FEWER, GATHERED, GATHERED_OUTER
from .params import refuse_writes
from .prefetch_order import PrefetchOrder
from .unit import DeferredUpdates, Phase, Unit


class GatherPipeline:
    """Gathers weights of units ahead of their use, and reshards units.

    Args:
        units: in module order, root last.
        communicators, outer: by domain name, the ones that gathers run on, over each axis.
        log: notes every gather.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        config: EngineConfig,
        runtime: Runtime,
        communicators: Mapping[str, Communicator],
        outer: Mapping[str, Communicator],
        log: LaunchLog,
    ) -> None:
        self.units = units  # in module order, root last
        self.config = config  # of the engine
        self.runtime = runtime  # streams and storage
        self.communicators = communicators  # by domain, for gathers over the shard axis
        self.outer = outer  # by domain, for gathers over the outer axis
        forward_only = [one.ordinal for one in units if not one.backward_reads_weights]
        # Of requests; it tells the units that are needed next.
        self.order = PrefetchOrder(len(units), forward_only)
        self.log = log  # notes every gather
        self.updates = DeferredUpdates(units, runtime)  # that gathers wait for
        # Whether a forward pass comes right after the backward pass that is running. If so, the end
        # of that backward launches the forward's first gathers.
        self.forward_follows = False
        # Whether weights that are gathered will be read again in this step; units that stay
        # (`Unit.stays`) are not resharded then.
        self.microbatch_follows = False
        # Whether gathers were launched that the compute stream is not ordered behind. It might
        # overwrite what they read.
        self._unordered = False
        # Units that were prefetched last.
        self._ahead: list[Unit] = []
        # By number of a slot, the unit that was gathered into it last.
        self._holders: dict[int, Unit] = {}
        # By ordinal, how many users hold a unit.
        self._held: Counter[int] = Counter()
        outer_pairs = attrgetter("weights.outer_pairs")
        inner_pairs = attrgetter("weights.gather_pairs")
        # By ordinal, the gathers of a unit over the outer axis, and those that follow.
        self._planned = [self.plan(unit.groups, outer_pairs, inner_pairs) for unit in units]
        # By ordinal, the gathers of a unit whose main weights have not changed since it was
        # gathered last: of groups whose weights do not stay.
        self._planned_again: list[list[DomainGather]] = []
        for unit in units:
            transient = [group for group in unit.groups if not group.weights.is_kept]
            _, again = self.plan(transient, outer_pairs, inner_pairs)
            self._planned_again.append(again)
        # By ordinal, the gathers of a unit that is kept in parts (`keep_over`).
        self._from_parts: dict[int, list[DomainGather]] = {}

    def unshard(self, unit: Unit, prefetches: bool = True) -> None:
        """Gathers `unit`, orders the compute stream behind that, and launches the next gathers. The
        unit's modules show unsharded parameters.

        prefetches: false for weights that are needed out of the order of passes. No further gathers
            are launched then, and the order does not change.
        """
        if not unit.groups:
            return
        if unit.phase is Phase.SHARDED:
            self._make_way(unit)
            self.start_gather(unit)
        if unit.gathered is not None:
            self._wait(unit)
        if unit.quantized:
            unit.prepare()
        unit.show(True)
        if prefetches:
            self._prefetch_after(unit)

    def prefetch(self, unit: Unit) -> None:
        """Starts gathering `unit` ahead of its use, unless that was started."""
        if unit.groups and unit.phase is Phase.SHARDED:
            self._make_way(unit)
            self.start_gather(unit)

    def hold(self, unit: Unit) -> None:
        """Counts one more user of `unit`. It stays gathered until all have called `unhold`."""
        self._held[unit.ordinal] += 1

    def unhold(self, unit: Unit) -> None:
        """Counts one user less, and reshards `unit` after the last."""
        self._held[unit.ordinal] -= 1
        self.reshard(unit)

    def hold_once(self, unit: Unit) -> None:
        """Holds `unit`, unless it is held."""
        if self._held[unit.ordinal] <= 0:
            self.hold(unit)

    def unhold_once(self, unit: Unit) -> None:
        """Counts one user of `unit` less, if it is held. Does not reshard it."""
        if self._held[unit.ordinal] > 0:
            self._held[unit.ordinal] -= 1

    def _prefetch_after(self, unit: Unit) -> None:
        """Notes that `unit` was needed, and starts the gathers of the units that come next."""
        upcoming = self.order.request(unit.ordinal)
        if self.forward_follows and self.order.ends:
            upcoming = [i for i in self.order.first() if self.units[i].phase is not Phase.READY]
        if self.config.overlap_param_gather:
            self._prefetch_each(self._within_budget(upcoming))

    def _within_budget(self, upcoming: Iterable[int]) -> list[Unit]:
        """The next unit, and further ones while the byte budget lasts."""
        budget = self.config.prefetch_bytes
        chosen = []
        for ordinal in upcoming:
            unit = self.units[ordinal]
            chosen.append(unit)
            budget -= unit.weight_bytes
            if budget <= 0:
                break
        return chosen

    def _prefetch_each(self, chosen: list[Unit]) -> None:
        """Starts gathering `chosen`, but for units whose slot is taken. Unused prefetched units are
        resharded first, so that a model which skips layers does not end up with all of them
        gathered."""
        for unit in self._ahead:
            if unit.phase is Phase.GATHERING and unit not in chosen:
                self.reshard(unit)
        for unit in chosen:
            if unit.phase is Phase.SHARDED and self._holder(unit) is None:
                self.start_gather(unit)
        self._ahead = chosen

    def _holder(self, unit: Unit) -> Unit | None:
        """Another unit whose weights are in `unit`'s slot, if there is one."""
        if unit.weight_slot is None:
            return None
        holder = self._holders.get(unit.weight_slot)
        if holder is None or holder is unit or holder.phase is Phase.SHARDED:
            return None
        return holder

    def _make_way(self, unit: Unit) -> None:
        """Reshards the unit whose weights are in `unit`'s slot. RuntimeError if it computes."""
        holder = self._holder(unit)
        if holder is None:
            return
        if holder.busy:
            raise RuntimeError(
                f"unit {unit.name} is called inside unit {holder.name}, with which it shares a "
                "fixed buffer (fsdp_double_buffer, nccl_ub). Pass fsdp_unit_modules of which "
                "none is inside another, or set the option to False"
            )
        self.reshard(holder)

    def start_gather(self, unit: Unit) -> None:
        """Starts gathering `unit`, which must be SHARDED, and its slot free."""
        unit.advance(Phase.GATHERING)
        unit.behind_update = unit.updated is not None
        if unit.behind_update:
            self.runtime.wait(GATHER, unit.updated)
        if unit.weight_slot is not None:
            self._holders[unit.weight_slot] = unit
        stale = unit.stale
        outer, inner = self._planned[unit.ordinal]
        if not stale:
            inner = self._planned_again[unit.ordinal]
        parts = unit.parts if unit.parts is not None and unit.parts.is_kept else None
        if parts is not None:
            inner = self._gathers_of(unit, parts)
        in_parts = () if parts is None else parts.groups
        tasks: list[Callable[[], Any]] = [partial(self._fill_own, unit, stale, in_parts)]
        if stale:
            tasks += self.tasks(outer)
        tasks += self.tasks(inner)
        self.runtime.submit(GATHER, *tasks)
        self._drop_parts(unit)
        unit.stale = False
        unit.gathered = self.runtime.record(GATHER)
        self._unordered = True

    def _fill_own(self, unit: Unit, stale: bool, in_parts: Collection[ParamGroup]) -> None:
        for group in unit.groups:
            group.weights.allocate()
            if group not in in_parts and (stale or not group.weights.keeps_own):
                group.main.write_weights()

    def plan(
        self, groups: Sequence[ParamGroup], outer: PairsOf, inner: PairsOf
    ) -> tuple[list[DomainGather], list[DomainGather]]:
        """The gathers of `groups` over the outer axis, and those over the shard axis that
        follow."""
        of_outer = domain_gathers(GATHERED_OUTER, self.outer, groups, outer)
        of_inner = domain_gathers(GATHERED, self.communicators, groups, inner)
        return of_outer, of_inner

    def tasks(self, planned: Sequence[DomainGather]) -> list[Callable[[], list[Any]]]:
        """Tasks for a stream that launch `planned`; none if it is empty."""
        return [partial(self._launch_each, planned)] if planned else []

    def _launch_each(self, planned: Sequence[DomainGather]) -> list[Any]:
        works = []
        for one in planned:
            self.log.note(one.kind, one.groups, one.communicator)
            pairs = [*one.pairs]
            for weights in one.asked:
                pairs += weights.asked_pairs()
            works += one.communicator.all_gather(pairs)
        return works

    def _wait(self, unit: Unit) -> None:
        self.runtime.wait(COMPUTE, unit.gathered)
        unit.gathered = None
        if unit.behind_update:
            unit.update_passed()
        if unit.phase is Phase.GATHERING:
            unit.advance(Phase.READY)
            if unit.extended:
                unit.make_extended()
            if unit.joined:
                self._release_joined(unit)

    def _release_joined(self, unit: Unit) -> None:
        """Releases gathered parts that the compute stream has joined to whole parameters."""
        self.runtime.follow(GATHER, COMPUTE)
        self.runtime.free(GATHER, unit.release_joined)

    def keep_over(self, unit: Unit, groups: Mapping[str, Any]) -> None:
        """Has the weights of `unit` kept between a forward and its backward, sharded over the ranks
        of `groups`, process groups by domain. They are not kept if there are none."""
        self._drop_parts(unit)
        self._from_parts.pop(unit.ordinal, None)
        unit.parts = None
        if groups:
            fewer = {name: Communicator(one, self.runtime.device) for name, one in groups.items()}
            unit.parts = KeptParts(unit.groups, fewer, self.runtime)

    def _gathers_of(self, unit: Unit, parts: KeptParts) -> list[DomainGather]:
        """The gathers of a unit of which there are parts."""
        if unit.ordinal not in self._from_parts:
            others = [group for group in unit.groups if group not in parts.groups]
            of_others = attrgetter("weights.gather_pairs")
            self._from_parts[unit.ordinal] = [
                *domain_gathers(FEWER, parts.communicators, parts.groups, parts.pairs_of),
                *domain_gathers(GATHERED, self.communicators, others, of_others),
            ]
        return self._from_parts[unit.ordinal]

    def _drop_parts(self, unit: Unit) -> None:
        parts = unit.parts
        if parts is not None and parts.is_kept:
            parts.is_kept = False
            self.runtime.free(GATHER, parts.release)

    def drop_parts(self) -> None:
        """Drops the parts that forwards have left: no backward of these comes."""
        for unit in self.units:
            self._drop_parts(unit)

    def reshard(self, unit: Unit, keeps: bool = False) -> None:
        """Reshards `unit` once the compute stream has passed this point, unless it is held. Weights
        that are kept stay there; of those, what was derived goes, unless `keep_derived` is set.
        keeps: they are kept over fewer ranks (`keep_over`), if that was asked for.

        Raises:
            RuntimeError: its gathered weights were written (`check_writes`).
        """
        if unit.phase is Phase.SHARDED or self._held[unit.ordinal]:
            return
        found = unit.take_written()
        stays = unit.keeps_weights or (unit.stays and self.microbatch_follows)
        if not stays:
            self._drop(unit, keeps)
        elif unit.quantized and not self.config.keep_derived:
            unit.drop_derived()
        if found:
            refuse_writes(found)

    def _written(self) -> list[str]:
        return [label for unit in self.units for label in unit.take_written()]

    def check_writes(self) -> None:
        """Raises RuntimeError if gathered weights were written and those writes are lost."""
        refuse_writes(self._written())

    def mark_written(self, unit: Unit) -> None:
        """Marks the gathered weights of `unit` as stale, because its main weights have changed.
        After that raises the RuntimeError of `check_writes`, if it has one."""
        found = unit.take_written()
        self._mark_unit_stale(unit)
        self.follow_compute()
        refuse_writes(found)

    def _mark_unit_stale(self, unit: Unit) -> None:
        unit.stale = True
        self._drop_parts(unit)
        if unit.phase is not Phase.SHARDED:
            self._drop(unit)

    def _drop(self, unit: Unit, keeps: bool = False) -> None:
        parts = unit.parts if keeps and unit.phase is Phase.READY else None
        unit.gathered = None
        unit.advance(Phase.SHARDED)
        self.runtime.follow(GATHER, COMPUTE)
        if parts is not None:
            parts.make()
            parts.is_kept = True
            self.runtime.submit(GATHER, parts.keep)
        if not unit.keeps_weights:
            self.runtime.free(GATHER, unit.release_weights)

    def reshard_all(self, but: Collection[int] = ()) -> None:
        """Reshards every unit, unused gathers included, but for those with an ordinal in `but` and
        those that the forward that follows begins with."""
        for unit in self.units:
            if unit.ordinal not in but:
                unit.busy = False
                self.reshard_unless_next(unit)

    def show_sharded(self, staying: bool) -> None:
        """Has all units but those that are held show sharded parameters. staying: also those that
        go on to show unsharded ones after a forward."""
        for unit in self.units:
            if not self._held[unit.ordinal] and (staying or not unit.stays_shown):
                unit.show(False)

    def reshard_staying(self) -> None:
        """Reshards the units that were kept for a further microbatch: none follows."""
        self.microbatch_follows = False
        for unit in self.units:
            if unit.stays:
                self.reshard(unit)

    @property
    def holds_any(self) -> bool:
        """True if any unit is held (`hold`)."""
        return any(self._held.values())

    def reshard_held(self, stay: bool) -> None:
        """Reshards every unit after a pass that raised, also the units that are held. stay: units
        that are kept between microbatches (`Unit.stays`) are kept. So it is after an evaluation,
        which may not have raised on other ranks."""
        self._held.clear()
        self.forward_follows = False
        if not stay:
            self.microbatch_follows = False
        self.reshard_all()

    def reshard_unless_next(self, unit: Unit) -> None:
        """Reshards `unit` after a backward, unless the forward that follows begins with it. Its
        modules show sharded parameters in either case."""
        unit.hide_after_backward()
        if not (self.forward_follows and unit.ordinal in self.order.first()):
            self.reshard(unit)

    def mark_stale(self) -> None:
        """Marks all gathered weights as stale, because the main weights have changed. Later gathers
        read the new ones. After that raises the RuntimeError of `check_writes`, if it has one."""
        found = self._written()
        for unit in self.units:
            self._mark_unit_stale(unit)
        self.follow_compute()
        refuse_writes(found)

    def follow_compute(self) -> None:
        """Orders later gathers behind everything on the compute stream so far: main weights that
        were written there may be gathered after this."""
        self.runtime.follow(GATHER, COMPUTE)

    def quiesce(self) -> None:
        """Orders the compute stream behind all gathers: main weights may be written after this."""
        self.runtime.follow(COMPUTE, GATHER)
        self._unordered = False

    def give_up(self) -> None:
        """Ends the use of gathered weights: main weights may be written after this.

        Raises:
            RuntimeError: gathered weights were written (`check_writes`).
        """
        self.check_writes()
        self.reshard_staying()
        self.quiesce()

    def begin_step(self) -> None:
        """Prepares for an optimizer that writes main weights next.

        Orders it behind gathers that nothing waited for. There are some if the model was run after
        gradients were finished: an evaluation that raised, or that left units out.

        Raises:
            RuntimeError: gathered weights were written (`check_writes`).
        """
        self.check_writes()
        if self._unordered:
            self.quiesce()

    def unshard_first(self) -> None:
        """Launches what the next forward pass asks for first, ahead of it."""
        self._prefetch_each([self.units[ordinal] for ordinal in self.order.first()])

    def unshard_all(self, as_forward: bool = False) -> None:
        """Gathers every unit and orders the compute stream behind it. Slots do not hold all units:
        with them only what the next forward pass asks for first is launched. as_forward: gathers in
        the order of that pass, not of the modules."""
        if any(unit.weight_slot is not None for unit in self.units):
            self.unshard_first()
            return
        order = self.order.forward() if as_forward else range(len(self.units))
        for ordinal in order:
            unit = self.units[ordinal]
            if unit.phase is Phase.SHARDED:
                self.start_gather(unit)
        for unit in self.units:
            if unit.gathered is not None:
                self._wait(unit)
