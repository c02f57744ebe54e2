"""Small checkpoints for the tests of the converters, written by torch's own DCP.

Nothing here is shared with the converters: names, splits and folders are spelled out again.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.lib.checkpoint.checkpoint_cases import same


class Evil:
    """Calls a function when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._called = call, arguments

    def __reduce__(self) -> Any:
        return self._called


HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCAB = 16, 4, 2, 4, 12, 24


@dataclass(frozen=True)
class Model:
    """Which modules a model has. experts: 0 for a dense one; dense_layers: how many layers in
    front have an MLP all the same."""

    layers: int = 2
    experts: int = 0
    dense_layers: int = 0
    te: bool = False
    grouped: bool = False
    tied: bool = False
    swiglu: bool = True
    bf16: bool = True
    fused_adam: bool = False
    expert_parallel: bool = False


MODELS = {
    "dense": Model(),
    "dense, TE, tied, fused Adam": Model(te=True, tied=True, fused_adam=True),
    "dense, fp32, not gated": Model(bf16=False, swiglu=False, layers=3),
    "experts": Model(experts=4),
    "experts, TE, grouped, expert parallel": Model(
        experts=4, te=True, grouped=True, expert_parallel=True, layers=3
    ),
    "experts behind a dense layer": Model(experts=2, dense_layers=1, layers=3),
    "experts behind a dense layer, TE": Model(experts=2, dense_layers=1, te=True, grouped=True),
}


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Parameters by the names that they have in the module, fc1 whole."""
    up = 2 * FFN if model.swiglu else FFN
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    for layer in range(model.layers):
        at = f"decoder.layers.{layer}."
        moe = model.experts and layer >= model.dense_layers
        qkv = "self_attention.linear_qkv."
        if model.te:
            norm = f"{qkv}layer_norm_weight"
        else:
            norm = "input_layernorm.weight"
        found[at + norm] = (HIDDEN,)
        found[f"{at}{qkv}weight"] = ((HEADS + 2 * GROUPS) * HEAD, HIDDEN)
        found[f"{at}self_attention.linear_proj.weight"] = (HIDDEN, HEADS * HEAD)
        fused = model.te and not moe
        if fused:
            norm = "mlp.linear_fc1.layer_norm_weight"
        else:
            norm = "pre_mlp_layernorm.weight"
        found[at + norm] = (HIDDEN,)
        if not moe:
            found[f"{at}mlp.linear_fc1.weight"] = (up, HIDDEN)
            found[f"{at}mlp.linear_fc2.weight"] = (HIDDEN, FFN)
            continue
        found[f"{at}mlp.router.weight"] = (model.experts, HIDDEN)
        for e in range(model.experts):
            if model.grouped:
                pattern = "{}.weight" + str(e)
            else:
                pattern = f"local_experts.{e}." + "{}.weight"
            found[f"{at}mlp.experts.{pattern.format('linear_fc1')}"] = (up, HIDDEN)
            found[f"{at}mlp.experts.{pattern.format('linear_fc2')}"] = (HIDDEN, FFN)
    found["decoder.final_layernorm.weight"] = (HIDDEN,)
    if not model.tied:
        found["output_layer.weight"] = (VOCAB, HIDDEN)
    return found


def arguments(model: Model) -> Namespace:
    """What Megatron-LM saves of its command line, as far as anyone reads it."""
    return Namespace(
        num_layers=model.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        kv_channels=HEAD,
        ffn_hidden_size=FFN,
        padded_vocab_size=VOCAB,
        normalization="RMSNorm",
        position_embedding_type="rope",
        max_position_embeddings=32,
        norm_epsilon=1e-5,
        swiglu=model.swiglu,
        bf16=model.bf16,
        fp16=False,
        world_size=2,
        transformer_impl="transformer_engine" if model.te else "local",
        num_experts=model.experts or None,
        moe_grouped_gemm=model.grouped,
        moe_router_topk=2,
        moe_ffn_hidden_size=FFN if model.experts else None,
        tensor_model_parallel_size=1,
        moe_layer_freq=[int(i >= model.dense_layers) for i in range(model.layers)]
        if model.dense_layers
        else 1,
    )


def halves(name: str, tensor: torch.Tensor, model: Model) -> dict[str, torch.Tensor]:
    """As a gated layer's weight is saved."""
    if not (model.swiglu and "linear_fc1.weight" in name):
        return {name: tensor}
    gate, up = tensor.chunk(2)
    return {f"{name}_w": gate.clone(), f"{name}_v": up.clone()}


def fsdp_state(model: Model, seed: int = 0) -> dict[str, Any]:
    """The nested state of an fsdp_dtensor checkpoint after 3 steps, with random values."""
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    deep = "module.module.module." if model.bf16 else "module.module."
    weights: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, torch.Tensor]] = {}
    meta: dict[str, dict[str, Any]] = {}
    for name, shape in shapes(model).items():
        weights.update({f"module.{k}": v for k, v in halves(name, random(shape), model).items()})
        for kind in ("exp_avg", "exp_avg_sq"):
            for part, value in halves(name, random(shape), model).items():
                state.setdefault(deep + part, {})[kind] = value
                if not model.fused_adam:
                    state[deep + part]["step"] = torch.tensor(3.0)
        meta[deep + name] = _group(model, name, shape)
    for layer in range(model.dense_layers, model.layers if model.experts else 0):
        # A buffer: no optimizer state, and fp32 whatever the model computes in.
        name = f"module.decoder.layers.{layer}.mlp.router.expert_bias"
        weights[name] = random((model.experts,))
    return {
        "args": arguments(model),
        "checkpoint_version": 3.0,
        "iteration": 3,
        "model": weights,
        "optimizer": {"state": state, "param_to_group_meta": meta},
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 12},
        "rng_state": _generators(model),
    }


def _generators(model: Model) -> dict[str, Any]:
    """One list for all data-parallel ranks, or under expert parallelism for each of two."""
    places = ["(0, 0, 0)", "(0, 0, 1)"] if model.expert_parallel else ["(0, 0)"]
    states = {}
    for number, place in enumerate(places):
        one = {
            "torch_rng_state": number + torch.arange(8, dtype=torch.uint8),
            "random_rng_state": (3, (1, 2), None),
        }
        states[place] = [one]
    return states


def _group(model: Model, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    decays = len(shape) > 1
    expert = model.expert_parallel and ".experts." in name
    group = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "wd_mult": float(decays),
        "lr_mult": 1.0,
        "is_expert_parallel": expert,
        "is_decoupled_lr": False,
        "weight_decay": 0.1 * decays,
    }
    return {**group, "step": 3} if model.fused_adam else group


def save_fsdp(root: Path, state: dict[str, Any], iteration: int = 3) -> Path:
    """Writes the state as one process would; returns root."""
    dcp.save(state, checkpoint_id=root / f"iter_{iteration:07d}", no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return root


def load_all(folder: Path) -> dict[str, Any]:
    """Every key of a DCP folder with its value, tensors by torch's own loader."""
    metadata = FileSystemReader(folder).read_metadata()
    loaded = {}
    for key, stored in metadata.state_dict_metadata.items():
        loaded[key] = (
            torch.full(stored.size, 77, dtype=stored.properties.dtype)
            if isinstance(stored, TensorStorageMetadata)
            else None
        )
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    return loaded


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Keys that only one has, or whose values differ in type, dtype, shape or any bit."""
    both = set(a) & set(b)
    return sorted(set(a) ^ set(b)) + sorted(key for key in both if not same(a[key], b[key]))


BRIDGE_FOLDER = "iter_0000003"


def bridge_checkpoint(root: Path, model: Model, told: Any) -> Path:
    state = fsdp_state(model)
    del state["args"]
    save_fsdp(root, state)
    (root / BRIDGE_FOLDER / "run_config.yaml").write_text(yaml.safe_dump(told))
    return root
