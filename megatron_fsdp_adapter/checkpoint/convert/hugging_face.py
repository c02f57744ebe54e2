"""Hugging Face weights of the Llama and Mixtral families: names, splits and concatenations.

    embedding.word_embeddings.weight         model.embed_tokens.weight
    decoder.final_layernorm.weight           model.norm.weight
    output_layer.weight                      lm_head.weight           none if tied
    decoder.layers.N.                        model.layers.N.
      input_layernorm.weight                   input_layernorm.weight
      pre_mlp_layernorm.weight                 post_attention_layernorm.weight
      self_attention.linear_qkv.weight         self_attn.{q,k,v}_proj.weight
      self_attention.linear_proj.weight        self_attn.o_proj.weight
      mlp.linear_fc1.weight                    mlp.{gate,up}_proj.weight
      mlp.linear_fc2.weight                    mlp.down_proj.weight
      mlp.router.weight                        block_sparse_moe.gate.weight
      mlp.experts.E.linear_fc1.weight          block_sparse_moe.experts.E.{w1,w3}.weight
      mlp.experts.E.linear_fc2.weight          block_sparse_moe.experts.E.w2.weight

Fused QKV has, for each group of query heads that share a key and a value, the rows of those query
heads, of the key, and of the value. Rotary embeddings use the same order of a head's halves in
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron_fsdp_adapter.checkpoint.convert import architecture
from megatron_fsdp_adapter.checkpoint.convert.architecture import Architecture
from megatron_fsdp_adapter.checkpoint.convert.lazy import (
    LazyTensor,
    blocks,
    concat,
    narrow,
    zero_rows,
)
from megatron_fsdp_adapter.checkpoint.convert.safetensors_files import read_json, read_tensors
from megatron_fsdp_adapter.checkpoint.convert.training_state import NameStyle, TrainingState

CONFIG = "config.json"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

_TOP = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
}
_QKV = "self_attention.linear_qkv.weight"
_QKV_PARTS = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
_DENSE: Mapping[str, tuple[str, ...]] = {
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_ROUTER: Mapping[str, tuple[str, ...]] = {"mlp.router.weight": ("block_sparse_moe.gate.weight",)}
_EXPERT: Mapping[str, tuple[str, ...]] = {
    "mlp.experts.{}.linear_fc1.weight": (
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
    ),
    "mlp.experts.{}.linear_fc2.weight": ("block_sparse_moe.experts.{}.w2.weight",),
}
_COMPARED_BYTES = 2**20
_COMPUTED = "rotary_emb.inv_freq"
"""Suffix of buffers that old files contain."""


def read(
    folder: Path,
    style: NameStyle,
    padded_vocab: int | None,
    vocab_multiple: int,
    params_dtype: torch.dtype | None,
) -> TrainingState:
    """The weights of a folder with config.json and safetensors, as iteration 0.

    style: of the Megatron model; padded_vocab: rows of its embedding (None: the next multiple of
    vocab_multiple), padded with zeros; params_dtype: compute dtype of the model (None: the files'
    dtype). Raises FileNotFoundError or ValueError for missing, damaged, unexpected or mis-shaped
    input.
    """
    model = architecture.from_config(read_json(folder / CONFIG))
    tensors = read_tensors(folder)
    parts = dict(_pieces(model))
    spare = tensors.pop(_TOP[OUTPUT], None) if model.tied else None
    _check_names(tensors, {name for names in parts.values() for name in names}, folder)
    _check_shapes(tensors, model, folder)
    if spare is not None and not _same_values(spare, tensors[_TOP[EMBEDDING]]):
        raise ValueError(
            f"tie_word_embeddings=True: {folder} has a {_TOP[OUTPUT]} of other values than "
            f"{_TOP[EMBEDDING]}. Set it to false in {CONFIG} or take the tensor out, as the model "
            "was trained"
        )
    rows = padded_vocab or -(-model.vocab // vocab_multiple) * vocab_multiple
    if rows < model.vocab:
        raise ValueError(f"padded_vocab_size={rows} is less than vocab_size={model.vocab}")
    weights = {
        name: _fuse(model, [tensors[n] for n in names]) if name.endswith(_QKV) else
        concat([tensors[n] for n in names])
        for name, names in parts.items()
    }  # fmt: skip
    for name in {EMBEDDING, OUTPUT} & set(weights):
        if rows > model.vocab:
            padding = zero_rows(rows - model.vocab, weights[name])
            weights[name] = concat([weights[name], padding])
    dtype = params_dtype or weights[EMBEDDING].dtype
    args = architecture.to_arguments(model, style, dtype, rows)
    rest = {"args": args, "iteration": 0, "checkpoint_version": 3.0}
    return TrainingState(0, weights, rest=rest, params_dtype=dtype, style=style)


def weights_for(
    state: TrainingState, model: Architecture, vocab: int | None
) -> dict[str, LazyTensor]:
    """The tensors of a Hugging Face model, by Hugging Face names.

    vocab: rows of the embedding to keep (None: all, padding too). Raises ValueError if the state
    has other weights than the architecture, or of other shapes.
    """
    parts = dict(_pieces(model))
    _check_names(state.weights, set(parts), "the checkpoint")
    weights = dict(state.weights)
    if vocab is not None:
        for name in {EMBEDDING, OUTPUT} & set(weights):
            weights[name] = narrow(weights[name], 0, vocab)
        model = replace(model, vocab=vocab)
    found: dict[str, LazyTensor] = {}
    for name, names in parts.items():
        if name.endswith(_QKV):
            pieces = _unfuse(model, name, weights[name])
        else:
            rows = weights[name].shape[0] // len(names)
            pieces = [narrow(weights[name], i * rows, rows) for i in range(len(names))]
        found.update(zip(names, pieces, strict=True))
    _check_shapes(found, model, "the checkpoint")
    return found


def _pieces(model: Architecture) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Common name -> the names of the Hugging Face tensors that form the weight."""
    for ours, theirs in _TOP.items():
        if not (model.tied and ours == OUTPUT):
            yield ours, (theirs,)
    inside: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in _LAYER.items()}
    inside[_QKV] = _QKV_PARTS
    inside.update(_ROUTER if model.experts else _DENSE)
    for e in range(model.experts):
        for ours, names in _EXPERT.items():
            inside[ours.format(e)] = tuple(name.format(e) for name in names)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        for ours, names in inside.items():
            yield f"decoder.layers.{layer}.{ours}", tuple(prefix + name for name in names)


def _shapes(model: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Suffix of the Hugging Face name -> shape."""
    hidden, query = model.hidden, model.heads * model.head_dim
    key = model.query_groups * model.head_dim
    yield from ((_TOP[name], (model.vocab, hidden)) for name in (EMBEDDING, OUTPUT))
    yield from zip(_QKV_PARTS, ((query, hidden), (key, hidden), (key, hidden)), strict=True)
    yield "self_attn.o_proj.weight", (hidden, query)
    yield "norm.weight", (hidden,)
    yield "block_sparse_moe.gate.weight", (model.experts, hidden)
    for up in ("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight"):
        yield up, (model.ffn, hidden)
    for down in ("down_proj.weight", "w2.weight"):
        yield down, (hidden, model.ffn)


def _group_rows(model: Architecture) -> tuple[int, int, int]:
    """Rows of query, key and value in one group."""
    return model.heads // model.query_groups * model.head_dim, model.head_dim, model.head_dim


def _fuse(model: Architecture, parts: list[LazyTensor]) -> LazyTensor:
    return concat(
        [
            narrow(part, group * rows, rows)
            for group in range(model.query_groups)
            for part, rows in zip(parts, _group_rows(model), strict=True)
        ]
    )


def _unfuse(model: Architecture, name: str, fused: LazyTensor) -> list[LazyTensor]:
    sizes = _group_rows(model)
    needed = model.query_groups * sum(sizes)
    if fused.shape[0] != needed:
        raise ValueError(
            f"{name} has {fused.shape[0]} rows, but {model.heads} heads of {model.head_dim} in "
            f"{model.query_groups} groups need {needed}"
        )
    starts = (0, sizes[0], sizes[0] + sizes[1])
    return [
        concat(
            [narrow(fused, g * sum(sizes) + start, rows) for g in range(model.query_groups)]
        )
        for start, rows in zip(starts, sizes, strict=True)
    ]


def _same_values(a: LazyTensor, b: LazyTensor) -> bool:
    """True if two tensors are equal. One block of each is in memory at a time."""
    return a.shape == b.shape and a.dtype == b.dtype and all(
        torch.equal(a.block(box), b.block(box))
        for box in blocks(a.shape, a.dtype.itemsize, _COMPARED_BYTES)
    )


def _check_names(found: Mapping[str, LazyTensor], wanted: set[str], where: object) -> None:
    missing = sorted(wanted - set(found))
    extra = sorted(name for name in set(found) - wanted if not name.endswith(_COMPUTED))
    if missing or extra:
        kinds = (("missing", missing), ("without a counterpart", extra))
        lines = [f"\n  {kind} ({len(n)}): {', '.join(n[:8])}" for kind, n in kinds if n]
        raise ValueError(f"the weights of {where} are not those of its config:{''.join(lines)}")


def _check_shapes(found: Mapping[str, LazyTensor], model: Architecture, where: object) -> None:
    wrong = [
        f"  {name}: {tensor.shape}, not {shape}"
        for end, shape in _shapes(model)
        for name, tensor in found.items()
        if name.endswith(end) and tensor.shape != shape
    ]
    if wrong:
        raise ValueError(f"shapes in {where} are not those of its config:\n" + "\n".join(wrong[:8]))
