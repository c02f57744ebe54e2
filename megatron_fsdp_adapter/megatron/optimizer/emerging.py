"""Muon and Lion, which core calls emerging optimizers. Core is made to create a single optimizer
for their weights and Adam's.

Core's own code makes two optimizers: one for Muon or Lion, which needs whole weights and refuses
sharded ones, and one for Adam. Here core makes what it makes for Adam, and each parameter group is
split in two. The shards of that optimizer update the marked groups by a rule of their own
(`optim/local_shards.py`).
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
"""Key of a parameter group's mark. The value names the optimizer that updates the group, as in
groups that core marks."""
_USERS_CONFIG = "emerging_config"
"""Attribute of a config made by `as_adam`: the user's config, which it replaces for core."""


KINDS: Mapping[str, Any] = {MUON: muon, LION: lion}
"""`optimizer` -> its module, with these functions:

- updates(pair) -> bool: True if the optimizer updates a weight, and Adam does not.
- make_groups(chunks): makes the process groups that its steps need. Collective over all ranks.
- rule_of(chunks, config, has_mark) -> UpdateRule: the rule that updates the groups for which
  `has_mark(group)` is true.
- summary(chunks, config) -> str: the text that rank 0 prints.
"""


def asked_for(config: Any) -> Any | None:
    """The user's optimizer config, if it asks for one of `KINDS`; else None. `config` is that one,
    or what `as_adam` made of it."""
    asked = given(config)
    if asked.optimizer not in KINDS:
        return None
    return asked


def given(config: Any) -> Any:
    """The user's optimizer config: `config`, or that of which `as_adam` made it."""
    return getattr(config, _USERS_CONFIG, config)


def as_adam(config: Any) -> Any:
    """A copy of the config that makes core create Adam, and that holds the original."""
    changed = copy.copy(config)
    changed.optimizer = "adam"
    setattr(changed, _USERS_CONFIG, config)
    return changed


def prepared(groups: OptimizerGroups, chunks: ModelChunks, asked: Any) -> list[dict[str, Any]]:
    """Core's parameter groups, each split in two: first the parameters that Adam updates, then the
    others, with a mark.

    An empty half is kept, because it need not be empty on another pipeline stage, and all ranks
    have the same groups. Collective over the default group. Every rank calls it: core asks for
    parameter groups on every rank, and for those of experts too."""
    kind = KINDS[asked.optimizer]
    kind.make_groups(chunks)
    if dist.get_rank() == 0:
        print(kind.summary(chunks, asked), flush=True)
    updated = {id(p.sharded) for chunk in chunks for p in chunk.engine.pairs if kind.updates(p)}
    split = []
    for group in groups:
        others = [param for param in group["params"] if id(param) not in updated]
        marked = [param for param in group["params"] if id(param) in updated]
        split.append({**group, "params": others})
        split.append({**group, "params": marked, MARK: asked.optimizer})
    return split


def rule_of(chunks: ModelChunks, asked: Any) -> UpdateRule:
    """The update rule of an optimizer whose groups `prepared` has made."""
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
    """Calls core's function that makes the inner optimizer of the groups, with a config that asks
    for Adam."""
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
    """Makes the optimizer as core makes Adam's. From 0.18 on core calls this function for all
    optimizers but Adam and SGD.

    Core's gloo groups are not asked for: only checkpoints of other formats use them."""
    if not ours_among(model_chunks) or config.optimizer not in EMERGING:
        return original(config, model_chunks, config_overrides, pg_collection)
    return core_optimizer.get_megatron_optimizer(
        as_adam(config),
        model_chunks,
        config_overrides,
        use_gloo_process_groups=False,
        pg_collection=pg_collection,
    )
