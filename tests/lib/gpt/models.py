"""Models that the matrix has none of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from .gpt import Case
from .topologies import Topology, model_config
from .variants import unchanged

CASE = Case(num_layers=2, hidden=24, heads=3, ffn=40, vocab=53, seq=8, batch=1, bias=False)

ALONE = Topology("alone")

BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


# Models. Each is called like a GPTModel and returns the losses of the tokens.


def gpt(config: Any, tied: bool) -> GPTModel:
    spec = get_gpt_layer_local_spec(config.num_moe_experts, moe_grouped_gemm=False)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, False)
        # Core sizes it by the first model of a process, which may have fewer prediction layers.
        MTPLossLoggingHelper.tracker.clear()
    return GPTModel(
        config,
        spec,
        vocab_size=CASE.vocab,
        max_sequence_length=CASE.seq,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )


class TwoTowers(MegatronModule):
    """A tower of its own width whose output is added to what the text tower embeds. The tower
    reads a fixed table of features; the embedding is called from outside its model."""

    def __init__(self, recompute: Mapping[str, Any], tied: bool) -> None:
        config = model_config(ALONE, CASE, **recompute)
        super().__init__(config)
        self.text = gpt(config, tied)
        self.model_type, self.set_input_tensor = self.text.model_type, self.text.set_input_tensor
        self.share_embeddings_and_output_weights = tied
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 28}
        tower = model_config(ALONE, CASE, **{**recompute, **sizes})
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


def freeze_part(model: nn.Module) -> None:
    """The tower of its own where there is one, else the first layer; and the embedding, whose
    output then needs a gradient, as users of core have it: core's checkpoints are reentrant, and
    without an input that needs one they give none to the weights inside."""
    text = model.text if hasattr(model, "text") else model
    if hasattr(model, "vision"):
        part = model.vision
    else:
        part = text.decoder.layers[0]
    for module in (part, text.embedding.word_embeddings):
        module.requires_grad_(False)
    text.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())


def varied(
    make: Callable[[], nn.Module], seed: int, change: Callable[[nn.Module], None] = unchanged
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


SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden": 24, "heads": 3, "ffn": 40, "vocab": 53, "seq": 8, "batch": 1,
    "bias": False, "tied": False, "swiglu": False, "positions": "rope",
}  # fmt: skip


def towers(case: Case, device: torch.device, recompute: Any, tied: bool, change: Any) -> nn.Module:
    return varied(lambda: TwoTowers(recompute, tied), case.seed, change)
