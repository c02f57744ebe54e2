"""An optimizer that steps on local tensors while its parameters are DTensors.

Why local: TE's FusedAdam allocates state of a DTensor's global shape (60 GiB on an 8B model), and
torch's goes through DTensor dispatch for every operation of every parameter. The local tensors
are made once, and what the inner optimizer keeps for them is shown to checkpoints as DTensors over
the same storage.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .fused_adam import FusedAdamStep, install
from .host_stash import HostStash
from .partial_steps import ending
from .state_init import is_torch_optimizer, make_state, moments_of
from .state_load import load_options, load_values
from .state_view import Entry, Shown, are_same, changed, is_same, shown, taken_over

Prepare = Callable[[Any], None]
"""Called with an optimizer before its step reads gradients."""
LocalPair = tuple[Any, torch.Tensor]  # a parameter, and what is in its place


class Clip(Protocol):
    """Clips gradients."""

    def __call__(self, pairs: list[LocalPair]) -> None:
        """Those of `pairs`, in place."""

    @property
    def is_one(self) -> bool:
        """Whether it multiplies all of them by one factor."""

    def factor(self, device: torch.device) -> torch.Tensor | None:
        """That factor, one float32 on `device`; None for 1."""


class LocalShards:
    """The local tensors behind an inner optimizer's DTensor parameters, and their state.

    `state` is keyed by local tensor and is what the inner optimizer reads and writes while it
    steps; `optimizer.state`, keyed by parameter, shows the same storages as DTensors.

    Args:
        skip_empty: the inner optimizer is not given shards without elements.
        decoupled: it reads `decoupled_grad`, of any dtype, in place of `grad`.

    copies_grads: whether it has been given copies of gradients, which end with the step.
    step_follows: whether a step is the first to read clipped gradients.
    fused_step: the kernel in the inner optimizer, where it has one of ours.
    """

    step_follows = False
    fused_step: FusedAdamStep | None = None

    def __init__(self, optimizer: Any, skip_empty: bool, decoupled: bool) -> None:
        self.skip_empty, self.decoupled, self.copies_grads = skip_empty, decoupled, False
        self.pairs: list[list[LocalPair]] = []
        self.state: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._local_grads: dict[torch.Tensor, torch.Tensor | None] = {}
        self._shown: tuple[Any, list[Any]] | None = None
        self.parked: HostStash | None = None
        self._clip: Clip | None = None
        self._known: dict[torch.Tensor, Shown] = {}
        self._counters: dict[int, torch.Tensor] = {}
        self.regroup(optimizer)

    def local_of(self, param: Any) -> torch.Tensor:
        """What the inner optimizer updates in the place of `param`."""
        return param._local_tensor

    # What a program changes.

    def follow_groups(self, optimizer: Any) -> None:
        """Takes over which parameters the groups have now."""
        if self._shown is not None:
            return
        groups = optimizer.param_groups
        if len(groups) != len(self.pairs) or not all(
            are_same(group["params"], [param for param, _ in pairs])
            for group, pairs in zip(groups, self.pairs, strict=True)
        ):
            self.regroup(optimizer)

    def regroup(self, optimizer: Any) -> None:
        """The groups have other parameters than before, or there were none. ValueError for one
        that is not sharded."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        foreign = sum(not hasattr(param, "_local_tensor") for param in params)
        if foreign:
            raise ValueError(
                f"optimizer: {foreign} of its {len(params)} parameters are not of a sharded model; "
                "put those of the wrapped model into param_groups"
            )
        self.pairs = [
            [(param, self.local_of(param)) for param in group["params"]]
            for group in optimizer.param_groups
        ]

    def _follow_state(self, optimizer: Any) -> bool:
        """Takes over what a program, or the optimizer's constructor, has put into
        `optimizer.state` since state was shown; whether there was something."""
        found = False
        for pairs in self.pairs:
            for param, local in pairs:
                entry, known = optimizer.state.get(param), self._known.get(local)
                if not entry if known is None else known.is_in(entry):
                    continue
                found = True
                before = {} if known is None else known.values
                entry = {} if entry is None else entry
                given = changed(entry, before)
                gone = [name for name in before if name not in entry]
                own = {n: taken_over(param, local, n, v) for n, v in given.items()}
                self.drop(param, gone)
                for name, value in own.items():
                    self.put(param, name, value)
                if known is not None:  # a changed entry is shown again
                    self._known[local] = known.now_in(entry, {*given, *gone})
        return found

    def adopted(self, optimizer: Any) -> None:
        """`adopt` is over."""

    def begin(self, optimizer: Any) -> None:
        """A step begins, whose gradients are there."""
        self.enter(optimizer)
        self.set_local_grads()
        if self.fused_step is not None:
            self.fused_step.clip = self._factor()

    def _factor(self) -> torch.Tensor | None:
        """What the kernel multiplies gradients by, where that clips them."""
        clip = self._clip
        if clip is None or not clip.is_one:
            return None
        self._clip = None
        return clip.factor(next(local for pairs in self.pairs for _, local in pairs).device)

    def put(self, param: Any, name: str, value: Any) -> None:
        """`value`, of the local shape if it has the parameter's, becomes state `name` of
        `param`."""
        self.state[self.local_of(param)][name] = value

    def drop(self, param: Any, names: Sequence[str]) -> None:
        """State of `param` of these names goes; and if nothing is left that is shown, all of it, so
        that the inner optimizer makes it again."""
        state = self.state.get(self.local_of(param), {})
        for name in names:
            state.pop(name, None)
        if not self.shown_state(param, self.local_of(param), state):
            state.clear()  # others may hold the same dict
            self.state.pop(self.local_of(param), None)

    def makes_own(self, group: dict[str, Any]) -> bool:
        """Whether the state of a parameter group is not the inner optimizer's to make."""
        return False

    def made_state(self, optimizer: Any) -> None:
        """State was made without a step, or a load or a program has written it."""

    def shown_state(self, param: Any, local: torch.Tensor, state: Entry) -> Entry:
        """What is shown, and saved, of a parameter's `state`: DTensors where it has its shape."""
        return shown(param, local, state)

    def enter(self, optimizer: Any) -> None:
        """Makes the inner optimizer's parameters and state the local ones, until `leave`.
        RuntimeError if their memory was released."""
        self.check()
        if self._shown is not None:
            return
        self.follow_groups(optimizer)
        is_other = self._follow_state(optimizer)
        self._shown = optimizer.state, [group["params"] for group in optimizer.param_groups]
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = self.given(index)
        optimizer.state = self.state
        if is_other:
            self.made_state(optimizer)

    def check(self) -> None:
        """RuntimeError if the state's memory was released."""
        if self.parked is not None and self.parked.away:
            raise RuntimeError(
                "using the optimizer: its state was released; call return_memory(model, optimizer) "
                "first"
            )

    def state_storages(self) -> list[torch.Tensor]:
        """Tensors of the state, one for each storage."""
        found = {}
        for state in self.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel():
                    local = getattr(value, "_local_tensor", value)
                    found[local.untyped_storage()._cdata] = local
        return list(found.values())

    def leave(self, optimizer: Any) -> None:
        """Undoes `enter`, if it was called."""
        if self._shown is None:
            return
        self.state = optimizer.state  # some optimizers bind another dict in a step
        optimizer.state, params = self._shown
        for group, own in zip(optimizer.param_groups, params, strict=True):
            group["params"] = own
        self._shown = None
        self.show_state(optimizer)

    def locals_of(self, index: int) -> list[torch.Tensor]:
        """The shards of group `index` that the inner optimizer can be given."""
        given = (local for _, local in self.pairs[index])
        return [local for local in given if local.numel() > 0 or not self.skip_empty]

    def given(self, index: int) -> list[torch.Tensor]:
        """What the inner optimizer is given in place of group `index`'s parameters. Of a group that
        this rank holds nothing of, a tensor that never has a gradient: Transformer Engine's (2.11)
        and apex's FusedAdam count no step of a group without parameters, and ranks would differ in
        the count that they save."""
        own = self.locals_of(index)
        if own or not self.pairs[index]:
            return own
        if index not in self._counters:
            first = self.pairs[index][0][1]
            self._counters[index] = torch.zeros(1, dtype=first.dtype, device=first.device)
        return [self._counters[index]]

    def set_local_grads(self) -> None:
        """Sets each local tensor's gradient to the local tensor of its parameter's gradient, or,
        where the inner optimizer cannot take that dtype, to a copy in the main weights' dtype. A
        gradient that the inner optimizer itself has set since the last call stays."""
        name = "decoupled_grad" if self.decoupled else "grad"
        for pairs in self.pairs:
            for param, local in pairs:
                present = getattr(local, name, None)
                if present is not None and present is not self._local_grads.get(local):
                    continue
                grad = None if param.grad is None else param.grad._local_tensor
                if grad is not None and not self.decoupled:
                    self.copies_grads |= grad.dtype != local.dtype
                    grad = grad.to(local.dtype)
                setattr(local, name, grad)
                self._local_grads[local] = grad

    def takes_clip(self, clip: Clip) -> bool:
        """Whether the next step clips what it updates by itself, in the kernel."""
        if self.step_follows and self.fused_step is not None and clip.is_one and any(self.pairs):
            self._clip = clip
        return self._clip is not None

    def clip_now(self) -> None:
        """Applies a deferred clip: gradients are read before a step, or no step has come."""
        clip, self._clip = self._clip, None
        if clip is not None:
            self.clip_grads(clip)

    def clip_grads(self, clip: Clip) -> None:
        self.set_local_grads()
        clip([pair for pairs in self.pairs for pair in pairs])
        self.clear_local_grads()

    def clear_local_grads(self) -> None:
        self._local_grads.clear()
        if self.fused_step is not None:
            self.fused_step.clip = None
        for pairs in self.pairs:
            for _, local in pairs:
                local.grad = None
                if self.decoupled:
                    local.decoupled_grad = None  # type: ignore[attr-defined]

    def show_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts state that is other than at the last call under the parameters, as DTensors."""
        for pairs in self.pairs:
            for param, local in pairs:
                state, known = self.state.get(local), self._known.get(local)
                if known is not None and state and is_same(state, known.local):
                    continue
                if not state:
                    if known is not None:
                        del self._known[local]
                        optimizer.state.pop(param, None)
                    continue
                before = {} if known is None else known.local
                entry = optimizer.state.setdefault(param, {}) if known is None else known.entry
                optimizer.state[param] = entry
                for name in before.keys() - state.keys():
                    entry.pop(name, None)
                entry.update(self.shown_state(param, local, changed(state, before)))
                self._known[local] = Shown(entry, dict(entry), dict(state))


@contextmanager
def _on_locals(optimizer: Any) -> Iterator[LocalShards]:
    """Inside, the inner optimizer's parameters and state are the local ones."""
    shards: LocalShards = optimizer._fsdp_shards
    shards.enter(optimizer)
    try:
        yield shards
    finally:
        shards.leave(optimizer)


def _begin_step(optimizer: Any, prepare: Prepare) -> None:
    prepare(optimizer)
    optimizer._fsdp_shards.begin(optimizer)


def end_step(optimizer: Any, *unused: Any) -> None:
    """Also for a step that raised, or one inside another: a subclass's that calls its base's."""
    optimizer._fsdp_shards.clear_local_grads()
    optimizer._fsdp_shards.leave(optimizer)


def _before_state_dict(optimizer: Any) -> None:
    end_step(optimizer)
    with _on_locals(optimizer):
        """Takes over what a program has changed, and shows it."""


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A closure, which is the user's, runs on the DTensors, and gives the gradients of the step."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _begin_step(optimizer, prepare)
        return None

    def on_shards() -> Any:
        end_step(optimizer)
        with torch.enable_grad():
            loss = closure()
        _begin_step(optimizer, prepare)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": on_shards}
    return (args[0], on_shards, *args[2:]), kwargs


@torch.no_grad()
def initialize_state(optimizer: Any) -> None:
    """State for every parameter, empty shards included, without taking a step: neither weights
    nor the step count change. For Adam and SGD, of torch, Transformer Engine or apex."""
    with _on_locals(optimizer) as shards:
        make_state(optimizer, shards.makes_own)
        shards.made_state(optimizer)
        if shards.skip_empty:
            complete_empty_state(shards, optimizer)


def complete_empty_state(shards: LocalShards, optimizer: Any) -> None:
    """Moments of zero size for empty shards that the inner optimizer is not given, so that every
    rank has the same keys."""
    for pairs in shards.pairs:
        for _, local in pairs:
            if local.numel() == 0 and not shards.state[local]:
                names = moments_of(optimizer)
                empty = {n: torch.zeros_like(local, dtype=torch.float32) for n in names}
                shards.state[local] = empty


@torch.no_grad()
def _load_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Copies this rank's rows of a state dict's values into the state, in place. As torch's, it
    runs hooks of a load, drops state that the state dict has not, and leaves options of a class as
    the class wants them.

    Collective if a DTensor is among the values that is not known to be cut like its parameter.

    Raises:
        ValueError: before anything is written: the groups do not have this optimizer's numbers of
            parameters, a value has not its parameter's shape, or its rows are unknown.
    """
    _before_state_dict(optimizer)
    given = state_dict.copy()
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed_dict = hook(optimizer, given)
        given = given if changed_dict is None else changed_dict
    current, saved = optimizer.param_groups, copy.deepcopy(given["param_groups"])
    sizes = [len(group["params"]) for group in current]
    if sizes != [len(group["params"]) for group in saved]:
        raise ValueError(
            f"optimizer state has groups of {[len(g['params']) for g in saved]} parameters, this "
            f"optimizer has groups of {sizes}: it belongs to another model or another weight "
            "decay or learning rate rule"
        )
    if not is_torch_optimizer(optimizer) or isinstance(optimizer, torch.optim.Adam):
        initialize_state(optimizer)
    load_values(optimizer, saved, given["state"])
    for group, saved_group in zip(current, saved, strict=True):
        load_options(group, saved_group)
    with _on_locals(optimizer) as shards:
        shards.made_state(optimizer)
        for group in filter(shards.makes_own, current):
            group["params"] = []
        optimizer.__setstate__({"state": optimizer.state, "param_groups": current})
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def _state_dict(optimizer: Any) -> dict[str, Any]:
    """Not the class's own: TE's gives float32 copies, which know no place in a checkpoint and which
    a load in place would not reach."""
    return torch.optim.Optimizer.state_dict(optimizer)


@functools.cache
def _local_class(base: type) -> type:
    """A subclass of the inner optimizer's class whose state dict is that of the shards. Torch's
    hooks on state dicts do not do: a load replaces the state instead of writing into it, and casts
    it to the parameters' dtype."""
    return type(
        base.__name__,
        (base,),
        {
            "step": ending(base.step, lambda optimizer, *_: end_step(optimizer)),  # type: ignore[attr-defined]
            "load_state_dict": _load_state_dict,
            "state_dict": _state_dict,
            "__doc__": f"{base.__name__} on the local shards of DTensor parameters.",
        },
    )


def adopt(
    optimizer: torch.optim.Optimizer,
    prepare: Prepare = lambda optimizer: None,
    shards_class: Callable[[Any, bool, bool], LocalShards] = LocalShards,
) -> None:
    """Makes the inner `optimizer` step on local shards. Its parameters must be DTensors.

    TE's FusedAdam keeps no main weights of its own here, which would be a second copy of the
    shards it is given, and reads `decoupled_grad`, since it alone takes gradients of any dtype.

    `prepare` is called before gradients are read in a step. `shards_class` makes its
    `LocalShards`: a subclass where its state is elsewhere. Steps are seen by torch's hooks on
    them: a subclass's `step` alone would not do, as a learning rate scheduler that was made before
    puts the class's `step` on the optimizer itself.

    Raises:
        ValueError: the optimizer is a fused one that is made for CUDA graphs.
    """
    if getattr(optimizer, "capturable", False):
        raise ValueError(
            f"capturable=True of {type(optimizer).__name__}: a graph of the optimizer's step took "
            "longer than the step without it, and was removed. Make it with capturable=False."
        )
    skip_empty = not is_torch_optimizer(optimizer)  # TE's kernel skips a group with one
    decoupled = hasattr(optimizer, "use_decoupled_grad")
    for option, value in (
        ("use_decoupled_grad", True), ("master_weights", False), ("store_param_remainders", False)
    ):  # fmt: skip
        if hasattr(optimizer, option):
            setattr(optimizer, option, value)
    shards = shards_class(optimizer, skip_empty, decoupled)
    shards.fused_step = install(optimizer)
    optimizer._fsdp_shards = shards  # type: ignore[attr-defined]
    optimizer.__class__ = _local_class(type(optimizer))  # type: ignore[arg-type]
    if "step" in vars(optimizer):  # a scheduler's
        alive = weakref.ref(optimizer)
        optimizer.step = ending(optimizer.step, lambda *_: end_step(alive()))  # type: ignore[method-assign]
    optimizer.register_step_pre_hook(functools.partial(_before_step, prepare=prepare))
    optimizer.register_step_post_hook(end_step)
    optimizer.register_state_dict_pre_hook(_before_state_dict)
    shards.adopted(optimizer)
