"""Names of parameters in a checkpoint: those of the whole model, on every rank.

On one rank modules are numbered from zero: the layers of its pipeline stage and model chunk, the
experts of its expert-parallel rank. Checkpoints number them over the whole model, so that any split
of the model can read a checkpoint of any other. The global numbers come from the modules:
`layer_number` of a layer (from one, over all stages and chunks), `local_expert_indices` of a
mixture-of-experts layer. They are not computed from process group sizes, because core has options
that change the distribution of layers.

Grammar of the keys, joined by dots; NAME is a parameter's name in the whole model
(`decoder.layers.3.mlp.linear_fc2.weight`), DEEP is "module.module.", and once more "module." if
there is a Float16Module (unless the model computes in fp32):

    model.module.NAME[HALF]                        main weight, or a persistent buffer
    model.module.NAME.fp8_scaling                  delayed scaling's state of NAME's GEMM
    optimizer.state.DEEP NAME[HALF].exp_avg        and exp_avg_sq, step: optimizer state
    optimizer.param_to_group_meta.DEEP NAME.lr     and the other options of its parameter group

HALF is one of `HALVES` for the first linear layer of a gated MLP and for its adapter's output
layer, else empty. *Each* tensor-parallel rank stores the gate half over the linear half, so the
concatenation of all ranks' pieces depends on the tensor-parallel size; the concatenation of one
half does not. All other weights that tensor parallelism splits (fused QKV, vocabulary, heads) are
plain cuts of one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

HALVES = ("_w", "_v")
"""Suffixes of the gate half and the linear half of a gated MLP's first linear layer."""

MODEL = "model"
OPTIMIZER_STATE = "optimizer.state"
OPTIMIZER_META = "optimizer.param_to_group_meta"

EXTRA_STATE = "_extra_state"
"""Key suffix of the objects that Transformer Engine's modules pickle. A checkpoint leaves them out,
as Megatron's format does. The part that a resume needs is stored as tensors, under
`FP8_SCALING`."""

FP8_SCALING = ".fp8_scaling"
"""Key suffix of scales and histories of FP8's delayed scaling (`quantized/scaling.py`). Other
programs' checkpoints do not have them, and other recipes do not use them, so a load does not
require them."""

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"

_LAYER = re.compile(r"(?:.+\.)?layers\.\d+")
_NUMBERED = re.compile(r"(weight|bias)(\d+)")
_GATED_INSIDE = re.compile(r"(?<=\.linear_fc1)\.(to_wrap|adapter\.linear_out)$")
"""The layer and the adapter's output layer in Megatron-Bridge's linear layer with an adapter
(LoRA). Both are split alike."""
_INTERLEAVED = ("MambaMixer", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProductMixer")
"""Core's classes, and their subclasses, of which a tensor-parallel rank has a piece of each of
several matrices in one weight. The last two are of 0.20."""


class Renaming(NamedTuple):
    """A part of names that megatron-core renamed: the pattern before it, the newer and the older
    text, and the pattern behind it."""

    before: str
    newer: str
    older: str
    after: str

    def to_older(self, name: str) -> str:
        """`name` with the older text."""
        pattern = rf"({self.before}){re.escape(self.newer)}(?={self.after})"
        return re.sub(pattern, rf"\g<1>{self.older}", name)

    def to_newer(self, name: str) -> str:
        """`name` with the newer text."""
        pattern = rf"({self.before}){re.escape(self.older)}(?={self.after})"
        return re.sub(pattern, rf"\g<1>{self.newer}", name)


RENAMED = (
    Renaming(r"mtp\.layers\.\d+\.", "mtp_model_layer", "transformer_layer", r"\.(?!layers\.)"),
    Renaming(r"\.mixer\.", "conv1d_", "conv1d.", r"(?:weight|bias)"),
)
"""The names that differ between the supported releases. `torch_dist` has the older ones in all of
them."""


@dataclass(frozen=True)
class GlobalNames:
    """Maps names in one rank's module tree to names in the whole model.

    The fields have names and paths in this rank's tree, without the "module." prefixes of wrappers.
    renumbered: dotted path of a module or parameter -> its last word in the whole model; alias:
    name of a parameter -> the name that it is saved under, still in this rank's numbers; gated:
    paths of modules whose weights and biases are two halves; interleaved: paths of modules whose
    tensor-parallel pieces do not join into one tensor.
    """

    renumbered: Mapping[str, str] = field(default_factory=dict)
    alias: Mapping[str, str] = field(default_factory=dict)
    gated: frozenset[str] = frozenset()
    interleaved: frozenset[str] = frozenset()

    def of(self, name: str) -> str:
        """The global name of `name`; leading "module." prefixes stay."""
        depth, local = split_depth(name)
        path = ""
        found = []
        for word in self.alias.get(local, local).split("."):
            path += word
            found.append(self.renumbered.get(path, word))
            path += "."
        return depth + ".".join(found)

    def suffixes(self, name: str) -> tuple[str, ...]:
        """`HALVES` for a parameter that is saved as two halves, else one empty suffix."""
        _, local = split_depth(name)
        owner, _, last = local.rpartition(".")
        if owner in self.gated and re.fullmatch(r"(weight|bias)\d*", last):
            return HALVES
        return ("",)

    def keys(self, name: str) -> tuple[str, ...]:
        """The keys of `name` in a checkpoint, without the keys of the enclosing dicts."""
        whole = self.of(name)
        return tuple(whole + suffix for suffix in self.suffixes(name))

    def is_interleaved(self, name: str) -> bool:
        """True if a checkpoint cannot represent the tensor-parallel split of `name`."""
        _, local = split_depth(name)
        return any(local.startswith(f"{path}.") for path in self.interleaved)


def split_depth(name: str) -> tuple[str, str]:
    """The leading "module." prefixes of a name, and the rest."""
    local = name
    while local.startswith("module."):
        local = local.removeprefix("module.")
    return name[: len(name) - len(local)], local


def global_names(module: nn.Module) -> GlobalNames:
    """The `GlobalNames` of `module`: a model chunk, wrapped or not. No collective.

    Raises ValueError if two parameters would be saved under one key.
    """
    tree = {}
    for name, child in module.named_modules(remove_duplicate=False):
        _, path = split_depth(f"{name}.")
        tree[path.rstrip(".")] = child
    gated = set()
    interleaved = set()
    for path, child in tree.items():
        if _is_gated(path, tree):
            gated.add(path)
        if any(one.__name__ in _INTERLEAVED for one in type(child).__mro__):
            interleaved.add(path)
    names = GlobalNames(
        renumbered=dict(_renumbered(tree)),
        alias=dict(_aliases(module)),
        gated=frozenset(gated),
        interleaved=frozenset(interleaved),
    )
    _check_unique(names, (name for name, _ in module.named_parameters()))
    return names


def _renumbered(tree: Mapping[str, nn.Module]) -> Iterable[tuple[str, str]]:
    # The entries of `GlobalNames.renumbered`.
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
    """The entries of `GlobalNames.renumbered` below `path`, a module of experts: for modules of one
    expert each, and for the numbered parameters of grouped modules.

    indices: number in the whole model of each expert of this rank."""
    for local, number in enumerate(indices):
        expert = f"{path}.local_experts.{local}"
        if expert in tree:
            yield expert, str(number)
    for owner, child in tree.items():
        if not owner.startswith(f"{path}.") or owner.startswith(f"{path}.local_experts."):
            continue
        for name in child._parameters:
            numbered = _NUMBERED.fullmatch(name)
            if numbered is None:
                continue
            local = int(numbered[2])
            if local < len(indices):
                yield f"{owner}.{name}", f"{numbered[1]}{indices[local]}"


def _aliases(module: nn.Module) -> Iterable[tuple[str, str]]:
    """The entries of `GlobalNames.alias`: the last pipeline stage's copy of a tied embedding, and
    the embedding's name."""
    params = {split_depth(name)[1]: param for name, param in module.named_parameters()}
    for name, param in params.items():
        if getattr(param, "shared_embedding", False) and name.endswith(OUTPUT_LAYER):
            embedding = name.removesuffix(OUTPUT_LAYER) + WORD_EMBEDDINGS
            if embedding not in params:
                yield name, embedding


def _is_gated(path: str, tree: Mapping[str, nn.Module]) -> bool:
    owner, _, last = _GATED_INSIDE.sub("", path).rpartition(".")
    if last != "linear_fc1":
        return False
    config = getattr(tree.get(owner), "config", None)
    return bool(getattr(config, "gated_linear_unit", False))


def _check_unique(names: GlobalNames, local: Iterable[str]) -> None:
    owners: dict[str, str] = {}
    for name in local:
        for key in names.keys(name):
            other = owners.setdefault(key, name)
            if other != name:
                raise ValueError(
                    f"parameters {other} and {name} would both be saved as {key}. Set "
                    "layer_number and local_expert_indices of the modules above them so that "
                    "they count over the whole model"
                )
