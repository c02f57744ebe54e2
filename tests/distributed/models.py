"""Models that the matrix has none of: shared experts, two towers, latent attention of the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from torch import nn

from .gpt import Case

CASE = Case(num_layers=2, hidden=24, heads=3, ffn=40, vocab=53, seq=8, batch=1, bias=False)

RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "full, block": {
        "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1,
    },
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}  # fmt: skip
"""What core recomputes. Norms, activations of experts and MLA's up-projections need Transformer
Engine: tests/gpu/test_gpu_habits.py has norms."""


# Models. Each is called like a GPTModel and returns the losses of the tokens.


def _config(recompute: str, cls: type[TransformerConfig] = TransformerConfig, **more: Any) -> Any:
    options = {
        "num_layers": CASE.num_layers, "hidden_size": CASE.hidden,
        "num_attention_heads": CASE.heads, "ffn_hidden_size": CASE.ffn, "add_bias_linear": False,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_dropout_fusion": False,
        "persist_layer_norm": False, "use_cpu_initialization": True,
    }  # fmt: skip
    return cls(**{**options, **RECOMPUTE[recompute], **more})


def _gpt(config: Any, tied: bool, spec: Any = None) -> GPTModel:
    spec = spec or get_gpt_layer_local_spec(config.num_moe_experts, moe_grouped_gemm=False)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config, spec, vocab_size=CASE.vocab, max_sequence_length=CASE.seq,
        share_embeddings_and_output_weights=tied, position_embedding_type="rope",
        mtp_block_spec=mtp,
    )  # fmt: skip


def shared_experts(recompute: str, tied: bool) -> nn.Module:
    config = _config(
        recompute, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=20,
        moe_shared_expert_intermediate_size=12, moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
    )  # fmt: skip
    return _gpt(config, tied)


class WideKeysAttention(nn.Module):
    """Causal attention whose keys are wider than its values. Core's own has one width for both;
    for latent attention it takes Transformer Engine's."""

    def __init__(self, config: Any, *unused: Any, softmax_scale: float, **more: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *unused: Any, **more: Any) -> torch.Tensor:
        """(sequence, batch, heads, width) three times -> (sequence, batch, heads * width)."""
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def latent_attention(recompute: str, tied: bool) -> nn.Module:
    config = _config(
        recompute, MLATransformerConfig, q_lora_rank=10, kv_lora_rank=12, qk_head_dim=8,
        qk_pos_emb_head_dim=4, v_head_dim=8, rope_type="rope",
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    spec.submodules.self_attention.submodules.core_attention = WideKeysAttention
    # Without Transformer Engine core takes what stands in for its classes for the classes.
    has_te = isinstance(multi_latent_attention.TELinear, type)
    with mock.patch.object(multi_latent_attention, "HAVE_TE", has_te):
        return _gpt(config, tied, spec)


class TwoTowers(MegatronModule):
    """A tower of its own width whose output is added to what the text tower embeds. The tower
    reads a fixed table of features; the embedding is called from outside its model."""

    def __init__(self, recompute: str, tied: bool) -> None:
        config = _config(recompute)
        super().__init__(config)
        self.text = _gpt(config, tied)
        self.model_type, self.set_input_tensor = self.text.model_type, self.text.set_input_tensor
        self.share_embeddings_and_output_weights = tied
        tower = _config(recompute, hidden_size=16, num_attention_heads=2, ffn_hidden_size=28)
        self.vision = TransformerBlock(tower, get_gpt_layer_local_spec())
        self.projector = nn.Linear(16, CASE.hidden)
        self.register_buffer("features", torch.randn(CASE.vocab, 16))

    def forward(self, tokens: Any, positions: Any, mask: Any, labels: Any) -> torch.Tensor:
        seen = self.features[tokens].transpose(0, 1).contiguous()
        seen.requires_grad_(torch.is_grad_enabled())  # see `_need_gradients`
        seen = self.vision(hidden_states=seen, attention_mask=mask)
        hidden = self.text.embedding(input_ids=tokens, position_ids=positions)
        return self.text(
            tokens, positions, mask, decoder_input=hidden + self.projector(seen), labels=labels
        )


# What of a model is trained.


def _layers(model: nn.Module) -> Any:
    return (model.text if hasattr(model, "text") else model).decoder.layers


def _need_gradients(model: nn.Module) -> None:
    """Core's checkpoints are reentrant: without an input that needs a gradient they give none to
    the weights inside. Under a frozen embedding users of core have its output need one."""
    text = model.text if hasattr(model, "text") else model
    text.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())


def train_all(model: nn.Module) -> None:
    pass


def freeze_part(model: nn.Module) -> None:
    """The tower of its own where there is one, else the first layer; and the embedding."""
    part = model.vision if hasattr(model, "vision") else _layers(model)[0]
    for param in part.parameters():
        param.requires_grad_(False)
    for name, param in model.named_parameters():
        if "word_embeddings" in name:
            param.requires_grad_(False)
    _need_gradients(model)


class LowRank(nn.Module):
    """A linear layer with a trained addition of rank 2 to its frozen weight, as LoRA has it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        out, width = base.weight.shape
        self.down = nn.Parameter(torch.randn(2, width) * 0.1)
        self.up = nn.Parameter(torch.randn(out, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> Any:
        out, bias = self.base(x)
        return out + x @ self.down.t() @ self.up.t(), bias


def adapt(model: nn.Module) -> None:
    """Everything frozen but an addition to every layer's attention projection."""
    for param in model.parameters():
        param.requires_grad_(False)
    for layer in _layers(model):
        layer.self_attention.linear_proj = LowRank(layer.self_attention.linear_proj)
    _need_gradients(model)


TRAINED: Mapping[str, tuple[bool, Callable[[nn.Module], None]]] = {
    # whether embedding and output layer are tied, and what is done to the model
    "all": (False, train_all),
    "tied": (True, train_all),
    "frozen part": (False, freeze_part),
    "LoRA": (False, adapt),
    "tied, frozen part": (True, freeze_part),
}


def built(
    make: Callable[[str, bool], nn.Module], recompute: str, trained: str, seed: int
) -> nn.Module:
    """A bare model, of which a key of `TRAINED` is trained."""
    tied, change = TRAINED[trained]
    return varied(lambda: make(recompute, tied), seed, change)


def varied(
    make: Callable[[], nn.Module], seed: int, change: Callable[[nn.Module], None] = train_all
) -> nn.Module:
    """What `make` gives, changed, with other weights: biases of zero hide mistakes."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    model = make()
    change(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return model
