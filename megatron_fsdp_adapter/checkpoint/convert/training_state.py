"""`TrainingState`, which every format is read into and written from, and its common names.

A parameter's name depends on the layers (Transformer Engine's or core's) and on the format. A
common name is that of core's layers with one module per expert, numbered over the whole model,
without splits or stacks:

    decoder.layers.3.input_layernorm.weight
        TE: ...3.self_attention.linear_qkv.layer_norm_weight
    decoder.layers.3.pre_mlp_layernorm.weight
        TE, dense: ...3.mlp.linear_fc1.layer_norm_weight
    decoder.layers.3.mlp.linear_fc1.weight         gate half over linear half, if gated
    decoder.layers.3.mlp.experts.7.linear_fc1.weight
        SequentialMLP: ...mlp.experts.local_experts.7.linear_fc1.weight
        TEGroupedMLP:  ...mlp.experts.linear_fc1.weight7
    mtp.layers.0.transformer_layer.mlp.linear_fc1.weight
        core 0.19: mtp.layers.0.mtp_model_layer....
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor, Tensors, concat, narrow
from megatron_fsdp_adapter.checkpoint.convert.modules import in_layer
from megatron_fsdp_adapter.core.layout.ranges import Shape
from megatron_fsdp_adapter.state.names import HALVES, RENAMED, split_depth

_FUSED = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
_SEQUENTIAL = re.compile(r"(.+\.experts)\.local_experts\.(\d+)\.(.+)")
_GROUPED = re.compile(r"(.+\.experts)\.(linear_fc\d)\.(weight|bias)(\d+)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(linear_fc\d)\.(weight|bias)")
_NUMBERED = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")
_FIRST_LINEAR = re.compile(
    r"(.*mlp\.(?:shared_experts\.|experts\.\d+\.)?)linear_fc1\.(?:weight|bias)"
)


@dataclass(frozen=True)
class NameStyle:
    """The kinds of a model's modules that its parameters' names depend on.

    fused_norms: Transformer Engine's layers, which contain the preceding norm; grouped_experts:
    TEGroupedMLP; gated: the first linear layer of an MLP is a gate half over a linear half;
    renamed: the newer texts of `RENAMED` in the names.
    """

    fused_norms: bool
    grouped_experts: bool
    gated: bool
    renamed: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingState:
    """A checkpoint with lazy tensors, under common names.

    weights: fp32 main weights if stored, else compute weights, and persistent buffers; moments:
    name -> optimizer state (exp_avg, ...), shaped like the weight; steps: name -> Adam's step count
    if it is stored per parameter; groups: name -> options of its parameter group; params_dtype:
    compute dtype (None: unknown); style: None if unknown; rest: all other values, nested as saved;
    depth: number of "module." prefixes of the optimizer's names (None: by params_dtype); dropped:
    keys that are not carried over.
    """

    iteration: int
    weights: Tensors
    moments: Mapping[str, Tensors] = field(default_factory=dict)
    steps: Mapping[str, torch.Tensor] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)
    params_dtype: torch.dtype | None = None
    style: NameStyle | None = None
    depth: int | None = None
    dropped: tuple[str, ...] = ()


def argument_of(rest: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """An entry of `args`, which Megatron saves as a namespace and other scripts as a dict."""
    args = rest.get("args")
    if isinstance(args, Mapping):
        found = args.get(name)
    else:
        found = getattr(args, name, None)
    return default if found is None else found


def dtype_argument(rest: Mapping[str, Any]) -> torch.dtype | None:
    """The compute dtype by the saved arguments; None if there are none."""
    if rest.get("args") is None:
        return None
    if argument_of(rest, "bf16", False):
        return torch.bfloat16
    if argument_of(rest, "fp16", False):
        return torch.float16
    return torch.float32


def common_name(name: str) -> str:
    """The common name of a parameter called `name` in a model of any style."""
    for renaming in RENAMED:
        name = renaming.to_older(name)
    if match := _SEQUENTIAL.fullmatch(name):
        return ".".join(match.groups())
    if match := _GROUPED.fullmatch(name):
        path, linear, kind, number = match.groups()
        return f"{path}.{number}.{linear}.{kind}"
    layer, inside = in_layer(name)
    for fused, separate in _FUSED:
        if inside.startswith(fused):
            return f"{layer}.{separate}{inside.removeprefix(fused)}"
    return name


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of a model's layers that the names of norms depend on, as sets of their paths.

    moe: layers with experts; attention: layers with attention of any kind; qkv: those whose
    queries, keys and values come from one linear layer.
    """

    moe: frozenset[str]
    attention: frozenset[str]
    qkv: frozenset[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> LayerKinds:
        """The kinds of the layers that the parameters `names` (common) belong to."""
        found: dict[str, set[str]] = {"mlp.experts.": set(), "self_attention.": set()}
        qkv = set()
        for name in names:
            layer, inside = in_layer(name)
            for start, layers in found.items():
                if inside.startswith(start):
                    layers.add(layer)
            if inside == "self_attention.linear_qkv.weight":
                qkv.add(layer)
        moe, attention = found.values()
        return cls(frozenset(moe), frozenset(attention), frozenset(qkv))

    def styled(self, name: str, style: NameStyle) -> str:
        """The name of the parameter `name` (common) in a model of this style."""
        if match := _EXPERT.fullmatch(name):
            path, number, linear, kind = match.groups()
            if style.grouped_experts:
                styled = f"{path}.{linear}.{kind}{number}"
            else:
                styled = f"{path}.local_experts.{number}.{linear}.{kind}"
        elif style.fused_norms:
            styled = self._with_fused_norm(name)
        else:
            styled = name
        for renaming in RENAMED:
            if renaming.newer in style.renamed:
                styled = renaming.to_newer(styled)
        return styled

    def stored(self, name: str, style: NameStyle) -> str:
        """The name of `name` (common) in `torch_dist`, without stacks.

        Layers of core rename their norms when they are saved, that before experts too. They do not
        if their attention is of another kind than `qkv`."""
        if style.fused_norms:
            return self._with_fused_norm(name)
        layer, _ = in_layer(name)
        if layer in self.attention - self.qkv:
            return name
        return self._with_fused_norm(name, before_experts=True)

    def _with_fused_norm(self, name: str, before_experts: bool = False) -> str:
        """`name`, or that of a norm in the linear layer that follows it. before_experts: also of
        the norm before experts, which precedes the router too."""
        layer, inside = in_layer(name)
        attention, mlp = _FUSED
        pairs = []
        if layer in self.qkv:
            pairs.append(attention)
        if before_experts or layer not in self.moe:
            pairs.append(mlp)
        for fused, separate in pairs:
            if inside.startswith(separate):
                return f"{layer}.{fused}{inside.removeprefix(separate)}"
        return name


def is_first_linear(name: str) -> bool:
    """True if `name` (common) belongs to an MLP's first linear layer, which has two halves if
    gated."""
    return bool(_FIRST_LINEAR.fullmatch(name))


def gated_layers(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """The names (common) of weights and biases that have two halves.

    Of a gated MLP, the first linear layer has two rows for each column of the second one. The
    arguments name the activation, and each release knows others."""
    found = set()
    for name in shapes:
        match = _FIRST_LINEAR.fullmatch(name)
        if match is None:
            continue
        first = shapes.get(f"{match[1]}linear_fc1.weight")
        second = shapes.get(f"{match[1]}linear_fc2.weight")
        if first and second and first[0] == 2 * second[1]:
            found.add(name)
    return frozenset(found)


def is_expert(name: str) -> bool:
    """True if `name` (common) belongs to one expert."""
    return bool(_EXPERT.fullmatch(name))


def join_halves(tensors: Tensors) -> Tensors:
    """The tensors with `NAME_w` and `NAME_v` joined into NAME. Raises ValueError for one without
    the other."""
    joined: Tensors = {}
    for key, tensor in tensors.items():
        name = key[:-2]
        suffix = key[-2:]
        if suffix not in HALVES or not name.rstrip("0123456789").endswith(("weight", "bias")):
            joined[key] = tensor
            continue
        missing = [name + half for half in HALVES if name + half not in tensors]
        if missing:
            raise ValueError(f"{key} is stored without {missing[0]}: half of the weight is missing")
        joined[name] = concat([tensors[name + half] for half in HALVES])
    return joined


def in_common(tensors: Tensors) -> Tensors:
    """Tensors of a model of any style by common names, with halves joined and leading "module."
    prefixes removed. Raises ValueError for half a weight, or for a weight stored under two
    names."""
    local = {split_depth(name)[1]: tensor for name, tensor in tensors.items()}
    joined = join_halves(local)
    found = {common_name(name): tensor for name, tensor in joined.items()}
    if len(found) != len(joined):
        raise ValueError("a weight is stored under two names of different styles")
    return found


def turned(
    kinds: Mapping[str, Tensors],
) -> dict[str, Tensors]:
    """The tensors with the two levels of keys swapped: kind of moment -> name becomes name -> kind,
    and vice versa."""
    found: dict[str, Tensors] = {}
    for outer, tensors in kinds.items():
        for inner, tensor in tensors.items():
            found.setdefault(inner, {})[outer] = tensor
    return found


def split_halves(tensor: LazyTensor) -> Tensors:
    """Suffix -> half. Raises ValueError for an odd number of rows."""
    rows, odd = divmod(tensor.shape[0], 2)
    if odd:
        raise ValueError(f"a gated layer of {tensor.shape[0]} rows does not have two halves")
    return {half: narrow(tensor, i * rows, rows) for i, half in enumerate(HALVES)}


def numbered(name: str) -> tuple[str, int, str] | None:
    """Block ("encoder" or "decoder"), number of the layer, and the rest of `name` (common); None
    for a name outside these layers."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


def check_layers(state: TrainingState, where: object) -> None:
    """Raises ValueError unless the layers are numbered 0, 1, ... over the whole model.

    Layers are missing where their numbers begin at 0 on each pipeline stage.
    """
    found: dict[str, set[int]] = {}
    for name in state.weights:
        if place := numbered(name):
            block, number, _ = place
            found.setdefault(block, set()).add(number)
    if not found:
        found["decoder"] = set()
    for block, numbers in found.items():
        # Of T5, `num_layers` is the number of the encoder's.
        of_block = argument_of(state.rest, f"{block}_num_layers") if len(found) > 1 else None
        wanted = int(of_block or argument_of(state.rest, "num_layers", len(numbers)))
        if numbers != set(range(wanted)):
            raise ValueError(
                f"{where} has the layers {_ranges(numbers)} in its {block}, but a model of "
                f"{wanted} layers has 0-{wanted - 1}. Layer numbers that start at 0 on each "
                "pipeline stage, as in checkpoints of Megatron-FSDP, cannot be converted"
            )


def _ranges(numbers: Iterable[int]) -> str:
    # The lowest and the highest number, and how many there are, as text.
    listed = sorted(numbers)
    if not listed:
        return "(none)"
    return f"{listed[0]}-{listed[-1]} ({len(listed)})"
