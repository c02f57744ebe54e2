"""The local tensors that an inner optimizer steps on while its parameters are DTensors.

Why local: TE's FusedAdam allocates state of a DTensor's global shape (60 GiB on an 8B model), and
torch's goes through DTensor dispatch for every operation of every parameter. The local tensors
are made once, and what the inner optimizer keeps for them is shown to checkpoints as DTensors over
the same storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..core.runtime.host_stash import HostStash
from .fused_adam import FusedAdamStep
from .residency import OFFLOAD_OPTION, LocalPair, Residency
from .state import (
    COUNT,
    GroupOptions,
    Shown,
    StateEntry,
    are_same,
    changed,
    is_same,
    is_unchanged,
    make_state,
    shown,
    taken_over,
)


def options_of(group: GroupOptions) -> GroupOptions:
    """A copy of a group's options, without parameters. A step of the group does not change it: a
    count of steps in a tensor, which is counted in place, is copied too."""
    options = dict(group)
    options.pop("params", None)
    count = options.get(COUNT)
    if isinstance(count, torch.Tensor):
        options[COUNT] = count.clone()
    return options


def set_options(group: GroupOptions, options: GroupOptions) -> None:
    """Makes `options` the only options of a group. Its parameters stay."""
    for added in group.keys() - options.keys() - {"params"}:
        del group[added]
    group.update(options_of(options))


class Clip(Protocol):
    """A clip of gradients whose norms are known."""

    @property
    def has_one_factor(self) -> bool:
        """True if one number multiplies all gradients."""

    def factor(self, device: torch.device) -> torch.Tensor | None:
        """The one factor, a float32 number on a device; None for 1."""

    def apply(self, pairs: Sequence[LocalPair]) -> None:
        """Clips the gradients of some local tensors, in place."""


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which parameter groups are updated that the inner optimizer does not update."""

    # Names of what is kept of each parameter of a group, in its shape; () for a group that is the
    # inner optimizer's.
    state: Callable[[GroupOptions], tuple[str, ...]]
    # Updates the local tensors of the other groups, given all groups; their gradients are there.
    update: Callable[[LocalShards, Sequence[GroupOptions]], None]


INNER = UpdateRule(lambda group: (), lambda shards, groups: None)
"""All groups are the inner optimizer's."""


class LocalShards:
    """The local tensors behind an inner optimizer's DTensor parameters, and their state.

    `state` is keyed by local tensor and is what the inner optimizer reads and writes while it
    steps; `optimizer.state`, keyed by parameter, shows the same storages as DTensors.
    """

    def __init__(
        self,
        optimizer: Any,
        skip_empty: bool,
        decoupled: bool,
        rule: UpdateRule,
        residency: Residency,
        fused_step: FusedAdamStep | None,
    ) -> None:
        # Whether the inner optimizer is not given shards without elements.
        self.skip_empty = skip_empty
        # Whether it reads `decoupled_grad`, of any dtype, in place of `grad`.
        self.decoupled = decoupled
        # How groups are updated that are not its own.
        self.rule = rule
        # Where main weights and state are between steps.
        self.residency = residency
        # The kernel in it, where it has one of ours.
        self.fused_step = fused_step
        # By parameter group.
        self.pairs: list[list[LocalPair]] = []
        # What the inner optimizer keeps of each local tensor.
        self.state: dict[torch.Tensor, StateEntry] = defaultdict(dict)
        # The memory of the state while it is released; None if it never was.
        self.parked: HostStash | None = None
        # The clip that is left to the next step.
        self.clip: Clip | None = None
        # By number of a group that was updated ahead of the inner optimizer's own step: the
        # options that it has after the step. Empty between steps.
        self.updated: dict[int, GroupOptions] = {}
        # True while the hook takes steps of the inner optimizer, one for each unit. A step inside
        # of one of these neither updates nor ends anything.
        self.updates_units = False
        # The attribute in which the inner optimizer looks for gradients.
        self._grad_name = "decoupled_grad" if decoupled else "grad"
        # The gradients that were put there last.
        self._local_grads: dict[torch.Tensor, torch.Tensor | None] = {}
        # What `to_sharded` puts back: `optimizer.state`, and each group's parameters. None while
        # the optimizer has them.
        self._to_put_back: tuple[Any, list[Any]] | None = None
        # By local tensor: its state as `show_state` has shown it.
        self._known: dict[torch.Tensor, Shown] = {}
        # By number of a group that this rank holds nothing of: its tensor (`params_for_inner`).
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._regroup(optimizer)

    # What a program changes.

    def follow_groups(self, optimizer: Any) -> None:
        """Takes over which parameters the groups have now, unless the inner optimizer has local
        ones."""
        if self._to_put_back is None and not self._has_pairs_of(optimizer.param_groups):
            self._regroup(optimizer)

    def _has_pairs_of(self, groups: Sequence[GroupOptions]) -> bool:
        if len(groups) != len(self.pairs):
            return False
        for group, pairs in zip(groups, self.pairs, strict=True):
            if not are_same(group["params"], [param for param, _ in pairs]):
                return False
        return True

    def _regroup(self, optimizer: Any) -> None:
        """Makes pairs of the parameters that the groups have now. ValueError if one of them is not
        sharded, or if parts of a step are planned."""
        if self.residency.parts:
            raise ValueError(
                f"add_param_group with {OFFLOAD_OPTION}, or param_groups with other "
                "parameters: units are "
                "planned when the optimizer is sharded. Make it with all of its groups, and use "
                "a learning rate of 0 to freeze parameters"
            )
        groups = [group["params"] for group in optimizer.param_groups]
        foreign = sum(not hasattr(param, "_local_tensor") for params in groups for param in params)
        if foreign:
            raise ValueError(
                f"optimizer: {foreign} of its {sum(map(len, groups))} parameters are not of a "
                "sharded model. Make it with parameters of the wrapped model"
            )
        self.pairs = [[(param, self._local_of(param)) for param in params] for params in groups]
        self.every = [pair for pairs in self.pairs for pair in pairs]  # of all groups

    def _local_of(self, param: Any) -> torch.Tensor:
        """The tensor that the inner optimizer updates in the place of `param`."""
        return self.residency.device_items.get(id(param), param._local_tensor)

    def _follow_state(self, optimizer: Any) -> bool:
        """Takes over what a program, or the optimizer's constructor, has changed in
        `optimizer.state` since state was shown. Returns True if something was changed."""
        has_changed = False
        for param, local in self.every:
            entry = optimizer.state.get(param) or {}
            known = self._known.get(local)
            if is_unchanged(entry, known):
                continue
            has_changed = True
            before = {} if known is None else known[1]
            given = changed(entry, before)
            gone = [name for name in before if name not in entry]
            values = {n: taken_over(param, local, n, v) for n, v in given.items()}
            self.drop(param, gone)
            for name, value in values.items():
                self.put(param, name, value)
            if known is not None:  # `show_state` shows again what was given
                same = {n: v for n, v in known[2].items() if n in entry and n not in given}
                self._known[local] = (entry, dict(entry), same)
        return has_changed

    def put(self, param: Any, name: str, value: Any) -> None:
        """Sets state `name` of `param` to `value`: of a tensor with the parameter's shape, this
        rank's rows. ValueError with state in host memory, if there is no such state."""
        local = self._local_of(param)
        if self.residency.on_host and name not in self.state[local]:
            raise ValueError(
                f"optimizer state {name} of a parameter of shape {tuple(param.shape)}: this "
                f"optimizer has no such state, and with {OFFLOAD_OPTION} none can be added. "
                "Load the "
                "state of an optimizer of the same kind"
            )
        stored = self.residency.state_to_write(local).get(name)
        if stored is None:
            self.state[local][name] = value
        else:
            stored.copy_(value)

    def drop(self, param: Any, names: Sequence[str]) -> None:
        """Drops the state of `param` of these names, and its entry if nothing is left, so that the
        inner optimizer makes it again. In host memory, where no step makes state, it becomes zero.
        """
        local = self._local_of(param)
        state = self.state.get(local, {})
        for name in names:
            if self.residency.on_host:
                values = state | self.residency.state_to_write(local)
                values[name].zero_()
            else:
                state.pop(name, None)
        if not state:
            self.state.pop(local, None)

    def make_missing_state(self, optimizer: Any) -> None:
        """Makes the state that is missing after a program or a load has written some: zeros for
        groups that are not the inner optimizer's. With state in host memory also the inner
        optimizer's own, as a step would make it in memory of another stream."""
        if self.residency.on_host:
            make_state(optimizer)
        for group, pairs in zip(optimizer.param_groups, self.pairs, strict=True):
            names = self.rule.state(group)
            if names:
                for _, local in pairs:
                    self.completed(local, names)

    def completed(self, local: torch.Tensor, names: Sequence[str]) -> StateEntry:
        """The state of a local tensor, in which missing names are made, with zeros."""
        state = self.state[local]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(local)
        return state

    def state_storages(self) -> list[torch.Tensor]:
        """Tensors of the state, one for each storage; none of what is in host memory already."""
        if self.residency.on_host:
            return []
        found = {}
        for state in self.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel():
                    local = getattr(value, "_local_tensor", value)
                    found[local.untyped_storage()._cdata] = local
        return list(found.values())

    # What the inner optimizer sees.

    def to_local(self, optimizer: Any) -> None:
        """Makes the inner optimizer's parameters and state the local ones, until `to_sharded`.
        Nothing if they are. RuntimeError if the memory of state was released."""
        if self.parked is not None and self.parked.away:
            raise RuntimeError(
                "using the optimizer: its state was released. Call return_memory(model, optimizer) "
                "first"
            )
        if self._to_put_back is not None:
            return
        self.follow_groups(optimizer)
        has_changed = self._follow_state(optimizer)
        groups = optimizer.param_groups
        self._to_put_back = optimizer.state, [group["params"] for group in groups]
        for index, group in enumerate(groups):
            group["params"] = self.params_for_inner(index)
        optimizer.state = self.state
        if has_changed:
            self.make_missing_state(optimizer)

    def to_sharded(self, optimizer: Any) -> None:
        """Undoes `to_local`, if it was called. Gives groups that were updated ahead the options in
        `updated`: the inner optimizer's own step may have counted a step for them."""
        groups = optimizer.param_groups
        for index, options in self.updated.items():
            group = groups[index]
            if COUNT not in options:  # newer fused optimizers count for empty groups too
                group.pop(COUNT, None)
            group.update(options)
        self.updated = {}
        if self._to_put_back is None:
            return
        self.state = optimizer.state  # some optimizers bind another dict in a step
        optimizer.state, params = self._to_put_back
        for group, group_params in zip(groups, params, strict=True):
            group["params"] = group_params
        self._to_put_back = None
        self.show_state(optimizer)

    def params_for_inner(self, index: int) -> list[torch.Tensor]:
        """The tensors that the inner optimizer is given in place of group `index`'s parameters.

        If this rank holds nothing of the group, that is one tensor that never has a gradient.
        Transformer Engine's (2.11) and apex's FusedAdam count no step of a group without
        parameters, and ranks would save different counts."""
        pairs = self.pairs[index]
        held = [local for _, local in pairs if local.numel() > 0 or not self.skip_empty]
        if held or not pairs:
            return held
        if index not in self._stand_ins:
            first = pairs[0][1]
            self._stand_ins[index] = torch.zeros(1, dtype=first.dtype, device=first.device)
        return [self._stand_ins[index]]

    def show_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Shows in `optimizer.state` the state that has changed since the last call. Values with
        the parameter's shape are DTensors there, over host memory if they are in it."""
        for param, local in self.every:
            state = self.state.get(local)
            known = self._known.get(local)
            if not state:
                if known is not None:
                    del self._known[local]
                    optimizer.state.pop(param, None)
                continue
            if known is None:
                entry = optimizer.state.setdefault(param, {})
                before: StateEntry = {}
            else:
                entry, _, before = known
                if is_same(state, before):
                    continue
                optimizer.state[param] = entry
            for name in before.keys() - state.keys():
                entry.pop(name, None)
            stored = self.residency.tensors.get(local, {})
            given = changed(state, before)
            given |= {name: stored[name] for name in given if name in stored}
            entry.update(shown(param, local, given))
            self._known[local] = (entry, dict(entry), dict(state))

    # Gradients.

    def gradient(self, local: torch.Tensor) -> torch.Tensor | None:
        """The gradient in the dtype of the local tensor; None if the parameter has none."""
        given = getattr(local, self._grad_name, None)
        return None if given is None else given.to(local.dtype)

    def set_local_grads(self) -> None:
        """Sets each local tensor's gradient to the local tensor of its parameter's gradient. It is
        cast to the dtype of main weights if the inner optimizer reads `grad`. A gradient that
        something else has set there since the last call stays."""
        for param, local in self.every:
            present = getattr(local, self._grad_name, None)
            if present is not None and present is not self._local_grads.get(local):
                continue
            grad = None if param.grad is None else param.grad._local_tensor
            if grad is not None and not self.decoupled:
                grad = grad.to(local.dtype)
            setattr(local, self._grad_name, grad)
            self._local_grads[local] = grad

    def clear_local_grads(self) -> None:
        """Drops the local gradients, and the clip that the kernel was given for them."""
        self._local_grads.clear()
        if self.fused_step is not None:
            self.fused_step.clip = None
        for _, local in self.every:
            setattr(local, self._grad_name, None)

    def clip_grads(self, clip: Clip, step_follows: bool) -> None:
        """Clips gradients: now or, if the step can (`_step_clips`), in the step.

        step_follows: True if a step comes next, or else a call of `clip_now`."""
        self.clip = clip
        if not (step_follows and self._step_clips(clip)):
            self.clip_now()

    def _step_clips(self, clip: Clip) -> bool:
        """True if a step can clip by `clip`: in its kernel, or each part with its update."""
        if not self.every or self.rule is not INNER:
            return False
        in_kernel = self.fused_step is not None and clip.has_one_factor
        return in_kernel or (self.residency.on_host and self.residency.may_be_late)

    def clip_now(self) -> None:
        """Applies the clip that was left to a step: gradients are read before it, or it was left
        out."""
        clip = self.clip
        self.clip = None
        if clip is not None:
            self.set_local_grads()
            clip.apply(self.every)
            self.clear_local_grads()

    def take_clip(self) -> Clip | None:
        """The clip that the step's parts apply; None if there is none, or if the kernel has it."""
        clip = self.clip
        self.clip = None
        if clip is None or self.fused_step is None or not clip.has_one_factor:
            return clip
        self.fused_step.clip = clip.factor(self.every[0][1].device)
        return None
