"""Mixtures of experts, shared out over two ranks: kinds of layers, dispatchers, trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.lib.gpt.gpt import Case, Trainer, make_trainer
from tests.lib.gpu.runs import NONE, Fields

EXPERTS = 4
EP = 2
DISPATCHERS: Mapping[str, Fields] = {
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "alltoall beside shared experts": {
        "moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": True,
        "moe_shared_expert_intermediate_size": 96,
    },
    "alltoall, fused operations": {
        "moe_token_dispatcher_type": "alltoall", "use_transformer_engine_op_fuser": True,
        "gradient_accumulation_fusion": True,
    },
    "alltoall, overlapped": {
        "moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": True,
        "moe_shared_expert_intermediate_size": 96,
    },
    "alltoall, overlapped, weight gradients later": {
        "moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": True, "gradient_accumulation_fusion": True,
    },
    "alltoall, overlapped, latent": {
        "moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": True, "moe_latent_size": 64,
        "moe_shared_expert_intermediate_size": 96,
    },
    "DeepEP": {
        "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep",
        "moe_router_dtype": "fp32",
    },
    "HybridEP": {
        "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep",
        "moe_router_dtype": "fp32",
    },
}  # fmt: skip
"""Fields of the model's config; the last two need the package deep_ep, fused operations a core and
a Transformer Engine that have them."""
OVERLAPS = "overlap_moe_expert_parallel_comm"
ORDER_ONLY = (
    OVERLAPS,
    "delay_wgrad_compute",
    "gradient_accumulation_fusion",
)
"""Fields that change when things are computed, and not what: the reference goes without."""
CASE = Case(
    num_layers=2, hidden=128, heads=4, ffn=192, vocab=256, seq=64, batch=2, swiglu=True, bias=False
)


@dataclass(frozen=True)
class Kind:
    """How experts are computed, and how far a run may be from the reference's.

    first: relative, of loss and norm of the first step, which starts from equal weights: only the
    order of sums differs. later: of the others. moved: of a weight tensor, as a part of how far
    Adam can have moved it (lr an element and step). These are wide, since one flipped rounding can
    send a token to another expert.
    """

    grouped: bool
    bf16: bool
    first: float
    later: float
    moved: float


KINDS: Mapping[str, Kind] = {
    "SequentialMLP, fp32": Kind(grouped=False, bf16=False, first=2e-6, later=1e-4, moved=5e-3),
    "TEGroupedMLP, bf16": Kind(grouped=True, bf16=True, first=2e-5, later=2e-3, moved=0.1),
}


def init_experts(expert_parallel: int = EP) -> torch.device:
    """Groups with experts over so many ranks, once in a process; CPU mode without a GPU."""
    on_gpu = torch.cuda.is_available()
    patches.install(FUSED_WGRAD)
    if not on_gpu:
        cpu_mode.enable_cpu_mode()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_parallel)
    if on_gpu:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _config(case: Case, kind: Kind, chosen: Fields) -> TransformerConfig:
    return TransformerConfig(
        num_layers=case.num_layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        ffn_hidden_size=case.ffn,
        gated_linear_unit=case.swiglu,
        add_bias_linear=case.bias,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=case.bf16,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=case.ffn,
        moe_aux_loss_coeff=0.01,
        moe_grouped_gemm=kind.grouped,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        **chosen,
    )


REFERENCE = {
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "bucket_size": None,
}
"""Fields of stock DDP's config."""


def trainer_of(
    kind: Kind,
    fields: Fields,
    strategy: str | None,
    device: torch.device,
    ddp: Fields = NONE,
    case: Case | None = None,
) -> Trainer:
    """Of the same weights each time, from the seed of the case, by default of `CASE`, and the place
    among the expert ranks. `fields`: of the model's config."""
    case = (CASE if case is None else case).but(bf16=kind.bf16)
    torch.manual_seed(case.seed)
    model_parallel_cuda_manual_seed(case.seed)
    if kind.grouped:
        spec_of = get_gpt_layer_with_transformer_engine_spec
    else:
        spec_of = get_gpt_layer_local_spec
    if strategy is None and OVERLAPS in fields:
        fields = {name: value for name, value in fields.items() if name not in ORDER_ONLY}
    config = _config(case, kind, fields)
    model: Any = GPTModel(
        config,
        spec_of(num_experts=EXPERTS, moe_grouped_gemm=kind.grouped),
        vocab_size=case.vocab,
        max_sequence_length=case.seq,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.positions,
    ).to(device)
    model = Float16Module(config, model) if case.bf16 else model
    if strategy is not None:
        return make_trainer(model, case, strategy, ddp)
    whole = {"use_distributed_optimizer": False, "overlap_param_gather": False}
    return make_trainer(model, case, None, REFERENCE, whole)
