"""The model of a cell: core's GPT with the cell's layers, cut as its topology says."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from torch import nn

from megatron_fsdp_adapter.tools.models.local_spec import TorchNorm
from tests.lib.gpt.gpt import Case
from tests.lib.gpt.topologies import GatheringAttention, Topology, gpt_chunk, model_config, vary

from .table import WITH_EXPERTS, Cell, has_fp8_weights, recipe_of, uses_te


@dataclass(frozen=True)
class Width:
    """Sizes of a model; `latent`: query and key-value ranks, key, positional and value widths of
    latent attention. `adam_eps` is large beside the gradients, so that updates are nearly
    proportional to them and an error in a gradient is the same error in the update."""

    sizes: Mapping[str, Any]
    latent: tuple[int, int, int, int, int]
    adam_eps: float


WIDTHS: Mapping[str, Width] = {
    # Of each size tensor parallelism leaves something that the data-parallel ranks split unevenly.
    "tiny": Width(
        {"hidden": 24, "heads": 4, "ffn": 44, "vocab": 54, "seq": 8, "batch": 2},
        (10, 12, 8, 4, 8),
        1e-1,
    ),
    # FP8 takes multiples of 16.
    "small": Width(
        {"hidden": 256, "heads": 4, "ffn": 544, "vocab": 1040, "seq": 128, "batch": 2},
        (96, 64, 64, 32, 64),
        1e-2,
    ),
    "real": Width(
        {"hidden": 4096, "heads": 32, "ffn": 14336, "vocab": 32064, "seq": 4096, "batch": 1},
        (1536, 512, 128, 64, 128),
        1e-3,
    ),
}


BLOCKWISE: Mapping[str, Mapping[str, Any]] = {
    "small": {
        "sizes": {**WIDTHS["small"].sizes, "ffn": 768},
        "latent": (128, 128, 64, 128, 128),
    },
    "real": {"latent": (1536, 512, 64, 128, 128)},
}
"""What differs in cells of the blockwise recipe: blocks of 128 divide all widths, also those that
two tensor-parallel ranks split."""


def width_of(cell: Cell, width: str) -> Width:
    """The sizes of a cell's model."""
    if recipe_of(cell["precision"]) == "blockwise":
        more = BLOCKWISE.get(width, {})
    else:
        more = {}
    return replace(WIDTHS[width], **more)


def topology_of(cell: Cell) -> Topology:
    moe = cell["layers"] in WITH_EXPERTS
    # gloo cannot gather pieces of unequal sizes, which alltoall does over expert-tensor groups.
    dispatcher = "allgather" if cell["etp"] != 1 else "alltoall"
    return Topology(
        "of the cell",
        tp=cell["tp"],
        cp=cell["cp"],
        pp=cell["pp"],
        vpp=cell["vpp"] if cell["vpp"] != 1 else None,
        ep=cell["ep"],
        etp=cell["etp"] if moe else None,
        sp=cell["sp"] == "on",
        experts=4 if moe else None,
        dispatcher=dispatcher,
        aligned=cell["vpp"] != 1,
    )  # type: ignore[arg-type]


def case_of(cell: Cell, width: str) -> Case:
    """With biases where core can have them: experts take none on a tensor-parallel axis of their
    own, and a recomputed MLP returns its bias, whose backward then never ends."""
    on_gpu = cell["target"] == "gpu"
    bias = not on_gpu and cell["layers"] in ("local", "mtp") and cell["recompute"] != "mlp"
    chunks: int = cell["pp"] * cell["vpp"]  # type: ignore[assignment, operator]
    return Case(
        num_layers=max(2, chunks) if cell["joined"] == "default" else max(3, 2 * chunks),
        microbatches=cell["microbatches"],
        tied=cell["trained"] == "tied",
        swiglu=on_gpu,
        bias=bias,
        bf16=cell["precision"] == "bf16" or str(cell["precision"]).startswith("fp8"),
        fp16=cell["precision"] == "fp16",
        fused=cell["fusion"] == "on",
        overlap=cell["overlap"] == "on",
        adam_eps=WIDTHS[width].adam_eps,
        **width_of(cell, width).sizes,
    )  # type: ignore[arg-type]


# The config.


def _recompute(cell: Cell) -> dict[str, Any]:
    kind = cell["recompute"]
    if kind == "none":
        return {}
    if kind == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    feed_forward = "moe" if cell["layers"] in WITH_EXPERTS else "mlp"
    modules = {"attention": "core_attn", "mlp": feed_forward}
    return {"recompute_granularity": "selective", "recompute_modules": [modules[str(kind)]]}


def _latent(cell: Cell, width: str) -> dict[str, Any]:
    if cell["layers"] != "mla":
        return {}
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return {"rope_type": "rope", **dict(zip(names, width_of(cell, width).latent, strict=True))}


def _precision(cell: Cell, case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {
        "bf16": case.bf16,
        "fp16": case.fp16,
        "params_dtype": case.dtype,
        "pipeline_dtype": case.dtype,
        "gradient_accumulation_fusion": case.fused,
    }
    if str(cell["precision"]).startswith("fp8"):
        found |= {
            "fp8": "hybrid",
            "fp8_recipe": recipe_of(cell["precision"]),
            "fp8_amax_history_len": 16,
            "fp8_amax_compute_algo": "max",
            "fp8_param": has_fp8_weights(cell["precision"]),
        }
    return found


def config_of(cell: Cell, width: str) -> TransformerConfig:
    case = case_of(cell, width)
    topology = topology_of(cell)
    more: dict[str, Any] = {}
    if cell["graph"] == "on":
        more = {
            "cuda_graph_impl": "local",
            "cuda_graph_scope": [CudaGraphScope.full_iteration],
        }
    if cell["ep_overlap"] == "on":
        more["overlap_moe_expert_parallel_comm"] = True
    if topology.experts:
        more["moe_grouped_gemm"] = cell["layers"] == "te_grouped"
    config = model_config(
        topology,
        case,
        MLATransformerConfig if cell["layers"] == "mla" else TransformerConfig,
        use_cpu_initialization=not torch.cuda.is_available(),
        init_model_with_meta_device=cell["start"] == "meta",
        mtp_num_layers=1 if cell["layers"] == "mtp" else None,
        **_precision(cell, case),
        **_recompute(cell),
        **_latent(cell, width),
        **more,
    )
    if cell["target"] == "gpu" and cell["graph"] == "layers":
        config.cuda_graph_impl = "local"
        config.cuda_graph_warmup_steps = 1
        newer = hasattr(config, "cuda_graph_modules")
        setattr(config, "cuda_graph_modules" if newer else "cuda_graph_scope", [])
    return config


# The layers.


def _layer(cell: Cell, with_experts: bool) -> ModuleSpec:
    """Every second layer of a model with experts has them."""
    kind = cell["layers"]
    options = {
        "num_experts": 4 if with_experts else None,
        "moe_grouped_gemm": kind == "te_grouped",
        "multi_latent_attention": kind == "mla",
    }
    if uses_te(cell["target"], kind):
        return get_gpt_layer_with_transformer_engine_spec(**options)
    spec = get_gpt_layer_local_spec(**options)
    spec.submodules.input_layernorm = TorchNorm
    spec.submodules.pre_mlp_layernorm = TorchNorm
    if kind == "mla" or cell["cp"] != 1:
        spec.submodules.self_attention.submodules.core_attention = GatheringAttention
    return spec


def _norm(cell: Cell) -> Any:
    if not uses_te(cell["target"], cell["layers"]):
        return TorchNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _further_tokens(cell: Cell, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Layers of multi-token prediction, on the stage that has them; None on the others."""
    if cell["layers"] != "mtp":
        return None
    te = uses_te(cell["target"], "mtp")
    block = get_gpt_mtp_block_spec(config, _layer(cell, False), te, vp_stage=vp_stage)
    if block is not None and not te:
        for layer in block.layer_specs:
            for name in ("enorm", "hnorm", "layer_norm"):
                setattr(layer.submodules, name, TorchNorm)
    return block


# What of a model is trained.


class Adapter(nn.Module):
    """A frozen module with a trained bypass of rank 2. Its weights are replicated over
    tensor-parallel ranks; with sequence parallelism core adds up their gradients."""

    def __init__(self, base: nn.Module, config: TransformerConfig) -> None:
        super().__init__()
        self.base = base
        dtype = config.params_dtype
        self.down = nn.Parameter(torch.empty(2, config.hidden_size, dtype=dtype))
        self.up = nn.Parameter(torch.empty(config.hidden_size, 2, dtype=dtype))
        for param in (self.down, self.up):
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if not self.down.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        for param in (self.down, self.up):
            nn.init.normal_(param, std=0.1)

    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        out, bias = self.base(x, **more)
        return out + x @ self.down.t() @ self.up.t(), bias


def _need_gradients(model: Any) -> None:
    """Core's checkpoints are reentrant: without an input that needs a gradient they give none to
    the weights inside. Under a frozen embedding users of core have its output need one."""
    for embedding in _embeddings(model):
        embedding.register_forward_hook(
            lambda module, args, output: output.requires_grad_(torch.is_grad_enabled())
        )


def _embeddings(model: Any) -> list[nn.Module]:
    """The first stage has one, and that of multi-token prediction."""
    return [model.embedding] if hasattr(model, "embedding") else []


def _freeze_part(model: Any) -> None:
    """The embedding, and the attention of each chunk's first layer."""
    for module in [model.decoder.layers[0].self_attention, *_embeddings(model)]:
        for param in module.parameters():
            param.requires_grad_(False)
    _need_gradients(model)


def _adapt(model: Any) -> None:
    """Everything frozen but a bypass of each layer's MLP."""
    for param in model.parameters():
        param.requires_grad_(False)
    for layer in model.decoder.layers:
        device = next(layer.parameters()).device
        with torch.device(device):
            layer.mlp = Adapter(layer.mlp, model.config)
    _need_gradients(model)


CHANGES: Mapping[str, Callable[[Any], None]] = {
    "all": lambda model: None,
    "tied": lambda model: None,
    "frozen": _freeze_part,
    "adapter": _adapt,
}


# A chunk.


def chunk_of(
    cell: Cell, width: str, config: TransformerConfig, chunk: int, device: torch.device
) -> nn.Module:
    """A model chunk whose weights are the same on all ranks that hold the same parameters and
    different on all others; on the meta device without values."""
    case = case_of(cell, width)
    topology = topology_of(cell)
    torch.manual_seed(case.seed)
    graph = cell["target"] == "gpu" and cell["graph"] != "off"
    # Transformer Engine's tracker where that is installed: in captures it accepts no other.
    model_parallel_cuda_manual_seed(
        case.seed,
        te_rng_tracker=graph,
        use_cudagraphable_rng=graph,
        force_reset_rng=torch.cuda.is_available(),
    )
    vp_stage = chunk if topology.vpp else None
    # Without Transformer Engine core takes what stands in for its classes for the classes.
    has_te = isinstance(multi_latent_attention.TELinear, type)
    has = mock.patch.object(multi_latent_attention, "HAVE_TE", has_te)
    with torch.device("meta") if cell["start"] == "meta" else contextlib.nullcontext(), has:
        model: nn.Module = gpt_chunk(
            case,
            config,
            vp_stage,
            functools.partial(_layer, cell),
            _norm(cell),
            mtp_block_spec=_further_tokens(cell, config, vp_stage),
        )
        CHANGES[str(cell["trained"])](model)
    if cell["start"] != "meta":
        model = model.to(device)
        if device.type == "cuda":  # core has changed the current stream in the middle of a model
            torch.cuda.synchronize()
        vary(model, case.seed, chunk)
    if case.bf16 or case.fp16:
        return Float16Module(config, model)
    return model
