"""What parameters are called in a checkpoint: as in the whole model, on every rank.

The modules of one rank count from zero: the layers of its pipeline stage and model chunk, the
experts of its expert-parallel rank. Checkpoints count over all of them, so that any split of the
model can read what any other wrote. The modules know their own numbers: `layer_number` of a layer
(from one, over all stages and chunks), `local_expert_indices` of a mixture-of-experts layer.
Working them out anew from the sizes of the process groups was rejected: it has to repeat how core
distributes layers, which has options of its own.

Grammar of the keys, joined by dots; NAME is a parameter's name in the whole model
(`decoder.layers.3.mlp.linear_fc2.weight`), DEEP is "module.module.", and once more "module." where
a Float16Module is between (that is, unless the model computes in fp32):

    model.module.NAME[HALF]                        main weight, or a persistent buffer
    model.module.NAME.fp8_scaling                  what delayed scaling knows of NAME's product
    optimizer.state.DEEP NAME[HALF].exp_avg        and exp_avg_sq, step: what the optimizer keeps
    optimizer.param_to_group_meta.DEEP NAME.lr     and the other options of its parameter group

HALF is one of `HALVES` for the first linear layer of a gated MLP, and what an adapter adds to its
output, and nothing for anything else.
That weight is its gate half over its linear half on *each* tensor-parallel rank, so that the
pieces of all ranks one after the other are another tensor for every tensor-parallel size; each
half by itself is not. Everything else that tensor parallelism splits (fused QKV, vocabulary, heads)
is a plain cut of one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

HALVES = ("_w", "_v")
"""Suffixes of the gate half and the linear half of a gated MLP's first linear layer."""

MODEL, OPTIMIZER_STATE, OPTIMIZER_META = "model", "optimizer.state", "optimizer.param_to_group_meta"

EXTRA_STATE = "_extra_state"
"""End of the keys of what Transformer Engine's modules pickle, which a checkpoint leaves out, as
Megatron's format does. What a resume needs of it is stored as tensors, under `FP8_SCALING`."""

FP8_SCALING = ".fp8_scaling"
"""End of the keys of scales and histories of FP8's delayed scaling (`quantized/scaling.py`). Other
programs' checkpoints do not have them, and a model has no use for them with another recipe: a load
goes without."""

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"

_LAYER = re.compile(r"(?:.+\.)?layers\.\d+")
_NUMBERED = re.compile(r"(weight|bias)(\d+)")
_GATED_INSIDE = re.compile(r"(?<=\.linear_fc1)\.(to_wrap|adapter\.linear_out)$")
"""In a linear layer with an adapter (LoRA), as Megatron-Bridge makes them: the layer itself, and
what is added to its output, which is cut as that is."""
_INTERLEAVED = ("MambaMixer", "GatedDeltaNet")


@dataclass(frozen=True)
class GlobalNames:
    """From the names in one rank's module tree to those in the whole model.

    Both without the "module." that wrappers put in front. renumbered: dotted path of a module or
    parameter -> what its last word is in the whole model; alias: a name -> the other name under
    which the whole model has the same parameter; gated: paths of modules whose weights and biases
    are two halves; interleaved: paths of modules whose tensor-parallel pieces do not join into
    one tensor.
    """

    renumbered: Mapping[str, str] = field(default_factory=dict)
    alias: Mapping[str, str] = field(default_factory=dict)
    gated: frozenset[str] = frozenset()
    interleaved: frozenset[str] = frozenset()

    def of(self, name: str) -> str:
        """The global name of `name`; leading "module."s stay."""
        depth, local = split_depth(name)
        local = self.alias.get(local, local)
        words = local.split(".")
        paths = (".".join(words[: i + 1]) for i in range(len(words)))
        return depth + ".".join(
            self.renumbered.get(path, word) for path, word in zip(paths, words, strict=True)
        )

    def suffixes(self, name: str) -> tuple[str, ...]:
        """`HALVES` for a parameter that is saved as two halves, else one empty suffix."""
        owner, _, last = split_depth(name)[1].rpartition(".")
        halved = owner in self.gated and re.fullmatch(r"(weight|bias)\d*", last)
        return HALVES if halved else ("",)

    def keys(self, name: str) -> tuple[str, ...]:
        """Under what `name` is saved, without the names of the dicts around it."""
        return tuple(self.of(name) + suffix for suffix in self.suffixes(name))

    def is_interleaved(self, name: str) -> bool:
        """Whether a split of `name` over tensor-parallel ranks cannot be told to a checkpoint."""
        return any(split_depth(name)[1].startswith(f"{path}.") for path in self.interleaved)


def split_depth(name: str) -> tuple[str, str]:
    """The leading "module."s of a name, and the rest."""
    local = name
    while local.startswith("module."):
        local = local.removeprefix("module.")
    return name[: len(name) - len(local)], local


def global_names(module: nn.Module) -> GlobalNames:
    """The names of everything in `module`: a model chunk, wrapped or not. No collective.

    Raises ValueError if two parameters would be saved under one key.
    """
    tree = {
        split_depth(f"{name}.")[1].rstrip("."): child
        for name, child in module.named_modules(remove_duplicate=False)
    }
    names = GlobalNames(
        renumbered=dict(_renumbered(tree)),
        alias=dict(_aliases(module)),
        gated=frozenset(path for path, child in tree.items() if _is_gated(path, child, tree)),
        interleaved=frozenset(p for p, c in tree.items() if type(c).__name__ in _INTERLEAVED),
    )
    _check_unique(names, (name for name, _ in module.named_parameters()))
    return names


def _renumbered(tree: Mapping[str, nn.Module]) -> Iterable[tuple[str, str]]:
    for path, child in tree.items():
        number = getattr(child, "layer_number", None)
        if _LAYER.fullmatch(path) and isinstance(number, int):
            yield path, str(number - 1)
        indices = getattr(child, "local_expert_indices", None)
        if indices is not None:
            yield from _experts(f"{path}.experts", tree, list(indices))


def _experts(
    path: str, tree: Mapping[str, nn.Module], indices: list[int]
) -> Iterable[tuple[str, str]]:
    """Of one module per expert, and of modules that hold all experts' weights under numbers."""
    for local, number in enumerate(indices):
        if f"{path}.local_experts.{local}" in tree:
            yield f"{path}.local_experts.{local}", str(number)
    for owner, child in tree.items():
        if not owner.startswith(f"{path}.") or owner.startswith(f"{path}.local_experts."):
            continue
        for name in child._parameters:
            numbered = _NUMBERED.fullmatch(name)
            if numbered and int(numbered[2]) < len(indices):
                yield f"{owner}.{name}", f"{numbered[1]}{indices[int(numbered[2])]}"


def _aliases(module: nn.Module) -> Iterable[tuple[str, str]]:
    """The last pipeline stage's copy of a tied embedding, which the whole model has once."""
    params: dict[str, Any] = {split_depth(n)[1]: p for n, p in module.named_parameters()}
    for name, param in params.items():
        if not getattr(param, "shared_embedding", False) or not name.endswith(OUTPUT_LAYER):
            continue
        embedding = name.removesuffix(OUTPUT_LAYER) + WORD_EMBEDDINGS
        if embedding not in params:
            yield name, embedding


def _is_gated(path: str, child: nn.Module, tree: Mapping[str, nn.Module]) -> bool:
    owner, _, last = _GATED_INSIDE.sub("", path).rpartition(".")
    config = getattr(tree.get(owner), "config", None)
    return last == "linear_fc1" and bool(getattr(config, "gated_linear_unit", False))


def _check_unique(names: GlobalNames, local: Iterable[str]) -> None:
    owners: dict[str, str] = {}
    for name in local:
        for key in names.keys(name):
            other = owners.setdefault(key, name)
            if other != name:
                raise ValueError(
                    f"parameters {other} and {name} would both be saved as {key}: layer_number and "
                    "local_expert_indices of the modules above must count over the whole model"
                )
