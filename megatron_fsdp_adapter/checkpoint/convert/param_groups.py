"""Parameter groups of the optimizer: a list in `torch_dist`, options per name in `fsdp_dtensor`.

`torch_dist` stores the groups without their members; a model matches its groups by some options
(core's `param_group_identifier_keys`). So a parameter's group follows from core's rules for making
groups: no weight decay for biases and vectors, separate groups for experts on expert-parallel
ranks, another learning rate for embedding and output layer. Saved arguments change these rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint.convert.training_state import (
    TrainingState,
    argument_of,
    is_expert,
)
from megatron_fsdp_adapter.core.layout.ranges import Shape

_STEP = "step"
_MEMBERS = "params"
_KIND = "optimizer"
"""The option of a parameter group that names its optimizer. Groups of Adam have none."""
_BESIDE_ADAM = ("muon", "lion")
"""The values of that option."""

_EMBEDDING_OR_OUTPUT = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "lm_head.output_layer.weight",
)
"""The parameters of `--decoupled-lr`."""
_QUERY_OR_KEY_NORM = ("q_layernorm.", "k_layernorm.")
_DECAYS_THEM = ("apply_wd_to_qk_layernorm", "qwen3_next")
"""The values of `no_weight_decay_cond_type` with which these norms have weight decay."""

ParamGroups = dict[str, Mapping[str, Any]]
Steps = dict[str, torch.Tensor]


def to_optimizer_state(state: TrainingState, sharding_type: str) -> dict[Any, Any]:
    """The optimizer's part of the common state: the groups of one distributed optimizer. If experts
    have separate groups, those of two optimizers: dense under 0, experts under 1.

    torch's Adam counts steps per parameter; core stores one number in each group. Raises ValueError
    if step counts differ.
    """
    steps = {float(step) for step in state.steps.values()}
    if len(steps) > 1:
        raise ValueError(
            f"torch_dist stores one step count, but the parameters have {sorted(steps)}"
        )
    missing = sorted(name for name in state.moments if name not in state.groups)
    if missing:
        raise ValueError(f"no parameter group is recorded for {', '.join(missing)}")
    groups: list[dict[str, Any]] = []
    for name in state.moments:
        group = dict(state.groups[name])
        if steps:
            group[_STEP] = next(iter(steps))
        if group not in groups:
            groups.append(group)
    dense = [group for group in groups if not group.get("is_expert_parallel")]
    experts = [group for group in groups if group.get("is_expert_parallel")]
    chain = []
    for part in (dense, experts):
        if part:
            optimizer = {"param_groups": part}
            chain.append({"optimizer": optimizer, "param_state_sharding_type": sharding_type})
    if len(chain) == 1:
        return chain[0]
    return dict(enumerate(chain))


def from_optimizer_state(
    common: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    not_adams: Collection[str],
    where: Path,
) -> tuple[ParamGroups, Steps]:
    """Name -> options of its group, and name -> step count if the optimizer is torch's Adam.

    common: the common state, with the groups and the saved arguments. not_adams: names of
    parameters without Adam's second moment. They belong to groups of Muon or Lion, if there are
    such groups.

    Raises ValueError if there are no groups, or if a parameter may belong to two that differ.
    """
    found = list(_groups(common.get("optimizer")))
    if not found:
        raise ValueError(
            f"{where}: the common state has no parameter groups for the optimizer's state"
        )
    groups: ParamGroups = {}
    steps: Steps = {}
    for name, shape in shapes.items():
        wanted = _wanted(name, shape, name in not_adams, common)
        group = dict(_group_of(name, wanted, found, common, where))
        if group.get(_KIND) in _BESIDE_ADAM:
            # Muon and Lion count no steps; this format stores Adam's count in every group.
            group.pop(_STEP, None)
        # torch's Adam stores a float (from a tensor per parameter), fused Adam an int in the group.
        if isinstance(group.get(_STEP), float):
            steps[name] = torch.tensor(group.pop(_STEP), dtype=torch.float32, device="cpu")
        groups[name] = group
    return groups, steps


def _groups(stored: Any) -> Iterator[dict[str, Any]]:
    """All groups of a distributed optimizer, another optimizer, or a chain of optimizers."""
    if not isinstance(stored, Mapping):
        return
    if "param_groups" in stored:
        step = stored.get("state", {}).get("common_step")
        for group in stored["param_groups"]:
            kept = {key: value for key, value in group.items() if key != _MEMBERS}
            if step is not None and _STEP not in kept:
                kept[_STEP] = float(step)
            yield kept
    elif "optimizer" in stored:
        yield from _groups(stored["optimizer"])
    else:
        for part in stored.values():
            yield from _groups(part)


def _wanted(
    name: str, shape: Shape, is_beside_adam: bool, common: Mapping[str, Any]
) -> tuple[bool, ...]:
    """The `_traits` of the group that core puts a parameter into."""
    is_undecayed = len(shape) == 1 or name.endswith(".bias")
    decays_norms = (
        argument_of(common, "apply_wd_to_qk_layernorm", False)
        or argument_of(common, "no_weight_decay_cond_type") in _DECAYS_THEM
    )
    if decays_norms and any(norm in name for norm in _QUERY_OR_KEY_NORM):
        is_undecayed = False
    is_decoupled = argument_of(common, "decoupled_lr") is not None and name in _EMBEDDING_OR_OUTPUT
    return is_expert(name), is_undecayed, is_beside_adam, is_decoupled


def _traits(group: Mapping[str, Any], common: Mapping[str, Any]) -> tuple[bool, ...]:
    """Four answers about a group: it is of experts, it has no weight decay, its optimizer is not
    Adam, it has the learning rate of `--decoupled-lr`."""
    rate = argument_of(common, "decoupled_lr")
    return (
        bool(group.get("is_expert_parallel")),
        group.get("wd_mult", 1.0) == 0.0,
        group.get(_KIND) in _BESIDE_ADAM,
        rate is not None and group.get("max_lr") == rate,
    )


def _group_of(
    name: str,
    wanted: tuple[bool, ...],
    groups: list[dict[str, Any]],
    common: Mapping[str, Any],
    where: Path,
) -> Mapping[str, Any]:
    # The group of a parameter, found by its `_traits`.
    candidates = groups
    for i, trait in enumerate(wanted):
        # Skip a trait that no group has: experts without expert parallelism are in the dense
        # groups, and weight decay may be equal for all.
        same = [group for group in candidates if _traits(group, common)[i] == trait]
        candidates = same or candidates
    if any(group != candidates[0] for group in candidates):
        raise ValueError(
            f"{where}: {name} fits {len(candidates)} parameter groups with different options, as "
            "only splits by weight decay, expert parallelism and --decoupled-lr follow from the "
            "saved arguments. Convert with weights_only=True (--weights-only)"
        )
    return candidates[0]
