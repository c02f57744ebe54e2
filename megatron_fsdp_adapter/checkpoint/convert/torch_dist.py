"""`torch_dist` folders of megatron-core: stacked layers and experts, also in optimizer state.

    decoder.layers.NAME                    all layers in one tensor, (layers, ...)
    decoder.layers.mlp.experts.experts.NAME             and experts, (layers, experts, ...): core
                                           adds an `experts` to the module's path
    optimizer.state.param|exp_avg|exp_avg_sq.KEY        shaped like the model's KEY
    KEY._extra_state/shard_...             objects that belong to a place in the stack
    common.pt, or an object                args, iteration, scheduler, optimizer's parameter groups
                                           (`common_state.py`)

In models whose layers differ, each layer has separate keys (`decoder.layers.3.NAME`). Of the
distributed optimizer's sharding types only `fully_reshardable` is supported: it is in model space
and core still writes it. `dp_reshardable` stores flat buckets, whose layout only the model object
knows. `fully_sharded_model_space` stores flat pieces that core no longer reads.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    stack,
)
from megatron_fsdp_adapter.checkpoint.convert.param_groups import (
    from_optimizer_state,
    to_optimizer_state,
)
from megatron_fsdp_adapter.checkpoint.convert.run_config import with_arguments
from megatron_fsdp_adapter.checkpoint.convert.training_state import (
    NameStyle,
    TrainingState,
    argument_of,
    check_layers,
    dtype_argument,
    fuse_norm,
    in_common,
    is_parameter,
    moe_layers,
    turned,
)
from megatron_fsdp_adapter.core.layout.ranges import Shape
from megatron_fsdp_adapter.state.names import split_depth

SHARDING_TYPE = "fully_reshardable"

RECORD = "fsdp_dtensor_names"
"""Entry of the common state that records the `fsdp_dtensor` names' style."""

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_MAIN_WEIGHTS = ("param", "fp32_param")
_SECOND = "exp_avg_sq"
"""The optimizer state that only Adam has."""
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_STACKED_LAYERS = re.compile(r"(decoder\.layers)\.(?!\d+\.)(.+)")
_STACKED_EXPERTS = re.compile(r"(.+\.experts)\.experts\.(?!\d+\.)(.+)")
_SINGLE_EXPERT = re.compile(r"(.+\.experts)\.experts\.(\d+)\.(.+)")
_COMMON_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_RNG_OBJECT = re.compile(r"rng_state/shard_(\d+(?:\.\d+){1,2})_\d+(?:\.\d+){1,2}")
_RNG_PLACE = re.compile(r"\((\d+(?:, \d+){1,2})\)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LINEAR = re.compile(r"(.+\.linear_\w+)\.weight")
_NORM = re.compile(r"(.+(?:layernorm|layer_norm))\.weight")


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
    weights = in_common(model)
    style = NameStyle(**record["style"]) if record else _style(common)
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
    keys = _Keys.of(state, style)
    dtype = state.params_dtype
    computed = dict(state.weights)
    if dtype is not None:
        for name in filter(is_parameter, state.weights):
            computed[name] = cast(computed[name], dtype)
    tensors: dict[KeyPath, LazyTensor] = {}
    for key, tensor in keys.stacked(computed).items():
        tensors[(key,)] = tensor
    kinds = {}
    if state.moments:
        # Core saves fp32 main weights even for a model that computes in fp32.
        kinds["param"] = {n: cast(state.weights[n], torch.float32) for n in state.moments}
    kinds |= turned(state.moments)
    for kind, parts in kinds.items():
        for key, tensor in keys.stacked(parts).items():
            tensors[(f"optimizer.state.{kind}.{key}",)] = tensor
    objects: dict[KeyPath, Any] = {(key,): [None] for key in keys.extra_states(state.weights)}
    return tensors, objects


@dataclass(frozen=True)
class _Keys:
    """Common names -> keys of the format, and places in the stacks.

    moe: paths of the layers with experts; layers, experts: sizes of the stacks; per_layer: every
    layer has keys of its own.
    """

    style: NameStyle
    moe: frozenset[str]
    layers: int
    experts: int
    per_layer: bool

    @classmethod
    def of(cls, state: TrainingState, style: NameStyle) -> _Keys:
        """The keys of a state's model, saved in `style`."""
        names_by_layer: dict[str, set[str]] = {}
        experts = 0
        for name in state.weights:
            if match := _LAYER.fullmatch(name):
                names_by_layer.setdefault(match[1], set()).add(match[2])
            if match := _COMMON_EXPERT.fullmatch(name):
                experts = max(experts, 1 + int(match[2]))
        # Layers whose parameters have different names cannot be stacked. Where all have the same
        # names, core still stacks none if `moe_layer_freq` is a list or above 1.
        differ = len({frozenset(names) for names in names_by_layer.values()}) > 1
        frequency = argument_of(state.rest, "moe_layer_freq", 1)
        per_layer = differ or isinstance(frequency, (list, tuple)) or frequency > 1
        return cls(style, moe_layers(state.weights), len(names_by_layer), experts, per_layer)

    def place(self, name: str) -> tuple[str, Shape, Shape]:
        """The key of the parameter `name` (common), its indices in the key's stack, and the sizes
        of the stack. Indices and sizes are () for a key without a stack."""
        indices: Shape = ()
        sizes: Shape = ()
        if match := _COMMON_EXPERT.fullmatch(name):
            # `match[1]` ends with ".experts"; core's keys have the word twice.
            name = f"{match[1]}.experts.{match[3]}"
            indices = (int(match[2]),)
            sizes = (self.experts,)
        match = _LAYER.fullmatch(name)
        if match is None:
            return name, indices, sizes
        layer_number, inside = match.groups()
        layer = f"decoder.layers.{layer_number}"
        # Keys have fused norms for both kinds of layers, since core's layers rename theirs when
        # they save. The exception is a Transformer Engine layer with experts: the norm before its
        # MLP is a module, and keeps its name. Core's layers rename that one too.
        inside = fuse_norm(inside, self.style.fused_norms and layer in self.moe)
        if self.per_layer:
            return f"{layer}.{inside}", indices, sizes
        return f"decoder.layers.{inside}", (int(layer_number), *indices), (self.layers, *sizes)

    def stacked(self, tensors: Tensors) -> Tensors:
        """Key -> tensor, stacked from the `tensors` by common name. Raises ValueError if a stack
        has gaps."""
        parts: dict[str, dict[Shape, LazyTensor]] = {}
        shapes: dict[str, Shape] = {}
        for name, tensor in tensors.items():
            key, indices, sizes = self.place(name)
            parts.setdefault(key, {})[indices] = tensor
            shapes[key] = sizes
        return {key: _stack(key, parts[key], shapes[key]) for key in parts}

    def extra_states(self, names: Iterable[str]) -> Iterator[str]:
        """Keys of the `_extra_state` objects of all layers, each with its place in the stack."""
        for name in names:
            key, indices, sizes = self.place(name)
            if key.startswith(("output_layer.", "embedding.")):
                continue
            owners = []
            for pattern in (_LINEAR, _NORM):
                match = pattern.fullmatch(key)
                if match:
                    owners.append(match[1])
            if key.endswith("linear_proj.weight"):
                owners.append(key.removesuffix("linear_proj.weight") + "core_attention")
            # Without a stack the object is number 0 of 1.
            number = ".".join(map(str, indices or (0,)))
            count = ".".join(map(str, sizes or (1,)))
            for owner in owners:
                yield f"{owner}._extra_state/shard_{number}_{count}"


def _stack(key: str, parts: Mapping[Shape, LazyTensor], sizes: Shape) -> LazyTensor:
    # The stack of `sizes` of the parts, which are given by their indices in it.
    if not sizes:
        return parts[()]
    inner = []
    for i in range(sizes[0]):
        below = {indices[1:]: part for indices, part in parts.items() if indices[0] == i}
        if not below:
            raise ValueError(f"{key}: entry {i} of {sizes[0]} is missing")
        inner.append(_stack(key, below, sizes[1:]))
    return stack(inner)


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
    kinds = {kind: in_common(parts) for kind, parts in optimizer.items()}
    main: Tensors = {}
    for kind in _MAIN_WEIGHTS:
        main |= kinds.pop(kind, {})
    moments = turned(kinds)
    unknown = sorted({*main, *moments} - state.weights.keys())
    if unknown:
        raise ValueError(f"{where}: optimizer state without a weight: {', '.join(unknown)}")
    shapes = {name: state.weights[name].shape for name in moments}
    not_adams = {name for name, kept in moments.items() if _SECOND not in kept}
    groups, steps = from_optimizer_state(common.get("optimizer"), shapes, not_adams, where)
    weights = {**state.weights, **main}
    return replace(state, weights=weights, moments=moments, groups=groups, steps=steps)


def _rest(
    folder: DcpFolder, common: Mapping[str, Any], record: Mapping[str, Any], weights_only: bool
) -> dict[str, Any]:
    # `TrainingState.rest`: the common state without the optimizer, and the RNG states by the
    # names of `fsdp_dtensor`. record: the `RECORD` of the folder, {} if it has none.
    if weights_only:
        kept = ("args", "checkpoint_version", "iteration")
        return {key: common[key] for key in kept if key in common}
    rest = {k: v for k, v in common.items() if k not in ("optimizer", "content_metadata")}
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
    common.setdefault("checkpoint_version", 3.0)
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


def _style(common: Mapping[str, Any]) -> NameStyle | None:
    """The style by the saved arguments; None without any."""
    implementation = argument_of(common, "transformer_impl")
    if implementation is None:
        return None
    return NameStyle(
        fused_norms=implementation != "local",
        grouped_experts=bool(argument_of(common, "moe_grouped_gemm", False)),
        gated=bool(argument_of(common, "swiglu", False)),
    )


def _dropped(folder: DcpFolder) -> tuple[str, ...]:
    # `TrainingState.dropped`: the objects that are not read, except `_extra_state`.
    kept = (key for key in folder.object_keys if not _RNG_OBJECT.fullmatch(key))
    return tuple(key for key in kept if key != OBJECT and "_extra_state" not in key)


def _commonest_dtype(weights: Tensors) -> torch.dtype | None:
    dtypes = [tensor.dtype for name, tensor in weights.items() if is_parameter(name)]
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
