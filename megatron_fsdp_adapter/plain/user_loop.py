"""A training loop of the user's own. Between passes it may do with parameters and gradients what
torch allows: freeze, write, clear, replace and hook them, and run no backward on some ranks.

The engine follows that when a pass begins, and when gradients are finished. Megatron's loop
notifies its engine of what it does, which looks at none of this. Watching the attribute instead
was rejected: torch has no hook for `p.grad = None`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from itertools import groupby
from traceback import walk_stack
from typing import Any

import torch
from torch import nn

from ..build.guards import refuse_conversions
from ..build.shard_attributes import mark_shard
from ..core.engine.engine import FsdpEngine
from ..core.engine.group import GradState, ParamGroup
from ..core.engine.hooks import RootCall, RootName
from ..core.engine.params import ParamPair
from ..core.engine.partition import unchecked
from ..state.sharded_state_dict import register_state_dict_hooks
from .optimizer_rows import watch_steps


class UserLoopEngine(FsdpEngine):
    """The engine under a loop of the user's own; arguments are those of `FsdpEngine`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.quantization is not None:
            self.quantization.unnotified = True
        self.reduce.repeats_outer = True
        if self.reduce.outer:
            # A rank that runs no microbatch knows of no `no_sync`, and reduces in the same order.
            self.after_no_sync = None
        self._found_unsharded = False  # by the forward that runs, or ran last
        # Whose `requires_grad` was False when it was last looked at.
        self._frozen = {pair for pair in self.pairs if not pair.group.key.requires_grad}
        self._has_frozen = False  # a group that is trained
        self._given: set[ParamPair] = set()  # whose gradients were attached, and not forgotten
        self._zeroed: set[ParamGroup] = set()  # see `zero_absent_grads`
        self._frozen_late: set[ParamPair] = set()  # behind a backward of this step

    # What the engine calls.

    def root_pre_forward(self, name: RootName) -> None:
        """Sees that a registered method has raised, which torch's wrapper of it does not say."""
        if self.running_root is RootCall.METHOD and not _runs_method():
            self.running_root = RootCall.RAISED
        super().root_pre_forward(name)

    def begin_forward(self, name: RootName) -> None:
        """Follows the user's changes also while a forward waits for its backward."""
        self._found_unsharded = self.switch.shows_unsharded
        if self._found_unsharded:
            self._follow_user()
        super().begin_forward(name)

    def before_unsharded(self) -> None:
        """Marks gathered weights stale, also those of main weights in host memory."""
        super().before_unsharded()
        self.mark_main_weights_stale()
        self._follow_user()

    def end_evaluation(self) -> None:
        """Shows sharded parameters again if they were shown before. Without `no_grad` too: what it
        gave needs no gradient, as all is frozen, or tokens were generated."""
        super().end_evaluation()
        if self.counts_calls:
            self.in_flight = max(0, self.in_flight - 1)
        if not self._found_unsharded and not torch.is_grad_enabled():
            self.to_sharded()

    def start_backward(self, accumulates: bool) -> None:
        """Follows what happened to gradients since the forward. Another backward may have ended
        since: a forward that is recomputed in this one reads unsharded parameters again."""
        if accumulates:
            self._follow_grads()
            self.to_unsharded()
        super().start_backward(accumulates)

    def compared_numbers(self) -> Sequence[int]:
        """A flag for each trained parameter: a backward of this rank has given it a gradient, or
        none is to, because it is frozen."""
        return [
            not self._takes_grad(pair) or pair.index in pair.group.given for pair in self.trained
        ]

    def _takes_grad(self, pair: ParamPair) -> bool:
        """True if a gradient of this step is to be attached: also one from before a freeze."""
        return pair.sharded.requires_grad or pair in self._frozen_late

    def attach_grads(self) -> None:
        """Leaves parameters without a gradient to which no rank's backward has given one; forgets
        all gradients, which are zeros, if there is no other. The host waits for the other ranks
        only where this one has given a parameter none."""
        flags = self.compared_numbers()
        if not all(flags):
            flags = self.launches.largest()
        absent = []
        for pair, given in zip(self.trained, flags, strict=True):
            is_due = given and self._takes_grad(pair)
            if pair.sharded.grad is None and not is_due:
                absent.append(pair)
        if len(absent) == len(self.trained):
            self.zero_grads()
            return
        super().attach_grads()
        for pair in self._frozen_late:
            if pair.group.grad_state is not GradState.EMPTY:
                pair.attach_grad()
        self._frozen_late.clear()
        dropped = [pair for pair in absent if pair.group not in self._zeroed]
        for pair in dropped:
            pair.drop_grad()
        # A group of which all are absent has no gradients: the next backward need not add to any.
        for group in {pair.group for pair in dropped}:
            if all(pair.sharded.grad is None for pair in self.trained if pair.group is group):
                group.drop_grads(collected=False)
        self._given |= {pair for pair in self.trained if pair.sharded.grad is pair.grad}

    def zero_absent_grads(self, groups: Iterable[ParamGroup], zeroed: bool) -> None:
        """Has parameters of `groups` have zeros, or nothing, for gradients that no rank gives."""
        if zeroed:
            self._zeroed.update(groups)
        else:
            self._zeroed.difference_update(groups)

    def grads_finished(self) -> None:
        """Runs `register_post_accumulate_grad_hook` of the sharded parameters."""
        super().grads_finished()
        # Of several forwards that one backward has joined, each was counted.
        self.in_flight = 0
        for pair in self.trained:
            hooks = pair.sharded._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if hooks and pair.sharded.grad is not None:
                for hook in list(hooks.values()):
                    hook(pair.sharded)

    def zero_grads(self) -> None:
        """Forgets all gradients, those too that the user has given."""
        super().zero_grads()
        self._given.clear()
        self._frozen_late.clear()

    def recover(self) -> bool:
        """Forgets also what the last backward of a step has left, if that raised: it is not in
        `.grad`, where a loop that leaves such a step out would clear it."""
        failed = self.backward
        unseen = failed.running and failed.accumulates and failed.is_last is not False
        with_gradients = super().recover()
        if unseen and self.auto_sync:
            self._forget({pair for pair in self.trained if pair.sharded.grad is None}, True)
        return with_gradients

    # What an optimizer of torch calls.

    @torch.no_grad()
    def complete_grads(self) -> None:
        """Before a step, or clipping: finishes what the backwards of all ranks have begun. A rank
        on which none ran joins the others' gathers and reductions, with zeros; there are no
        gradients after if none ran anywhere. With sharded weights it cannot join, as the others
        wait for it in forward; and gradients that the user has given stay."""
        if not self.has_grads:
            if self.config.strategy.shard_weights:
                return
            given = any(pair.sharded.grad is not None for pair in self.trained)
            if given and not self.grads_attached:
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
        A group is idle if it was frozen in every forward whose backward is still to come."""
        self._follow_grads()
        if not (self._follow_requires_grad() or self._has_frozen):
            return
        self._has_frozen = False
        for unit in self.units:
            for group in unit.trainable_groups:
                with unchecked():
                    frozen = not any(param.requires_grad for param in group.params)
                group.idle = frozen and (group.idle or self.in_flight <= 0)
                if frozen:
                    self._has_frozen = True

    def _follow_requires_grad(self) -> bool:
        """Gives both parameters of a pair the `requires_grad` that the user has given one of them
        since the last call; returns whether there was any.

        Raises:
            RuntimeError: a parameter that was frozen when it was wrapped is to be trained, or has
                a hook that cannot run.
        """
        changed = []
        with unchecked():
            for pair in self.pairs:
                known = pair not in self._frozen
                if pair.sharded._backward_hooks:
                    raise RuntimeError(
                        f"register_hook on parameter {pair.managed.fqns[0]}: no gradient passes "
                        "through a sharded parameter in backward, so the hook would never run. Use "
                        "register_post_accumulate_grad_hook, which runs when the reduced gradient "
                        "is in .grad"
                    )
                if pair.unsharded.requires_grad is known and pair.sharded.requires_grad is known:
                    continue
                if pair.grad is None:
                    raise RuntimeError(
                        f"requires_grad of {pair.managed.fqns[0]} was set to True, but the "
                        "parameter was frozen when the model was wrapped, so it has no gradient "
                        "buffer. Wrap the model with requires_grad=True, and freeze the parameter "
                        "after that"
                    )
                changed.append(pair)
            for pair in changed:
                trained = pair in self._frozen
                if not trained and self.has_grads:
                    self._frozen_late.add(pair)
                pair.unsharded.requires_grad = trained
                pair.sharded.requires_grad = trained
        self._frozen ^= {*changed}
        return bool(changed)

    def _follow_grads(self) -> None:
        """Takes over what the user has done to `.grad` of the sharded parameters since it was
        attached: taken away, under either name, or replaced by another tensor."""
        cleared = set()
        replaced = []
        for pair in self._given:
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
        """Forgets the gradients of `chosen`. The shard of a group goes when none of its parameters
        has a gradient; until then theirs are zeros in it.

        collected: also what a backward has left on the unsharded parameters.
        """
        self.reduce.finish()
        self.gather.updates.order_compute()
        self._given -= chosen
        for pair in chosen:
            pair.drop_grad()
        for group, found in groupby(self.trained, lambda pair: pair.group):
            pairs = list(found)
            mine = [pair.index for pair in pairs if pair in chosen]
            others = [pair for pair in pairs if pair not in chosen]
            have = any(not self.grads_attached or pair in self._given for pair in others)
            if mine and have:
                _zero_grads(group, mine, collected)
            elif mine:
                group.drop_grads(collected)
        self.grads_attached &= self.has_grads
        if self.reduce.check is not None and not self.has_grads:
            self.reduce.check.clear()


def _runs_method() -> bool:
    """True if this thread is inside of torch's wrapper of a registered method."""
    return any(frame.f_code.co_name == "wrapped_method" for frame, _ in walk_stack(None))


def mark_shards(engine: UserLoopEngine, module: nn.Module, shown_by: nn.Module) -> None:
    """Marks the parameters of `engine` for optimizers and checkpoints, and makes state dicts of
    `module` and below show them. `shown_by`, the module that users have, and those below refuse
    conversions."""
    for pair in engine.pairs:
        mark_shard(pair)
        pair.sharded._fsdp_engine = weakref.ref(engine)  # type: ignore[attr-defined]
    register_state_dict_hooks(module, engine)
    refuse_conversions(shown_by, engine)
    watch_steps()


def _zero_grads(group: ParamGroup, indices: Sequence[int], collected: bool) -> None:
    """Makes the gradients of some of the group's parameters zeros, wherever they are by now; with
    `collected` also forgets what a backward has left on the unsharded ones."""
    with unchecked():
        if collected:
            for index in indices:
                group.params[index].grad = None
    group.given -= {*indices}
    if group.grad_state is not GradState.EMPTY:
        if group.grad_state is GradState.ACCUMULATED:
            items = group.collected.params
        else:
            items = group.grad.items(group.held)
        torch._foreach_zero_([items[index] for index in indices])
