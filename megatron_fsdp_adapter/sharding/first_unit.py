"""A step that updates first what the next forward gathers first.

    compute   backward | norm | Adam: first units | Adam: all others ........... | forward
    gather                                        | cast, all-gather: first units |

At the start of a forward nothing hides the gathers of the root and of the first unit that
computes, and just before it the optimizer reads and writes memory for as long. So a step becomes
two: the first updates the shards of those units, their gathers are launched, and the second
updates the rest meanwhile. Adam and SGD work element by element, so each number is what one step on
all shards gives. An order of tensors inside of the kernel's call was turned down: optimizers make
a call for each parameter group, and those of the first units are in several.

It hangs on the hook in front of a step that shards hang on anyway: the first part is taken there,
and the step that was asked for finds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..core.engine.engine import FsdpEngine
from ..core.engine.unit import Unit
from .local_optimizer import LocalShards
from .partial_steps import Options, options_of, plain_step, set_options, steps_in_steps

Split = list[tuple[list[torch.Tensor], list[torch.Tensor]]]
"""By parameter group: local tensors of the first units, and the others."""

LEFT_OFF: Mapping[str, Callable[[FsdpEngine, Any], bool]] = {
    "every rank has all main weights": lambda engine, _: not engine.config.strategy.shard_main,
    "nothing is gathered ahead": lambda engine, _: not engine.config.overlap_param_gather,
    "quantised weights are made of all main weights at once, behind a step":
        lambda engine, _: engine.quantisation is not None,
    "main weights in host memory are updated unit by unit": lambda engine, _: engine.config.offload,
    "the training loop may write main weights between a step and a forward, and tells nobody":
        lambda engine, _: engine.own_loop,
    "the step goes into a CUDA graph, and a gather is of each step":
        lambda _, optimizer: bool(getattr(optimizer, "capturable", False)),
    "a step of a subclass that calls its base's is not two":
        lambda _, optimizer: steps_in_steps(type(optimizer)),
}  # fmt: skip
"""Where a step is one as ever, and why. Beside these: units that are frozen, or of which another
optimizer has a part."""


def first_units(engine: FsdpEngine) -> list[Unit]:
    """Those that the next forward asks for first, kept weights too, which it asks for once a step.
    Frozen ones are not among them: nothing of them is updated, and no bucket of theirs in backward
    takes what they would while a step runs."""
    first = [engine.units[ordinal] for ordinal in engine.order.first()]
    return [unit for unit in first if unit.trainable_groups]


class FirstUnitShards(LocalShards):
    """Shards of which those that the next forward gathers first are updated first.

    Args:
        engine: the one whose forward comes first: of the first model chunk.
        used: whether the next forward finds what was gathered ahead of it.
    """

    def __init__(
        self, engine: FsdpEngine, used: Callable[[], bool], optimizer: Any, skip_empty: bool,
        decoupled: bool,
    ) -> None:
        self._engine, self._used = engine, used
        self._splits: dict[tuple[int, ...], tuple[list[Unit], Split]] = {}
        self._over: dict[int, Options] = {}
        super().__init__(optimizer, skip_empty, decoupled)

    def regroup(self, optimizer: Any) -> None:
        self._splits.clear()
        super().regroup(optimizer)

    def begin(self, optimizer: Any) -> None:
        super().begin(optimizer)
        off = any(holds(self._engine, optimizer) for holds in LEFT_OFF.values())
        units, split = self._parts() if self._used() and not off else ([], [])
        if units:
            self._step_first(optimizer, units, split)

    def _parts(self) -> tuple[list[Unit], Split]:
        """Those of the engine's first units of which this optimizer has all that is trained, the
        same on all ranks, and which tensors are theirs."""
        first = first_units(self._engine)
        key = tuple(unit.ordinal for unit in first)
        if key not in self._splits:
            own = {id(param) for pairs in self.pairs for param, _ in pairs}
            trained = [pair for pair in self._engine.pairs if pair.grad is not None]
            foreign = {id(pair.group) for pair in trained if id(pair.optimizer) not in own}
            units = [
                unit for unit in first
                if not any(id(group) in foreign for group in unit.trainable_groups)
            ]
            groups = {id(group) for unit in units for group in unit.trainable_groups}
            theirs = {id(pair.optimizer) for pair in trained if id(pair.group) in groups}
            split = [_parted(pairs, theirs, self.skip_empty) for pairs in self.pairs]
            self._splits[key] = units, split
        return self._splits[key]

    def _step_first(self, optimizer: Any, units: Sequence[Unit], split: Split) -> None:
        """Takes the step of `units`, launches their gathers, and leaves the rest."""
        at_start = [options_of(group) for group in optimizer.param_groups]
        for group, (first, _) in zip(optimizer.param_groups, split, strict=True):
            group["params"] = first
        plain_step(optimizer)
        self._engine.gather.gather_early(units)
        for index, group in enumerate(optimizer.param_groups):
            first, rest = split[index]
            if first and not rest:
                self._over[index] = options_of(group)
            set_options(group, at_start[index])
            group["params"] = list(rest) if first else self.given(index)

    def leave(self, optimizer: Any) -> None:
        for index, options in self._over.items():
            optimizer.param_groups[index].update(options)
        self._over = {}
        super().leave(optimizer)


def _parted(
    pairs: Sequence[tuple[Any, torch.Tensor]], first: set[int], skip_empty: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for param, local in pairs:
        if local.numel() > 0 or not skip_empty:
            parts[id(param) not in first].append(local)
    return parts
