"""`torch_dist` folders of megatron-core: stacked layers and experts, also in optimizer state.

    decoder.layers.NAME                    all layers in one tensor, (layers, ...)
    decoder.layers.3.mixer.in_proj.weight.x      a weight in parts (`modules.PARTS`)
    decoder.layers.mlp.experts.experts.NAME             and experts, (layers, experts, ...): core
                                           adds an `experts` to the module's path
    optimizer.state.param|exp_avg|exp_avg_sq.KEY        shaped like the model's KEY
    KEY._extra_state/shard_...             objects that belong to a place in the stack
    common.pt, or an object                args, iteration, scheduler, optimizer's parameter groups
                                           (`common_state.py`)

In models whose layers differ, each layer has separate keys (`decoder.layers.3.NAME`), and so has
each layer of multi-token prediction. Of the
distributed optimizer's sharding types only `fully_reshardable` is supported: it is in model space
and core still writes it. `dp_reshardable` stores flat buckets, whose layout only the model object
knows. `fully_sharded_model_space` stores flat pieces that core no longer reads.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint.convert.common_state import (
    BACKENDS,
    OBJECT,
    check_config,
    load_common,
)
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import (
    COMMON,
    CONFIG,
    Contents,
    DcpFolder,
    KeyPath,
)
from megatron_fsdp_adapter.checkpoint.convert.lazy import (
    LazyTensor,
    Tensors,
    cast,
    select,
)
from megatron_fsdp_adapter.checkpoint.convert.modules import (
    SHARED,
    check_known,
    is_buffer,
    join_parts,
)
from megatron_fsdp_adapter.checkpoint.convert.param_groups import (
    from_optimizer_state,
    to_optimizer_state,
)
from megatron_fsdp_adapter.checkpoint.convert.run_config import with_arguments
from megatron_fsdp_adapter.checkpoint.convert.stacks import Keys
from megatron_fsdp_adapter.checkpoint.convert.training_state import (
    NameStyle,
    TrainingState,
    argument_of,
    check_layers,
    dtype_argument,
    gated_layers,
    in_common,
    turned,
)
from megatron_fsdp_adapter.state.names import split_depth

SHARDING_TYPE = "fully_reshardable"

VERSION = "checkpoint_version"
RECORD = "fsdp_dtensor_names"
"""Entry of the common state that records the `fsdp_dtensor` names' style."""

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_MAIN_WEIGHTS = ("param", "fp32_param")
_SECOND = "exp_avg_sq"
"""The optimizer state that only Adam has."""
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_STACKED_LAYERS = re.compile(r"((?:encoder|decoder)\.layers)\.(?!\d+\.)(.+)")
_STACKED_EXPERTS = re.compile(r"(.+\.experts)\.experts\.(?!\d+\.)(.+)")
_SINGLE_EXPERT = re.compile(r"(.+\.experts)\.experts\.(\d+)\.(.+)")
_RNG_OBJECT = re.compile(r"rng_state/shard_(\d+(?:\.\d+){1,2})_\d+(?:\.\d+){1,2}")
_RNG_PLACE = re.compile(r"\((\d+(?:, \d+){1,2})\)")

# fmt: off
_UNKNOWN_MODULES = {
    "heterogeneous_layers_config_path": ("a heterogeneous model", "Load it with stock DDP"),
    "heterogeneous_layers_config_encoded_json": ("a heterogeneous model", "Load it with stock DDP"),
    "mla_down_proj_fusion": (
        "self_attention.linear_qkv_down_proj",
        "Load it without --mla-down-proj-fusion, and save it again",
    ),
    "moe_single_grouped_weight": (
        "mlp.experts with one weight for all experts",
        "Load it without --moe-single-grouped-weight, and save it again",
    ),
    "moe_single_grouped_bias": (
        "mlp.experts with one bias for all experts",
        "Load it without --moe-single-grouped-bias, and save it again",
    ),
    "moe_use_legacy_grouped_gemm": (
        "mlp.experts with weight1 and weight2",
        "Load it without --moe-use-legacy-grouped-gemm, and save it again",
    ),
}
# fmt: on
"""Argument -> the modules that it asks for, and the remedy."""


def read(folder: DcpFolder, weights_only: bool = False) -> TrainingState:
    """The state in a `torch_dist` folder.

    weights_only: leave out optimizer, scheduler and RNG. Raises ValueError if it is of another
    format or a newer version, if its optimizer is not in model space, or if files are damaged.
    """
    check_config(folder)
    common = with_arguments(load_common(folder), folder.folder)
    if not weights_only:
        _check_optimizer(folder)
    model: Tensors = {}
    optimizer: dict[str, Tensors] = {}
    for key in folder.tensor_keys:
        if match := _OPTIMIZER.fullmatch(key):
            optimizer.setdefault(match[1], {}).update(_unstacked(match[2], folder.tensor(key)))
        elif not _BUCKETS.match(key):
            model.update(_unstacked(key, folder.tensor(key)))
    record = common.pop(RECORD, {})
    weights = join_parts(in_common(model))
    check_known(weights, folder.folder)
    style = NameStyle(**record["style"]) if record else _style(common, weights, folder.folder)
    state = TrainingState(
        iteration=folder.iteration,
        weights=weights,
        params_dtype=dtype_argument(common) or _commonest_dtype(weights),
        style=style,
        depth=record.get("depth"),
        rest=_rest(folder, common, record, weights_only),
        dropped=_dropped(folder),
    )
    if not weights_only and optimizer:
        state = _with_optimizer(state, optimizer, common, folder.folder)
    check_layers(state, folder.folder)
    return state


def contents(state: TrainingState, style: NameStyle) -> Contents:
    """The contents of a folder of this format, as unmodified Megatron saves a model of this style
    with `--dist-ckpt-optim-fully-reshardable`; weights in the compute dtype."""
    tensors, objects = _leaves(state, style)
    rng, common = _common_state(state, style)
    files: dict[str, Callable[[Path], Any]] = {
        COMMON: functools.partial(torch.save, common),
        CONFIG: lambda path: path.write_text(json.dumps(BACKENDS)),
    }
    objects |= rng
    return Contents(tensors, objects, files)


def _leaves(
    state: TrainingState, style: NameStyle
) -> tuple[dict[KeyPath, LazyTensor], dict[KeyPath, Any]]:
    """The tensors, and the `_extra_state` objects that a model of this style loads.

    Core's linear layers save None there, Transformer Engine's save FP8 scales; loading None keeps
    the initial scales. By default Megatron ignores keys that a model does not load.
    """
    keys = Keys.of(state, style)
    dtype = state.params_dtype
    computed = dict(state.weights)
    if dtype is not None:
        for name, weight in state.weights.items():
            if not is_buffer(name):
                computed[name] = cast(weight, dtype)
    tensors: dict[KeyPath, LazyTensor] = {}
    for key, tensor in keys.stacked(computed).items():
        tensors[(key,)] = tensor
    kinds = {}
    if state.moments:
        # Core saves fp32 main weights even for a model that computes in fp32.
        kinds["param"] = {n: cast(state.weights[n], torch.float32) for n in state.moments}
    kinds |= turned(state.moments)
    shared = {name: alias for alias, name in SHARED.items() if alias in state.weights}
    for kind, parts in kinds.items():
        renamed = {shared.get(name, name): part for name, part in parts.items()}
        for key, tensor in keys.stacked(renamed).items():
            tensors[(f"optimizer.state.{kind}.{key}",)] = tensor
    objects: dict[KeyPath, Any] = {(key,): [None] for key in keys.extra_states(state.weights)}
    return tensors, objects


def _unstacked(key: str, tensor: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
    """Name and tensor of each layer and expert in the stored tensor `key`."""
    _, key = split_depth(key)
    if match := _STACKED_LAYERS.fullmatch(key):
        layers, name = match.groups()
        for layer in range(tensor.shape[0]):
            yield from _unstacked(f"{layers}.{layer}.{name}", select(tensor, layer))
    elif match := _STACKED_EXPERTS.fullmatch(key):
        experts, name = match.groups()
        for expert in range(tensor.shape[0]):
            yield f"{experts}.{expert}.{name}", select(tensor, expert)
    elif match := _SINGLE_EXPERT.fullmatch(key):
        yield ".".join(match.groups()), tensor
    else:
        yield key, tensor


def _with_optimizer(
    state: TrainingState,
    optimizer: Mapping[str, Tensors],
    common: Mapping[str, Any],
    where: Path,
) -> TrainingState:
    # `state` with the optimizer's part. optimizer: kind -> tensors by name.
    shared = {alias: name for alias, name in SHARED.items() if name in state.weights}
    kinds = {}
    for kind, stored in optimizer.items():
        parts = join_parts(in_common(stored))
        kinds[kind] = {shared.get(name, name): part for name, part in parts.items()}
    main: Tensors = {}
    for kind in _MAIN_WEIGHTS:
        main |= kinds.pop(kind, {})
    moments = turned(kinds)
    unknown = sorted({*main, *moments} - state.weights.keys())
    if unknown:
        raise ValueError(f"{where}: optimizer state without a weight: {', '.join(unknown)}")
    shapes = {name: state.weights[name].shape for name in moments}
    not_adams = {name for name, kept in moments.items() if _SECOND not in kept}
    groups, steps = from_optimizer_state(common, shapes, not_adams, where)
    weights = {**state.weights, **main}
    for alias, name in shared.items():
        if alias in weights:
            weights[alias] = weights[name]
    return replace(state, weights=weights, moments=moments, groups=groups, steps=steps)


def _rest(
    folder: DcpFolder, common: Mapping[str, Any], record: Mapping[str, Any], weights_only: bool
) -> dict[str, Any]:
    # `TrainingState.rest`: the common state without the optimizer, and the RNG states by the
    # names of `fsdp_dtensor`. record: the `RECORD` of the folder, {} if it has none.
    if weights_only:
        kept = {"args", VERSION, "iteration"} - {*record.get("added", ())}
        return {key: value for key, value in common.items() if key in kept}
    left_out = {"optimizer", "content_metadata", *record.get("added", ())}
    rest = {key: value for key, value in common.items() if key not in left_out}
    if "rng_state" in record:
        rest["rng_state"] = record["rng_state"]
        return rest
    places = _stored_rng_places(folder)
    if places:
        rest["rng_state"] = {place: folder.object(key)[0] for place, key in places.items()}
    return rest


def _stored_rng_places(folder: DcpFolder) -> dict[str, str]:
    """The keys of RNG objects by their places in `fsdp_dtensor`: those of each data-parallel rank
    if there are any, or else those that data-parallel ranks share."""
    shared: dict[str, str] = {}
    of_each_rank: dict[str, str] = {}
    for key in folder.object_keys:
        match = _RNG_OBJECT.fullmatch(key)
        if match is None:
            continue
        numbers = match[1].split(".")
        places = of_each_rank if len(numbers) == 3 else shared
        places[f"({', '.join(numbers)})"] = key
    return of_each_rank or shared


def _common_state(
    state: TrainingState, style: NameStyle
) -> tuple[dict[KeyPath, Any], dict[str, Any]]:
    """The RNG objects, and the content of common.pt."""
    common = dict(state.rest)
    record: dict[str, Any] = {"style": asdict(style), "depth": state.depth}
    places = common.pop("rng_state", None) or {}
    rng = _rng_objects(places)
    if rng is None:
        rng = {}
        record["rng_state"] = places  # saved by a script in another form
    if state.moments:
        common["optimizer"] = to_optimizer_state(state, SHARDING_TYPE)
    if VERSION not in common:
        common[VERSION] = 3.0
        record["added"] = [VERSION]
    common.setdefault("iteration", state.iteration)
    common[RECORD] = record
    common["content_metadata"] = {
        "distrib_optim_sharding_type": SHARDING_TYPE,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    return rng, common


def _rng_objects(places: Mapping[str, Any]) -> dict[KeyPath, Any] | None:
    """The RNG objects of states by place, (pp, tp) or (pp, tp, dp). None if a place has another
    form, or if places have both.

    Core of 0.16 reads objects of each rank under expert parallelism. Later releases read one for
    all data-parallel ranks: that of the first is written for them, too."""
    matches = [_RNG_PLACE.fullmatch(str(place)) for place in places]
    grid = [tuple(map(int, match[1].split(", "))) for match in matches if match]
    if len(grid) < len(places) or len({len(numbers) for numbers in grid}) > 1:
        return None
    sizes = [1 + max(numbers) for numbers in zip(*grid, strict=True)]
    objects: dict[KeyPath, Any] = {}
    for value, numbers in zip(places.values(), grid, strict=True):
        objects[_rng_key(numbers, sizes)] = [value]
        if len(numbers) == 3 and numbers[2] == 0:
            objects[_rng_key(numbers[:2], sizes[:2])] = [value]
    return objects


def _rng_key(numbers: Sequence[int], sizes: Sequence[int]) -> KeyPath:
    place, size = (".".join(map(str, values)) for values in (numbers, sizes))
    return (f"rng_state/shard_{place}_{size}",)


def _style(common: Mapping[str, Any], weights: Tensors, where: Path) -> NameStyle | None:
    """The style by the saved arguments, and of gates by shapes; None without any arguments. Raises
    ValueError if an argument asks for modules whose names are not known."""
    implementation = argument_of(common, "transformer_impl")
    if implementation is None:
        return None
    _check_arguments(common, where)
    is_local = implementation == "local"
    grouped = bool(argument_of(common, "moe_grouped_gemm", False))
    shapes = {name: weight.shape for name, weight in weights.items()}
    return NameStyle(
        fused_norms=not is_local,
        grouped_experts=grouped and not is_local,
        gated=bool(gated_layers(shapes)),
    )


def _check_arguments(common: Mapping[str, Any], where: Path) -> None:
    """Raises ValueError if an argument asks for modules whose names are not known: the keys of this
    format do not show them."""
    for argument, (module, remedy) in _UNKNOWN_MODULES.items():
        value = argument_of(common, argument)
        if value:
            raise ValueError(
                f"{where}: {argument}={value!r}: {module} cannot be converted. {remedy}"
            )


def _dropped(folder: DcpFolder) -> tuple[str, ...]:
    # `TrainingState.dropped`: the objects that are not read, except `_extra_state`.
    kept = (key for key in folder.object_keys if not _RNG_OBJECT.fullmatch(key))
    return tuple(key for key in kept if key != OBJECT and "_extra_state" not in key)


def _commonest_dtype(weights: Tensors) -> torch.dtype | None:
    dtypes = [tensor.dtype for name, tensor in weights.items() if not is_buffer(name)]
    return max(set(dtypes), key=dtypes.count) if dtypes else None


def _check_optimizer(folder: DcpFolder) -> None:
    buckets = [key for key in folder.tensor_keys if _BUCKETS.match(key)]
    if buckets:
        raise ValueError(
            f"{folder.folder}: the optimizer is stored as flat buckets (dp_reshardable, "
            f"{buckets[0]}), and only the model object knows their layout. Load it with Megatron "
            "and save it again with --dist-ckpt-optim-fully-reshardable, or convert the weights "
            "only"
        )
