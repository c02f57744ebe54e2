"""`optimizer` `muon`: which weights Muon updates, and of which matrices each of them is made.

`emerging.py` makes core create one optimizer for Muon's and Adam's weights. Its shards update the
groups that are marked as Muon's (`optim/muon/shards.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...core.engine.params import ParamPair
from ...optim.local_shards import UpdateRule
from ...optim.muon.exchange import exchange_groups
from ...optim.muon.matrices import row_blocks
from ...optim.muon.newton_schulz import EPS, coefficients_of
from ...optim.muon.shards import MuonOptions, tensor_split
from ...optim.muon.shards import muon as muon_rule
from ...optim.state import GroupOptions
from ..inner_module import ModelChunks
from ..options.rules import is_on
from ..options.support import HALF, SCALES

EMBEDDINGS = ("Embedding", "VocabParallelEmbedding")
ROUTERS = ("Router",)
"""Classes, by name, whose weights Adam updates."""
ADAMS_MARKS = ("is_embedding_or_output_parameter", "is_embedding_parameter", "shared_embedding")
"""Core's marks of weights that Adam updates: embeddings, their copies on other stages, output."""


# Which weights, and of which matrices they are made.


def updates(pair: ParamPair) -> bool:
    """True if Muon updates a weight, and not Adam. Nothing else decides this.

    Muon's are trained matrices of more than one row and more than one column, except embeddings,
    output layers, routers, and weights with an attribute `use_muon` that is False."""
    raw = pair.unsharded
    if not pair.group.key.requires_grad or not getattr(raw, "use_muon", True):
        return False
    shape = pair.spec.layout_shape
    if len(shape) != 2 or min(shape) <= 1:
        return False
    if any(is_on(raw, mark) for mark in ADAMS_MARKS):
        return False
    owner, _ = pair.managed.slots[0]
    kinds = {cls.__name__ for cls in type(owner).__mro__}
    if not kinds.isdisjoint((*EMBEDDINGS, *ROUTERS)):
        return False
    return "output_layer" not in pair.managed.fqns[0].split(".")


def heights(module: nn.Module, split_qkv: bool, pair: ParamPair) -> tuple[int, ...]:
    """The heights of the matrices that a parameter of `module` consists of (`MuonParam.heights`).

    They repeat until all rows are covered. They follow from the name of a fused layer in core, and
    from the config of the module around it. A weight that is not fused is one matrix. ValueError if
    the rows are not such a repetition."""
    shape = pair.spec.layout_shape
    fqn = pair.managed.fqns[0]
    names = fqn.split(".")
    rows, _ = _whole_shape(pair)
    found: tuple[int, ...] = (rows,)
    if len(names) > 2:
        layer = names[-2]
        config = _config_around(module, names[:-2])
        if layer == "linear_fc1" and is_on(config, "gated_linear_unit"):
            found = (shape[0] // 2,) * 2  # gate and up, of each tensor-parallel rank
        elif split_qkv and layer in FUSED:
            found = FUSED[layer](config)
    try:
        row_blocks(rows, found)
    except ValueError as error:
        raise ValueError(
            f"Muon: {fqn} of {rows} rows looks like a fused weight, but has an "
            f"unknown shape: {error}. Mark it with use_muon=False, or set muon_split_qkv to False"
        ) from None
    return found


def _config_around(module: nn.Module, path: Sequence[str]) -> Any:
    """The config of the module at `path` inside `module`, or of the nearest one around it that has
    a config."""
    found = getattr(module, "config", None)
    child = module
    for name in path:
        child = getattr(child, name)
        found = getattr(child, "config", found)
    return found


def _qkv(config: Any) -> tuple[int, ...]:
    """The numbers of rows in one group of queries: queries, their gates if there are any, keys,
    values."""
    queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
    keys_and_values = (config.kv_channels, config.kv_channels)
    if is_on(config, "attention_output_gate"):
        return (queries, queries, *keys_and_values)
    return (queries, *keys_and_values)


FUSED: Mapping[str, Callable[[Any], tuple[int, ...]]] = {
    "linear_qkv": _qkv,
    "linear_kv": attrgetter("kv_channels", "kv_channels"),
    "linear_kv_up_proj": attrgetter("qk_head_dim", "v_head_dim"),
    "linear_kv_down_proj": attrgetter("kv_lora_rank", "qk_pos_emb_head_dim"),
    "linear_qkv_down_proj": attrgetter("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"),
}
"""Fused layer of attention -> the heights of its matrices, from the config. The layers are those
of grouped and gated attention, of cross attention, and of latent attention, whose keys have a
separate part for positions."""


# Core's optimizer.


def rule_of(
    chunks: ModelChunks, config: Any, has_mark: Callable[[GroupOptions], bool]
) -> UpdateRule:
    """The update rule of an optimizer whose marked groups Muon updates."""
    model_of = {id(p.sharded): chunk.module.module for chunk in chunks for p in chunk.engine.pairs}
    options = _options(config)
    made = {}
    for chunk in chunks:
        made.update(chunk.muon_groups)

    def options_of(group: GroupOptions) -> MuonOptions | None:
        return options if has_mark(group) else None

    def heights_of(pair: ParamPair) -> tuple[int, ...]:
        return heights(model_of[id(pair.sharded)], config.muon_split_qkv, pair)

    return muon_rule([chunk.engine for chunk in chunks], made, options_of, heights_of)


def make_groups(chunks: ModelChunks) -> None:
    """Makes the process groups of Muon's exchanges, once for these chunks.

    Collective over the default group. Every rank calls it: core asks for parameter groups on every
    rank, and for those of experts too."""
    if any(chunk.muon_groups is None for chunk in chunks):
        made = exchange_groups([chunk.engine for chunk in chunks])
        for chunk in chunks:
            chunk.muon_groups = made


def _options(config: Any) -> MuonOptions:
    # Before 0.18 the field was named `muon_use_nesterov`. Before 0.17 there was only one set of
    # coefficients.
    nesterov = getattr(config, "muon_nesterov", getattr(config, "muon_use_nesterov", False))
    coefficients = getattr(config, "muon_coefficient_type", "quintic")
    factor = config.muon_extra_scale_factor
    scale = SCALES[config.muon_scale_mode]
    return MuonOptions(
        momentum=config.muon_momentum,
        nesterov=nesterov,
        coefficients=coefficients_of(coefficients, config.muon_num_ns_steps),
        eps=EPS,
        scale=lambda rows, columns: factor * scale(rows, columns),
        dtype=torch.bfloat16 if config.muon_fp32_matmul_prec == HALF else torch.float32,
    )


def summary(chunks: ModelChunks, config: Any) -> str:
    """A table of the trained weights: the matrices of Muon's weights, and which are Adam's. Weights
    of the same name in several layers or experts share a row."""
    rows: Counter[tuple[str, str]] = Counter()
    for chunk in chunks:
        for pair in chunk.engine.pairs:
            if not pair.group.key.requires_grad:
                continue
            name = pair.managed.fqns[0].removeprefix("module.")
            name = re.sub(r"\.\d+\.", ".*.", name)
            name = re.sub(r"weight\d+$", "weight*", name)
            rows[name, _described(chunk, pair, config)] += 1
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}}  {count:5}  {text}" for (name, text), count in rows.items()]
    return "\n".join(lines)


def _described(chunk: Any, pair: ParamPair, config: Any) -> str:
    if not updates(pair):
        return "Adam"
    parts = heights(chunk.module.module, config.muon_split_qkv, pair)
    rows, columns = _whole_shape(pair)
    times = rows // sum(parts)  # `parts` repeat until all rows are covered
    return "Muon: " + ", ".join(f"{times * height} x {columns}" for height in parts)


def _whole_shape(pair: ParamPair) -> tuple[int, int]:
    """The shape of a matrix before tensor parallelism splits it."""
    shape = list(pair.spec.layout_shape)
    split, parts = tensor_split(pair)
    if split is not None:
        shape[split] *= parts
    return shape[0], shape[1]
