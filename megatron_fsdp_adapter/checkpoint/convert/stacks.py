"""Keys of `torch_dist`: stacks of layers and experts, and the objects beside them.

In models whose layers differ, each layer has separate keys. Which models stack their layers, core
decides by the model's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor, Tensors, stack
from megatron_fsdp_adapter.checkpoint.convert.modules import split_parts
from megatron_fsdp_adapter.checkpoint.convert.training_state import (
    LayerKinds,
    NameStyle,
    TrainingState,
    argument_of,
    numbered,
)
from megatron_fsdp_adapter.core.layout.ranges import Shape

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_LINEAR = re.compile(r"(.+\.(?:linear_\w+|in_proj|out_proj|eh_proj|fc[12]_latent_proj))\.weight")
_NORM = re.compile(r"(.+(?:layernorm|layer_norm|[._][a-z]*norm))\.weight")

_HYBRID_NORM = ".final_norm."
"""Part of a name that only hybrid models have: the last norm of their stack."""

_SEPARATE = (
    "moe_layer_freq",
    "linear_attention_freq",
    "hetereogenous_dist_checkpoint",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
)
"""Arguments for models whose layers have separate keys, also if all layers are of one kind."""


@dataclass(frozen=True)
class Keys:
    """Common names -> keys of the format, and places in the stacks.

    kinds: the kinds of layers; shapes: of all weights, by common name; layers: "encoder" and
    "decoder" -> number of layers of a stack, 0 if each has keys of its own; experts: number of
    experts of a stack.
    """

    style: NameStyle
    kinds: LayerKinds
    shapes: Mapping[str, Shape]
    layers: Mapping[str, int]
    experts: int

    @classmethod
    def of(cls, state: TrainingState, style: NameStyle) -> Keys:
        """The keys of a state's model, saved in `style`."""
        names_by_layer: dict[str, dict[int, set[str]]] = {}
        experts = 0
        for name in state.weights:
            if place := numbered(name):
                block, number, inside = place
                names_by_layer.setdefault(block, {}).setdefault(number, set()).add(inside)
            if match := _EXPERT.fullmatch(name):
                experts = max(experts, 1 + int(match[2]))
        # Layers whose parameters have different names cannot be stacked. Where all have the same
        # names, core still stacks none with some arguments, and none of a hybrid model.
        is_separate = any(_separates(argument_of(state.rest, name)) for name in _SEPARATE)
        layers = {}
        for block, names in names_by_layer.items():
            differ = len({frozenset(inside) for inside in names.values()}) > 1
            is_hybrid = any(name.startswith(block + _HYBRID_NORM) for name in state.weights)
            layers[block] = 0 if is_separate or differ or is_hybrid else len(names)
        shapes = {name: weight.shape for name, weight in state.weights.items()}
        return cls(style, LayerKinds.of(state.weights), shapes, layers, experts)

    def place(self, name: str) -> tuple[str, Shape, Shape]:
        """The key of the parameter `name` (common), its indices in the key's stack, and the sizes
        of the stack. Indices and sizes are () for a key without a stack."""
        indices: Shape = ()
        sizes: Shape = ()
        key = self.kinds.stored(name, self.style)
        if match := _EXPERT.fullmatch(key):
            # `match[1]` ends with ".experts"; core's keys have the word twice.
            key = f"{match[1]}.experts.{match[3]}"
            indices = (int(match[2]),)
            sizes = (self.experts,)
        place = numbered(key)
        if place is None or not self.layers[place[0]]:
            return key, indices, sizes
        block, number, inside = place
        return f"{block}.layers.{inside}", (number, *indices), (self.layers[block], *sizes)

    def stacked(self, tensors: Tensors) -> Tensors:
        """Key -> tensor, stacked from the `tensors` by common name. Raises ValueError if a stack
        has gaps."""
        parts: dict[str, dict[Shape, LazyTensor]] = {}
        shapes: dict[str, Shape] = {}
        for name, tensor in tensors.items():
            key, indices, sizes = self.place(name)
            for suffix, part in split_parts(name, tensor, self.shapes).items():
                parts.setdefault(key + suffix, {})[indices] = part
                shapes[key + suffix] = sizes
        return {key: _stack(key, parts[key], shapes[key]) for key in parts}

    def extra_states(self, names: Collection[str]) -> Iterator[str]:
        """Keys of the `_extra_state` objects of all layers, each with its place in the stack."""
        for owner in _output_layers(names):
            yield f"{owner}._extra_state/shard_0_1"
        for name in names:
            key, indices, sizes = self.place(name)
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


def _output_layers(names: Iterable[str]) -> tuple[str, ...]:
    """The paths of the output layers that have an `_extra_state`: in models but GPT, also if they
    are tied to the embedding. T5 has two names for its."""
    blocks = set()
    is_hybrid = False
    for name in names:
        blocks.add(name.split(".")[0])
        is_hybrid = is_hybrid or _HYBRID_NORM in name
    if {"encoder", "decoder"} <= blocks:
        return "lm_head.output_layer", "output_layer"
    if "encoder" in blocks or is_hybrid:
        return ("output_layer",)
    return ()


def _separates(argument: Any) -> bool:
    """True if the value of an argument of `_SEPARATE` is one of layers with separate keys."""
    if isinstance(argument, int):
        return argument > 1 or argument is True
    return bool(argument)


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
