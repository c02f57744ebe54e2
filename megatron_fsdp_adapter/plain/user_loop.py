"""The engine for a training loop of the user's own. Between passes the loop may do with parameters
and gradients what torch allows: freeze, write, clear, replace and hook them. Some ranks may run no
backward.

The engine looks for such changes when a pass begins, and when gradients are finished. The engine of
Megatron's wrapper looks for none: Megatron's loop notifies it. Watching the attributes was
rejected: torch has no hook for `p.grad = None`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import groupby
from typing import Any

import torch
from torch import nn

from ..build.building import for_training
from ..build.shard_attributes import mark_shard
from ..core.engine.grad_states import GradState
from ..core.engine.group import ParamGroup
from ..core.engine.params import ParamPair, refuse_assigned_data
from ..core.engine.partition import unchecked
from ..core.engine.reduce import REDUCED_STATES
from ..core.engine.step import Last, RootCall, RootName
from . import host_grads
from .joined import JoiningParameters
from .late_training import refuse_training
from .left_grads import Earlier, forget_absent, refuse_sums, refuse_untaken
from .registered_methods import runs_registered_method
from .shown import ShowingEngine


class UserLoopEngine(ShowingEngine):
    """The engine under a loop of the user's own; arguments are those of `FsdpEngine`."""

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        # True if the last forward began with gradients attached, so that a step may follow it.
        self._step_may_follow = False
        super().__init__(module, *args, **options)
        self._joining = JoiningParameters(module)  # of which none may be trained
        if self.quantization is not None:
            self.quantization.expect_writes()
        self.reduce.repeat_outer()
        if self.reduce.outer:
            # A rank that runs no microbatch has seen no `no_sync`. With True the others would
            # reduce over the outer axis unit by unit, in another order than that rank.
            self.is_last_after_no_sync = Last.UNKNOWN
        # True if unsharded parameters were shown when the last forward began.
        self._began_unsharded = False
        # Those whose `requires_grad` was False when it was last looked at.
        self._frozen = {pair for pair in self.pairs if not pair.group.key.requires_grad}
        # True if all parameters of some group that has gradients are frozen.
        self._has_frozen_group = False
        # Those whose gradients were attached, and not forgotten since.
        self._attached: set[ParamPair] = set()
        # Groups whose parameters get zeros where no rank gives a gradient.
        self._zero_if_absent: set[ParamGroup] = set()
        # Those that were frozen after a backward of this step.
        self._frozen_late: set[ParamPair] = set()
        # Those to which the backwards that were finished last have given a gradient, on any rank.
        self._given_now: list[ParamPair] = []
        # The gradients that were there when the last backward began.
        self._earlier = Earlier.NONE

    # What the engine calls.

    def root_pre_forward(self, name: RootName) -> None:
        """Notices that a registered method has raised: torch's wrapper of it does not tell."""
        if self.step.running is RootCall.METHOD and not runs_registered_method():
            self.step.forward_raised()
        super().root_pre_forward(name)

    def begin_forward(self, name: RootName) -> None:
        """Takes over the user's changes, also while another forward waits for its backward.

        If that one began with gradients attached, weights may have been stepped since. All ranks
        gather them again then: which parameters are shown may differ between ranks."""
        self._began_unsharded = self._writes.are_counted
        if self.switch.shows_unsharded:  # else `before_unsharded` takes them over
            self._follow_user()
        if self._step_may_follow:
            self.mark_main_weights_stale()
            self.gather.mark_stale()
        if torch.is_grad_enabled():
            self._joining.refuse()
        torch.clear_autocast_cache()  # an earlier cast gives its gradient after the unit's backward
        super().begin_forward(name)
        self._step_may_follow = self.step.grads_attached

    def before_unsharded(self) -> None:
        """Takes over the user's changes, too."""
        super().before_unsharded()
        self._follow_user()

    def to_sharded(self) -> None:
        """Notes that all weights become stale when unsharded parameters are shown again."""
        super().to_sharded()
        self._step_may_follow = False

    def end_evaluation(self) -> None:
        """Shows sharded parameters again if they were shown before, and gradients are disabled."""
        super().end_evaluation()
        # Gradients were enabled, but the output needs none: all is frozen, or it is tokens.
        if self.counts_calls:
            self.step.forget_forward()
        if not self._began_unsharded and not torch.is_grad_enabled():
            self.to_sharded()

    def start_backward(self, accumulates: bool) -> None:
        """Takes over what the user did to gradients since the forward, and shows unsharded
        parameters. Another backward may have ended since then and shown sharded ones, but a forward
        that is recomputed in this backward reads unsharded ones."""
        if accumulates:
            self._follow_grads()
            self._follow_budget()
            for unit in self.units:
                unit.follow_deferral()
            self._earlier = Earlier.NONE
            if self.has_grads:
                is_attached = self.step.grads_attached
                self._earlier = Earlier.ATTACHED if is_attached else Earlier.UNATTACHED
        if accumulates or self.step.in_flight > 0:
            self.to_unsharded()
        super().start_backward(accumulates)

    def _follow_budget(self) -> None:
        """Has a budget choose the kept units again if a step begins with this backward, however the
        user has cleared gradients.

        A loop may also add to gradients that are reduced. A kept sum is reduced only once, so units
        keep weights alone in such a loop."""
        if self.budget is None:
            return
        if not self.has_grads:
            self.budget.choose(self)
            return
        for grads in self.grads:
            is_reduced = grads.state in REDUCED_STATES
            if is_reduced and grads.is_kept and grads.can_be_kept:
                self.budget.forgo_grads(self)
                return

    def compared_numbers(self) -> Sequence[int]:
        """The flags of `_given`, and the budget's numbers."""
        return [*self._given(), *super().compared_numbers()]

    def _given(self) -> list[bool]:
        """A flag for each parameter: True if a backward of this rank has given it a gradient since
        gradients were last attached, or if it is frozen and needs none. There are as many on all
        ranks, also while some train parameters that others do not."""
        return [
            not self._takes_grad(pair) or pair.index in pair.group.grads.given
            for pair in self.pairs
        ]

    def _takes_grad(self, pair: ParamPair) -> bool:
        """True if the parameter is to have its gradient, also if it was frozen in this step."""
        is_trained = pair.grad is not None and pair.sharded.requires_grad
        return is_trained or pair in self._frozen_late

    def attach_grads(self) -> None:
        """Attaches gradients, but not to parameters to which no rank's backward has given one.

        - Those keep None, or get zeros if `zero_absent_grads` asks for it.
        - If no parameter has got one, all gradients, which are zeros then, are forgotten.
        - The host waits for the other ranks only if this rank has given a parameter none.
        """
        flags: Sequence[int] = self._given()
        if not all(flags):
            flags = self.launches.largest()[: len(flags)]
        self._given_now = []
        absent = []
        for pair, given in zip(self.pairs, flags, strict=True):
            if pair.grad is None:
                continue
            is_kept = not pair.group.grads.are_whole
            is_due = given and self._takes_grad(pair)
            if is_due and not is_kept:
                self._given_now.append(pair)
            elif not is_due and pair.sharded.grad is None:
                absent.append(pair)
        for grads in self.grads:
            if grads.are_whole:
                grads.were_attached()
        if len(absent) == len(self.trained):
            self.zero_grads()
            return
        host_grads.store(self.trained, self.runtime)
        super().attach_grads()
        for pair in self._frozen_late:
            if pair.group.grads.state is not GradState.EMPTY:
                pair.attach_grad()
        self._frozen_late.clear()
        dropped = [pair for pair in absent if pair.group not in self._zero_if_absent]
        for pair in dropped:
            pair.drop_grad()
        forget_absent(dropped, self.trained)
        self._attached |= {pair for pair in self.trained if pair.sharded.grad is pair.grad}

    def divide_grads(self, groups: Sequence[ParamGroup], factor: float) -> None:
        """Divides sums of gradients of `groups` by `factor` from now on."""
        self._follow_grads()
        self.reduce.scale_sums(groups, 1.0 / factor)

    def zero_absent_grads(self, groups: Iterable[ParamGroup], zeroed: bool) -> None:
        """Sets the gradients of parameters of `groups` to which no rank gives one: zeros if
        `zeroed`, else None."""
        if zeroed:
            self._zero_if_absent.update(groups)
        else:
            self._zero_if_absent.difference_update(groups)

    def grads_finished(self) -> None:
        """Runs `register_post_accumulate_grad_hook` of parameters that were given a gradient."""
        super().grads_finished()
        # One backward may have ended several forwards, each of which was counted.
        self.step.forget_forwards()
        for pair in self._given_now:
            found = pair.sharded._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if found and pair.sharded.grad is not None:
                for hook in list(found.values()):
                    hook(pair.sharded)

    def zero_grads(self) -> None:
        """Forgets all gradients, also those that the user has assigned."""
        self._earlier = Earlier.NONE
        super().zero_grads()
        self._attached.clear()
        self._frozen_late.clear()

    def recover(self) -> bool:
        """Also forgets what a backward that raised has left: a loop that skips it clears `.grad`,
        but these gradients are not there yet.

        Raises:
            RuntimeError: it has added some to gradients of an earlier backward, which are still
                there.
        """
        failed = self.step.backward
        if not (failed.running and failed.accumulates and self.auto_sync):
            return super().recover()
        self._follow_grads()
        units = [self.units[ordinal] for ordinal in failed.done]
        added = [group for unit in units for group in unit.trainable_groups]
        refuse_sums(added, self.trained, self._earlier, self._attached)
        with_gradients = super().recover()
        for grads in self.grads:
            grads.take_off()
        if self._earlier is not Earlier.UNATTACHED:
            self._forget({pair for pair in self.trained if pair.sharded.grad is None}, True)
            if self.has_grads:
                self.step.keep_grads()
        return with_gradients

    def reset(self) -> None:
        """Forgets a forward or backward that raised, with its gradients, and all sums that are not
        in `.grad`. What is in `.grad` stays, unless that backward has added to it."""
        self._follow_grads()
        failed = self.step.backward
        units = [self.units[ordinal] for ordinal in failed.done] if failed.running else []
        added = {group for unit in units for group in unit.trainable_groups}
        if any(pair.group in added for pair in self._attached):
            self.zero_grads()
            return
        super().recover()
        for grads in self.grads:
            grads.forget_sums()
        self._forget({*self.trained} - self._attached, collected=True)
        if self._attached:
            self.step.keep_grads()

    # What an optimizer of torch calls.

    def begin_step(self) -> None:
        """Shows sharded parameters, which a step is about to write, unless a pass runs. All weights
        are stale after that, also those that a forward without a backward has left."""
        if not self._runs_pass():
            self._look_at_left_grads()
            self.to_sharded()
        refuse_assigned_data(self.pairs)

    def _look_at_left_grads(self) -> None:
        """Forgets gradients of a backward that raised; refuses those that no hook has seen."""
        if self.step.backward.has_raised:
            self.recover()
        if self.step.is_between_passes:
            refuse_untaken(self.groups)

    @torch.no_grad()
    def complete_grads(self) -> None:
        """Finishes what the backwards of all ranks have begun, before a step or clipping.

        A rank on which no backward ran joins the gathers and reductions of the others, with zeros.
        If none ran on any rank, there are no gradients after. Such a rank does nothing:

        - with sharded weights: it cannot join, as the others wait for it in forward;
        - if the user has assigned gradients, which stay.
        """
        self._look_at_left_grads()
        if not self.has_grads:
            if self.config.strategy.shard_weights:
                return
            some_exist = any(pair.sharded.grad is not None for pair in self.trained)
            if some_exist and not self.step.grads_attached:  # the user has assigned them
                return
            self.to_unsharded()
            self.gather.unshard_all(as_forward=True)
        self.finish_grads()

    def zero_grads_of(self, params: Iterable[torch.Tensor]) -> None:
        """Forgets the gradients of these sharded parameters."""
        ids = {id(param) for param in params}
        chosen = {pair for pair in self.pairs if id(pair.sharded) in ids}
        if len(chosen) == len(self.trained):
            self.zero_grads()
        else:
            self._forget(chosen, collected=True)

    # What the user has done.

    def _follow_user(self) -> None:
        """Takes over what the user has done to gradients and `requires_grad` since the last pass.
        A group becomes idle once it was frozen in every forward whose backward is still to come."""
        refuse_assigned_data(self.pairs)
        self._follow_grads()
        if not (self._follow_requires_grad() or self._has_frozen_group):
            return
        self._has_frozen_group = False
        for unit in self.units:
            for group in unit.trainable_groups:
                with unchecked():
                    frozen = not any(param.requires_grad for param in group.params)
                group.grads.freeze(frozen, between_passes=self.step.in_flight <= 0)
                if frozen:
                    self._has_frozen_group = True

    def _follow_requires_grad(self) -> bool:
        """True if the user has set `requires_grad` of any parameter since the last call. Both
        parameters of its pair get the new value, whichever of them was set.

        Raises:
            RuntimeError: a parameter that was frozen when it was wrapped, and cannot be trained, is
                to be; or a parameter has a hook that cannot run.
        """
        changed = []
        with unchecked():
            for pair in self.pairs:
                was_trained = pair not in self._frozen
                if pair.sharded._backward_hooks:
                    raise RuntimeError(
                        f"register_hook on parameter {pair.managed.fqns[0]}: no gradient passes "
                        "through a sharded parameter in backward, so the hook would never run. Use "
                        "register_post_accumulate_grad_hook, which runs when the reduced gradient "
                        "is in .grad"
                    )
                if (
                    pair.unsharded.requires_grad is was_trained
                    and pair.sharded.requires_grad is was_trained
                ):
                    continue
                changed.append(pair)
            if changed:
                self._change_trained(changed)
        return bool(changed)

    @for_training()
    def _change_trained(self, changed: Sequence[ParamPair]) -> None:
        """Freezes parameters that were trained until now, and trains those that were frozen.
        RuntimeError if one of these cannot be trained."""
        self._begin_training([pair for pair in changed if pair.grad is None])
        for pair in changed:
            is_trained = pair in self._frozen  # it was frozen, and this has changed
            if not is_trained and self.has_grads:
                self._frozen_late.add(pair)
            pair.managed.param.requires_grad = is_trained
            pair.unsharded.requires_grad = is_trained
            pair.sharded.requires_grad = is_trained
        self._frozen ^= {*changed}

    def _begin_training(self, pairs: Sequence[ParamPair]) -> None:
        """Gives gradients to the groups of `pairs`, which were frozen until now. RuntimeError if
        one of them cannot be trained."""
        if not pairs:
            return
        for pair in pairs:
            refuse_training(pair)
        groups = {pair.group for pair in pairs}
        for unit in self.units:
            unit.begin_training(groups)
        for pair in self.pairs:
            if pair.group in groups:
                pair.make_grad()
                mark_shard(pair)
        self.grads = [group.grads for group in self.groups if group.key.requires_grad]
        self.trained = [pair for pair in self.pairs if pair.grad is not None]

    def _follow_grads(self) -> None:
        """Takes over what the user has done to attached gradients of sharded parameters: removed
        them (`.grad` or `decoupled_grad` is None), or replaced `.grad` by another tensor."""
        cleared = set()
        replaced = []
        for pair in self._attached:
            sharded = pair.sharded
            if sharded.grad is None or getattr(sharded, "decoupled_grad", None) is None:
                cleared.add(pair)
            elif sharded.grad is not pair.grad:
                replaced.append(pair)
        if cleared or replaced:
            self.reduce.finish()
        for pair in replaced:
            pair.grad._local_tensor.copy_(pair.local_of(pair.sharded.grad))  # type: ignore[union-attr]
            pair.sharded.grad = pair.grad
        if cleared:
            self._forget(cleared, collected=False)

    def _forget(self, chosen: Set[ParamPair], collected: bool) -> None:
        """Forgets the gradients of `chosen`. If other parameters of a group still have gradients,
        those of `chosen` become zeros in the group's shard; otherwise the shard is dropped.

        collected: also forgets what a backward has left on the unsharded parameters.
        """
        self.reduce.finish()
        self.gather.updates.order_compute()
        self._attached -= chosen
        for pair in chosen:
            pair.drop_grad()
        # `trained` lists the pairs of a group one after the other.
        for group, found in groupby(self.trained, lambda pair: pair.group):
            pairs = list(found)
            indices = [pair.index for pair in pairs if pair in chosen]
            others = [pair for pair in pairs if pair not in chosen]
            others_stay = any(
                not self.step.grads_attached or pair in self._attached for pair in others
            )
            if indices and others_stay:
                group.grads.zero(indices, collected)
            elif indices:
                group.grads.drop(collected)
        if not self.has_grads:
            self.step.forget_grads()
            if self.reduce.check is not None:
                self.reduce.check.clear()
