"""Optimizers that core calls emerging, Muon and Lion: how core is led to one optimizer that holds
their weights and Adam's.

Core makes two optimizers of its own for that, the first on whole weights, and refuses sharded ones.
Here it makes what it makes for Adam, with parameter groups split in two; the shards of that
optimizer update the groups that are marked by a rule (`optim/local_shards.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import optimizer as core_optimizer

from ...optim.local_shards import UpdateRule
from ...optim.state import GroupOptions
from ..compat.patches import Original
from ..inner_module import ModelChunks, ours_among
from ..options.support import EMERGING, LION, MUON
from . import lion, muon

OptimizerGroups = Sequence[dict[str, Any]]
"""Parameter groups."""

MARK = "optimizer"
"""Key of a parameter group's mark: the optimizer that it belongs to, as core marks groups of its
own."""
_ASKED = "emerging_config"
"""Key in a config that core gets in place of another one: the other one."""


KINDS: Mapping[str, Any] = {MUON: muon, LION: lion}
"""`optimizer` -> the module that defines how one is made of sharded weights. has: whether a weight
is its, and not Adam's. make_groups: process groups for model chunks; collective, called on all
ranks. rule_of: how parameter groups are updated, from model chunks, the config and the mark. table:
what rank 0 prints, from model chunks and the config.
"""


def asked_for(config: Any) -> Any | None:
    """The optimizer config that asks for one of them, if this is one or stands in for one; else
    None."""
    asked = given(config)
    if asked.optimizer not in KINDS:
        return None
    return asked


def given(config: Any) -> Any:
    """The optimizer config that this one stands in for, or itself."""
    return getattr(config, _ASKED, config)


def as_adam(config: Any) -> Any:
    """A config of which core makes Adam, and that says for which it stands in."""
    changed = copy.copy(config)
    changed.optimizer = "adam"
    setattr(changed, _ASKED, config)
    return changed


def prepared(groups: OptimizerGroups, chunks: ModelChunks, asked: Any) -> list[dict[str, Any]]:
    """Core's parameter groups, each split in two, of Adam's parameters and of the others, on every
    rank alike: also where one of them is empty here, as it need not be on another pipeline stage.
    Collective over the default group, as core asks for parameter groups, also those of experts, on
    every rank."""
    kind = KINDS[asked.optimizer]
    kind.make_groups(chunks)
    if dist.get_rank() == 0:
        print(kind.table(chunks, asked), flush=True)
    own = {id(p.sharded) for chunk in chunks for p in chunk.engine.pairs if kind.has(p)}
    split = []
    for group in groups:
        others = [param for param in group["params"] if id(param) not in own]
        marked = [param for param in group["params"] if id(param) in own]
        split.append({**group, "params": others})
        split.append({**group, "params": marked, MARK: asked.optimizer})
    return split


def rule_of(chunks: ModelChunks, asked: Any) -> UpdateRule:
    """The update rule of an optimizer whose groups are those of `prepared`."""
    name = asked.optimizer

    def has_mark(group: GroupOptions) -> bool:
        return group.get(MARK) == name

    return KINDS[name].rule_of(chunks, asked, has_mark)


# In the place of core's functions (`compat/table.py`).


def _make_as_adam(
    original: Original,
    config: Any,
    model_chunks: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Core makes the inner optimizer of the groups, and wraps it."""
    if ours_among(model_chunks) and config.optimizer in EMERGING:
        config = as_adam(config)
    return original(config, model_chunks, *args, **kwargs)


def _make_emerging(
    original: Original,
    config: Any,
    model_chunks: Sequence[Any],
    config_overrides: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Makes the optimizer. From 0.18 on core turns off here for all but Adam and SGD; with sharded
    weights it does not, but goes on as for Adam until it makes the inner optimizer. Its groups on
    the host are for checkpoints of another format."""
    if not ours_among(model_chunks) or config.optimizer not in EMERGING:
        return original(config, model_chunks, config_overrides, pg_collection)
    return core_optimizer.get_megatron_optimizer(
        as_adam(config),
        model_chunks,
        config_overrides,
        use_gloo_process_groups=False,
        pg_collection=pg_collection,
    )
