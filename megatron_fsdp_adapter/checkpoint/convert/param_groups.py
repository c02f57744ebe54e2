"""Parameter groups of the optimizer: a list of groups in one format, options per name in the other.

`torch_dist` stores the groups without their members; a model finds its own by four options
(core's `param_group_identifier_keys`). So which group a parameter belongs to has to be told from
the parameter, by the rules by which core makes the groups: no weight decay for biases and vectors,
experts on expert-parallel ranks apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint.convert.lazy import Shape
from megatron_fsdp_adapter.checkpoint.convert.training_state import TrainingState, is_expert

_STEP, _MEMBERS = "step", "params"
_KIND, _BESIDE_ADAM = "optimizer", ("muon", "lion")
"""The mark of a parameter group, and whose groups are marked."""

Groups = dict[str, Mapping[str, Any]]
Steps = dict[str, torch.Tensor]


def to_optimizer_state(state: TrainingState, sharding_type: str) -> dict[Any, Any]:
    """What the common state holds of the optimizer: one distributed optimizer's groups, or those of
    two (dense, experts) under 0 and 1 where experts have groups of their own.

    torch's Adam counts steps per parameter; core stores one number in each group. Raises
    ValueError if parameters have counted differently.
    """
    steps = {float(step) for step in state.steps.values()}
    if len(steps) > 1:
        raise ValueError(f"torch_dist stores one step count, the parameters have {sorted(steps)}")
    missing = sorted(name for name in state.moments if name not in state.groups)
    if missing:
        raise ValueError(f"no parameter group is recorded of {', '.join(missing)}")
    groups: list[dict[str, Any]] = []
    for name in state.moments:
        group = dict(state.groups[name])
        if steps:
            group[_STEP] = next(iter(steps))
        if group not in groups:
            groups.append(group)
    dense = [group for group in groups if not group.get("is_expert_parallel")]
    experts = [group for group in groups if group.get("is_expert_parallel")]
    chain = [
        {"optimizer": {"param_groups": part}, "param_state_sharding_type": sharding_type}
        for part in (dense, experts)
        if part
    ]
    return chain[0] if len(chain) == 1 else dict(enumerate(chain))


def from_optimizer_state(
    stored: Any, shapes: Mapping[str, Shape], not_adams: Collection[str], where: Path
) -> tuple[Groups, Steps]:
    """Name -> options of its group, and name -> step count where the optimizer is torch's Adam.
    not_adams: names without a second moment of Adam's, which are in the groups marked for Muon or
    Lion where there are such.

    Raises ValueError if there are no groups, or if a parameter may belong to two that differ.
    """
    found = list(_groups(stored))
    if not found:
        raise ValueError(
            f"{where}: the common state has no parameter groups for the optimizer's state"
        )
    groups: Groups = {}
    steps: Steps = {}
    for name, shape in shapes.items():
        group = dict(_group_of(name, shape, name in not_adams, found, where))
        if group.get(_KIND) in _BESIDE_ADAM:
            group.pop(_STEP, None)  # it counts none; in this format every group has Adam's
        # torch's Adam has a float, of a tensor per parameter; fused ones an int in the group.
        if isinstance(group.get(_STEP), float):
            steps[name] = torch.tensor(group.pop(_STEP), dtype=torch.float32)
        groups[name] = group
    return groups, steps


def _groups(stored: Any) -> Iterator[dict[str, Any]]:
    """All groups of a distributed optimizer, of another optimizer, or of a chain."""
    if not isinstance(stored, Mapping):
        return
    if "param_groups" in stored:
        step = stored.get("state", {}).get("common_step")
        for group in stored["param_groups"]:
            kept = {k: v for k, v in group.items() if k != _MEMBERS}
            if step is not None and _STEP not in kept:
                kept[_STEP] = float(step)
            yield kept
        return
    for part in [stored["optimizer"]] if "optimizer" in stored else stored.values():
        yield from _groups(part)


def _group_of(
    name: str, shape: Shape, not_adams: bool, groups: list[dict[str, Any]], where: Path
) -> Mapping[str, Any]:
    undecayed = len(shape) == 1 or name.endswith(".bias")
    rules = (
        lambda group: bool(group.get("is_expert_parallel")) == is_expert(name),
        lambda group: (group.get("wd_mult", 1.0) == 0.0) == undecayed,
        lambda group: (group.get(_KIND) in _BESIDE_ADAM) == not_adams,
    )
    candidates = groups
    for rule in rules:
        # A rule that no group follows was not used: experts without expert parallelism are with
        # the dense parameters, and weight decay may be the same for all.
        candidates = [group for group in candidates if rule(group)] or candidates
    if any(group != candidates[0] for group in candidates):
        raise ValueError(
            f"{where}: {name} may belong to {len(candidates)} parameter groups with different "
            "options; groups beyond weight decay and expert parallelism are not stored by name, so "
            "convert the weights only"
        )
    return candidates[0]
