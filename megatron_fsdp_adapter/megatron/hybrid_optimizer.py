"""Core's optimizer offload (`optimizer_cpu_offload`): its `HybridDeviceOptimizer` on local shards.

Core's optimizer copies a fraction of its parameters to pinned host memory. In a step it brings
their gradients there, updates the copies with torch's optimizer on the host, and copies them back.
It keeps its state in optimizers inside it, one for each parameter on the host and one for the
rest.

What differs from an optimizer that is none of these, and is seen to here:

- It is made on local tensors: copying a DTensor to the host goes through dispatch, by global sizes.
- Its copies are the main weights of before wherever a load, or anything but a step, has written
  those. They are made anew then, before the next step.
- What it shows and saves of its state is what the optimizer without offload has, so that either
  reads the other's checkpoints: no `master_param`, which is a copy of a main weight, and the step
  where that optimizer has it, per parameter (torch) or per group (fused ones).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..core.engine.engine import FsdpEngine
from ..sharding.local_optimizer import LocalShards, adopt
from ..sharding.made_state import is_torch_class, make_state
from ..sharding.shown_state import Entry
from .options.optimizer_pairs import CORES_OFFLOAD as OPTION
from .options.support import is_on

COPY = "master_param"
"""An entry of the state that core adds: the copy that is updated."""
COMPUTED = frozenset(("lr", "weight_decay", "betas", "eps", "bias_correction", "momentum"))
"""Options of parameter groups that say what a step computes, and not where or how."""


def problems(config: Any, engines: Sequence[FsdpEngine]) -> list[str]:
    """What the sharded weights have against core's offload, if the optimizer's config asks for
    it."""
    if not is_on(config, OPTION):
        return []
    found = []
    if is_on_host(engines):
        found.append(
            f"{OPTION}=True: the parameters are on the CPU already; set it to False, or wrap a "
            "model on a GPU"
        )
    dtypes = {g.main_dtype for e in engines for g in e.groups if g.key.requires_grad}
    if dtypes != {torch.float32}:
        found.append(
            f"{OPTION}=True: main weights are in {sorted(map(str, dtypes))}, and the copies that "
            "are updated would be rounded to that in checkpoints; leave "
            "megatron_fsdp_main_params_dtype unset"
        )
    return found


def is_on_host(engines: Sequence[FsdpEngine]) -> bool:
    """Whether there is no device to offload from."""
    return any(engine.runtime.device.type == "cpu" for engine in engines)


def make_on_locals(
    original: Callable[..., None], self: Any, params: Iterable[Any], *args: Any, **kwargs: Any
) -> None:
    """Core's constructor. Parameters that are sharded by us are shown again when it is over. A
    shard without elements is left out: torch's fused kernels need not see it, and TE's must not."""
    groups = list(params)
    if not all(_is_ours(group) for group in groups):
        original(self, groups, *args, **kwargs)
        return
    held = [{**group, "params": _locals_of(group)} for group in groups]
    original(self, held, *args, **kwargs)
    for group, given in zip(self.param_groups, groups, strict=True):
        group["params"] = list(given["params"])


def _is_ours(group: Any) -> bool:
    return isinstance(group, dict) and all(
        hasattr(param, "fsdp_layout_ref") for param in group["params"]
    )


def _locals_of(group: dict[str, Any]) -> list[torch.Tensor]:
    shards = [param._local_tensor for param in group["params"]]
    return [shard for shard in shards if shard.numel() > 0]


class HybridShards(LocalShards):
    """The local tensors behind a `HybridDeviceOptimizer`, and what of its state is shown."""

    counts_in_groups = False  # itself, in `count_step`; the optimizers inside have their own groups

    def __init__(self, optimizer: Any, skip_empty: bool, decoupled: bool) -> None:
        super().__init__(optimizer, skip_empty, decoupled)
        kind = optimizer.gpu_optimizer_cls
        self.defaults = kind([torch.zeros(1)]).defaults  # of the optimizer without offload
        self.added_options = frozenset(optimizer.defaults) - frozenset(self.defaults)
        self.own_options = (frozenset(optimizer.defaults) | frozenset(self.defaults)) - COMPUTED
        counts = "momentum" not in optimizer.defaults
        self.steps_in_groups = counts and not is_torch_class(kind)
        self.steps_in_state = counts and is_torch_class(kind)
        self._step_of_empty = torch.zeros(())

    def parts(self, optimizer: Any) -> list[Any]:
        return list(optimizer.sub_optimizers)

    def regroup(self, optimizer: Any) -> None:
        if self.pairs:
            raise ValueError(
                f"{OPTION}=True: param_groups have other parameters than when core's optimizer "
                "made its copies; make it with all of its groups, or freeze parameters by a "
                "learning rate of 0"
            )
        super().regroup(optimizer)

    def shown_state(self, param: Any, local: torch.Tensor, state: Entry) -> Entry:
        hidden = {COPY, "step"} if self.steps_in_groups else {COPY}
        seen = {name: value for name, value in state.items() if name not in hidden}
        return super().shown_state(param, local, seen)

    def shown_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a parameter group as the optimizer without offload has them."""
        own = {name: value for name, value in self.defaults.items() if name in self.own_options}
        return {n: v for n, v in options.items() if n not in self.added_options} | own

    def made_state(self, optimizer: Any) -> None:
        """What has no state gets it: core adds the copy to what was emptied, and torch's optimizers
        take that for state. Steps of the groups, which a load has written, become those of the
        host's optimizers; core itself gives them to the fused one."""
        for part in self.parts(optimizer):
            for inner in [inner for inner, state in part.state.items() if not state]:
                del part.state[inner]
            make_state(part)
        for index, group in enumerate(optimizer.param_groups if self.steps_in_groups else ()):
            group.setdefault("step", 0)
            inner = {id(optimizer.param_to_inner_param[own]) for own in self.locals_of(index)}
            for part in optimizer.cpu_optimizers:
                for param, state in part.state.items():
                    if id(param) in inner and "step" in state:
                        state["step"].fill_(group["step"])
        optimizer._sync_sub_optimizers_state_to_hdo()
        self.state = optimizer.state

    def state_of_empty(self, local: torch.Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Torch's optimizers count steps for an empty tensor too, and ranks have the same keys."""
        state = super().state_of_empty(local, names)
        return {**state, "step": self._step_of_empty} if self.steps_in_state else state

    def count_step(self, optimizer: Any, *unused: Any) -> None:
        """After a step: core gives the groups' number to the optimizers inside before each."""
        self._step_of_empty += 1
        for group in optimizer.param_groups if self.steps_in_groups else ():
            group["step"] = group.get("step", 0) + 1


class Copies:
    """Keeps the copies that core's optimizer updates what the main weights are."""

    def __init__(self, engines: Sequence[FsdpEngine]) -> None:
        self._engines, self._seen = engines, [engine.writes for engine in engines]

    def refresh(self, optimizer: Any) -> None:
        """Before a step. Makes them anew if something else than a step has written main weights
        since."""
        for engine in self._engines:
            engine.gather.begin_step()
        writes = [engine.writes for engine in self._engines]
        if writes != self._seen:
            for local, inner in optimizer.param_to_inner_param.items():
                if inner is not local:
                    inner.data.copy_(local)
        self._seen = writes


def adopt_hybrid(optimizer: Any, engines: Sequence[FsdpEngine]) -> None:
    """`adopt` for a `HybridDeviceOptimizer` that was made on the local tensors of our wrappers."""
    # Core's hooks of a load make all copies and optimizers anew; here a load writes in place.
    optimizer._optimizer_load_state_dict_pre_hooks.clear()
    optimizer._optimizer_load_state_dict_post_hooks.clear()
    adopt(optimizer, Copies(engines).refresh, HybridShards)
    optimizer.register_step_post_hook(optimizer._fsdp_shards.count_step)


def shown_options(
    meta: dict[str, dict[str, Any]], optimizer: Any
) -> dict[str, dict[str, Any]]:
    """Group options by parameter name, as a checkpoint has them: nothing of how this run offloads,
    by which classes and switches."""
    shards = optimizer._fsdp_shards
    if not isinstance(shards, HybridShards):
        return meta
    return {name: shards.shown_options(options) for name, options in meta.items()}
