"""`fsdp_dtensor` folders: one key per parameter and optimizer value, numbered over the model.

    model.module.NAME[_w|_v]                                weight or buffer
    optimizer.state.DEEP NAME[_w|_v].exp_avg|exp_avg_sq|step
    optimizer.param_to_group_meta.DEEP NAME.lr|...          options of the parameter group
    model.module.NAME.fp8_scaling                           scales of a run, which are left out
    anything else                                           args, iteration, scheduler, RNG, ...

DEEP is "module.module.", and once more "module." unless the model computes in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element

from megatron_fsdp_adapter.checkpoint.convert.dcp_files import Contents, DcpFolder, KeyPath
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor, Tensors, cast, from_tensor
from megatron_fsdp_adapter.checkpoint.convert.modules import check_known, in_layer, is_buffer
from megatron_fsdp_adapter.checkpoint.convert.run_config import with_arguments
from megatron_fsdp_adapter.checkpoint.convert.training_state import (
    LayerKinds,
    NameStyle,
    TrainingState,
    argument_of,
    check_layers,
    common_name,
    dtype_argument,
    gated_layers,
    in_common,
    split_halves,
    turned,
)
from megatron_fsdp_adapter.state.names import FP8_SCALING, HALVES, RENAMED, split_depth

_STATE = ("optimizer", "state")
_META = ("optimizer", "param_to_group_meta")
_STEP = "step"
_BESIDE_WEIGHTS = ("args", "checkpoint_version", "iteration")
# By the number of "module." prefixes in DEEP, the model's compute dtype.
_DTYPE_OF_DEPTH = {2: torch.float32, 3: torch.bfloat16}


def read(folder: DcpFolder, weights_only: bool = False) -> TrainingState:
    """The state in an `fsdp_dtensor` folder.

    weights_only: leave out optimizer, scheduler and RNG. Raises ValueError if the folder has no key
    of the format, lacks layers or halves, or if a pickled object is damaged.
    """
    paths = {key: folder.path_of(key) for key in (*folder.tensor_keys, *folder.object_keys)}
    dropped = []
    tensors = {}
    model = {}
    for key in folder.tensor_keys:
        path = paths[key]
        tensors[path] = folder.tensor(key)
        if key.endswith(FP8_SCALING):
            dropped.append(key)
        elif path[0] == "model":
            model[str(path[1])] = tensors[path]
    if not any(name.startswith("module.") for name in model):
        raise ValueError(
            f"{folder.folder} is no fsdp_dtensor checkpoint: it has no key model.module...., but "
            f"{', '.join(list(paths)[:3])}"
        )
    objects = {}
    for key in folder.object_keys:
        if key.startswith("model."):
            dropped.append(key)
        else:
            objects[paths[key]] = key
    weights = in_common(model)
    check_known(weights, folder.folder)
    rest = _rest(folder, tensors, objects, weights_only)
    state = TrainingState(
        iteration=folder.iteration,
        weights=weights,
        rest=rest,
        dropped=tuple(dropped),
        style=_style(model, rest),
        params_dtype=dtype_argument(rest),
    )
    if not weights_only:
        state = _with_optimizer(state, folder, tensors, objects)
    check_layers(state, folder.folder)
    return state


def contents(state: TrainingState, style: NameStyle) -> Contents:
    """The contents of a folder of this format for a model of this style. Weights are stored in
    fp32, as main weights are; buffers keep their dtype."""
    kinds = LayerKinds.of(state.weights)
    halved = _halved(state, style)
    deep = "module." * _depth(state)
    tensors: dict[KeyPath, LazyTensor] = {}
    objects: dict[KeyPath, Any] = {}
    for name, weight in state.weights.items():
        main = weight if is_buffer(name) else cast(weight, torch.float32)
        styled = kinds.styled(name, style)
        for suffix, part in _halves(name, main, halved).items():
            tensors["model", f"module.{styled}{suffix}"] = part
    for name, moments in state.moments.items():
        styled = deep + kinds.styled(name, style)
        for kind, moment in moments.items():
            for suffix, part in _halves(name, moment, halved).items():
                tensors["optimizer", "state", styled + suffix, kind] = part
    for name, step in state.steps.items():
        styled = deep + kinds.styled(name, style)
        for suffix in HALVES if name in halved else ("",):
            tensors["optimizer", "state", styled + suffix, _STEP] = from_tensor(step)
    for name, options in state.groups.items():
        styled = deep + kinds.styled(name, style)
        for option, value in options.items():
            objects["optimizer", "param_to_group_meta", styled, option] = value
    flat, paths = flatten_state_dict(dict(state.rest))
    for key, value in flat.items():
        path = tuple(paths[key])
        if isinstance(value, torch.Tensor):
            tensors[path] = from_tensor(value)
        else:
            objects[path] = value
    return Contents(tensors, objects)


def _style(names: Collection[str], rest: Mapping[str, Any]) -> NameStyle:
    texts = " ".join(names)
    return NameStyle(
        fused_norms=_fuses_norms(names, rest),
        grouped_experts=any(".experts.linear_fc" in name for name in names),
        gated=any(name.endswith(HALVES) for name in names),
        renamed=tuple(r.newer for r in RENAMED if r.to_older(texts) != texts),
    )


def _fuses_norms(names: Iterable[str], rest: Mapping[str, Any]) -> bool:
    """True if the names (of a model of any style) are those of Transformer Engine's layers. Some
    models have no layer that the answer shows in, and there the arguments decide."""
    local = [split_depth(name)[1] for name in names]
    if any(".layer_norm_weight" in name for name in local):
        return True
    kinds = LayerKinds.of(map(common_name, local))
    for name in local:
        layer, inside = in_layer(common_name(name))
        is_mlp_norm = inside == "pre_mlp_layernorm.weight" and layer not in kinds.moe
        if is_mlp_norm or (inside == "input_layernorm.weight" and layer in kinds.qkv):
            return False
    return argument_of(rest, "transformer_impl", "local") != "local"


def _with_optimizer(
    state: TrainingState,
    folder: DcpFolder,
    tensors: Mapping[KeyPath, LazyTensor],
    objects: Mapping[KeyPath, str],
) -> TrainingState:
    # `state` with the optimizer's part. tensors: by path; objects: path -> key.
    kinds: dict[str, Tensors] = {}
    steps: dict[str, torch.Tensor] = {}
    groups: dict[str, dict[str, Any]] = {}
    depths = set()
    for path, tensor in tensors.items():
        if path[:2] != _STATE:
            continue
        prefixes, name = split_depth(str(path[2]))
        depths.add(prefixes.count("module."))
        kind = str(path[3])
        if kind == _STEP:
            # Both halves of a weight have the same step.
            steps[common_name(name.removesuffix("_w").removesuffix("_v"))] = tensor.whole()
        else:
            kinds.setdefault(kind, {})[name] = tensor
    for path, key in objects.items():
        if path[:2] == _META:
            _, name = split_depth(str(path[2]))
            groups.setdefault(common_name(name), {})[str(path[3])] = folder.object(key)
    moments = turned({kind: in_common(parts) for kind, parts in kinds.items()})
    _check_moments(state, moments, groups, folder.folder)
    depth = depths.pop() if len(depths) == 1 else None
    dtype = state.params_dtype
    if dtype is None and depth is not None:
        dtype = _DTYPE_OF_DEPTH.get(depth)
    return replace(
        state, moments=moments, steps=steps, groups=groups, depth=depth, params_dtype=dtype
    )


def _check_moments(
    state: TrainingState,
    moments: Mapping[str, Tensors],
    groups: Mapping[str, Any],
    where: Path,
) -> None:
    # Raises ValueError for moments without a weight, of another shape than it, or without a
    # parameter group if there are groups.
    unknown = []
    misshapen = []
    ungrouped = []
    for name, kinds in moments.items():
        weight = state.weights.get(name)
        if weight is None:
            unknown.append(f"optimizer state of {name}, which has no weight")
        else:
            for kind, moment in kinds.items():
                if moment.shape != weight.shape:
                    misshapen.append(
                        f"{kind} of {name} has shape {moment.shape}, the weight {weight.shape}"
                    )
        if groups and name not in groups:
            ungrouped.append(f"{name} has optimizer state, but no parameter group")
    problems = [*unknown, *misshapen, *ungrouped]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"{where} is inconsistent:\n{listed}")


def _rest(
    folder: DcpFolder,
    tensors: Mapping[KeyPath, LazyTensor],
    objects: Mapping[KeyPath, str],
    weights_only: bool,
) -> dict[str, Any]:
    # `TrainingState.rest`: the values that are of neither model nor optimizer. weights_only: only
    # those of `_BESIDE_WEIGHTS`.
    rest: dict[str, Any] = {}
    for path, key in objects.items():
        first = path[0]
        if first not in ("model", "optimizer") and (not weights_only or first in _BESIDE_WEIGHTS):
            set_element(rest, path, folder.object(key))
    if not weights_only:
        for path, tensor in tensors.items():
            if path[0] not in ("model", "optimizer"):
                set_element(rest, path, tensor.whole())
    return with_arguments(rest, folder.folder)


def _depth(state: TrainingState) -> int:
    # The number of "module." prefixes in DEEP.
    if state.depth is not None:
        return state.depth
    return 2 if state.params_dtype == torch.float32 else 3


def _halved(state: TrainingState, style: NameStyle) -> frozenset[str]:
    # Names of the tensors that are stored as two halves.
    if not style.gated:
        return frozenset()
    return gated_layers({name: weight.shape for name, weight in state.weights.items()})


def _halves(name: str, tensor: LazyTensor, halved: frozenset[str]) -> Tensors:
    # Suffix of the key -> the tensor, or each of its halves.
    if name in halved:
        return split_halves(tensor)
    return {"": tensor}
