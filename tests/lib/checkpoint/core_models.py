"""Models of every kind that core's layer specs describe, built on the CPU.

Call `te_stand_in.install` first. A row is a model; all of them have few and small layers.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from tests.lib.checkpoint.te_stand_in import with_triton

HYBRID_MODEL = "megatron.core.models.hybrid"
VOCAB = 53
SEQ = 9
Fields = Mapping[str, Any]

BASE: Fields = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    "use_cpu_initialization": True,
}
LOCAL: Fields = {"transformer_impl": "local", "normalization": "LayerNorm"}
TE: Fields = {"transformer_impl": "transformer_engine"}
PLAIN: Fields = {
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
}
MOE: Fields = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_router_load_balancing_type": "none",
}
GROUPED: Fields = {**MOE, "moe_grouped_gemm": True}
SHARED: Fields = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True}
BIAS: Fields = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
MLA: Fields = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}
DELTA: Fields = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
}
SPARSE: Fields = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 4,
}
MAMBA: Fields = {
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 6,
    "mamba_num_heads": 4,
}


@dataclass(frozen=True)
class CoreModel:
    """A model of core. fields: of its config; pattern: the layers of a hybrid model; options: what
    else its class is given; args: arguments of Megatron-LM that the config's fields do not name;
    optimizer: fields of the optimizer's config. hybrid_model: it
    needs a core with `HYBRID_MODEL`."""

    family: str = "gpt"
    fields: Fields = field(default_factory=dict)
    bf16: bool = True
    tied: bool = False
    pattern: str = ""
    options: Fields = field(default_factory=dict)
    args: Fields = field(default_factory=dict)
    optimizer: Fields = field(default_factory=dict)
    hybrid_model: bool = False

    @property
    def missing(self) -> str:
        """What of the row the installed core does not have."""
        known = MLATransformerConfig.__dataclass_fields__
        found = [name for name in self.fields if name not in known]
        if self.hybrid_model and importlib.util.find_spec(HYBRID_MODEL) is None:
            found.append(HYBRID_MODEL)
        return ", ".join(found)

    def config(self) -> TransformerConfig:
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        fields = {**BASE, **self.fields, "bf16": self.bf16, "params_dtype": dtype}
        latent = fields.get("multi_latent_attention")
        kind = MLATransformerConfig if latent else TransformerConfig
        return kind(**fields)

    def saved_arguments(self) -> Namespace:
        """What Megatron-LM saves of its command line."""
        found = {name: value for name, value in {**BASE, **self.fields}.items() if _plain(value)}
        gated = found.pop("gated_linear_unit")
        found["swiglu"] = gated and "activation_func" not in self.fields
        found["quick_geglu"] = gated and not found["swiglu"]
        found["num_experts"] = found.pop("num_moe_experts", None)
        found["bf16"] = self.bf16
        found["fp16"] = False
        if self.pattern:
            found["hybrid_override_pattern"] = self.pattern
        return Namespace(**{"moe_layer_freq": 1, **found, **self.optimizer, **self.args})

    def build(self, seed: int) -> torch.nn.Module:
        """The model, with weights from the seed."""
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        with mock.patch.object(torch.cuda, "current_device", lambda: "cpu"):
            model = _FAMILIES[self.family](self, self.config())
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn_like(param, dtype=torch.float32) * 0.1)
            for buffer in model.buffers():
                if buffer.dtype == torch.float32:
                    buffer.copy_(torch.randn_like(buffer))
        return Float16Module(model.config, model) if self.bf16 else model


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list))


def _gpt(row: CoreModel, config: TransformerConfig) -> torch.nn.Module:
    with_te = config.transformer_impl != "local"
    if getattr(config, "experimental_attention_variant", None):
        specs = importlib.import_module(
            "megatron.core.models.gpt.experimental_attention_variant_module_specs"
        )
        spec = specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    else:
        norm = config.normalization
        spec = get_gpt_decoder_block_spec(config, with_te, normalization=norm)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, with_te)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        share_embeddings_and_output_weights=row.tied,
        mtp_block_spec=mtp,
        **row.options,
    )


def _hybrid(row: CoreModel, config: TransformerConfig) -> torch.nn.Module:
    with with_triton():
        try:
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
            from megatron.core.models.hybrid.hybrid_model import HybridModel as Model
        except ImportError:
            from megatron.core.models.mamba import MambaModel as Model
            from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec

    return Model(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        hybrid_override_pattern=row.pattern,
        share_embeddings_and_output_weights=row.tied,
        **row.options,
    )


def _t5(row: CoreModel, config: TransformerConfig) -> torch.nn.Module:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    encoder = copy.deepcopy(config)
    encoder.num_layers = config.num_layers + 1
    how = "local" if config.transformer_impl == "local" else "transformer_engine"
    specs = []
    for part, layers in (("encoder", encoder.num_layers), ("decoder", config.num_layers)):
        specs.append(getattr(t5_spec, f"get_t5_{part}_with_{how}_block_spec")(layers))
    return T5Model(
        config,
        encoder,
        *specs,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        share_embeddings_and_output_weights=row.tied,
        **row.options,
    )


def _bert(row: CoreModel, config: TransformerConfig) -> torch.nn.Module:
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.bert.bert_model import BertModel

    if config.transformer_impl == "local":
        spec = bert_layer_specs.bert_layer_local_spec
    else:
        spec = bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    return BertModel(
        config,
        num_tokentypes=2,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        share_embeddings_and_output_weights=row.tied,
        **row.options,
    )


_FAMILIES: Mapping[str, Callable[[CoreModel, TransformerConfig], torch.nn.Module]] = {
    "gpt": _gpt,
    "hybrid": _hybrid,
    "t5": _t5,
    "bert": _bert,
}


def _row(*parts: Fields, **more: Any) -> CoreModel:
    fields: dict[str, Any] = {}
    for part in parts:
        fields |= part
    return CoreModel(fields=fields, **more)


GELU: Fields = {"activation_func": torch.nn.functional.gelu}
WIDE: Fields = {"num_layers": 3}
T5_ARGS: Fields = {"num_layers": 3, "encoder_num_layers": 3, "decoder_num_layers": 2}
HYBRID: Fields = {**TE, **GROUPED, **MAMBA, "num_moe_experts": 8}
QK: Fields = {"qk_layernorm": True}
RATES: Fields = {"decoupled_lr": 5e-2, "decoupled_min_lr": 1e-3, "min_lr": 0.0}

MODELS: Mapping[str, CoreModel] = {
    "local": _row(LOCAL),
    "local, biases, tied": _row(LOCAL, PLAIN, tied=True, bf16=False),
    "local, gate of GELU": _row(LOCAL, GELU),
    "local, norms of queries and keys": _row(LOCAL, QK),
    "local, decayed norms of queries and keys": _row(
        LOCAL, QK, optimizer={"apply_wd_to_qk_layernorm": True}
    ),
    # Stock of 0.16 does not tell groups apart by their rates when it loads them.
    "local, decoupled rates": _row(LOCAL, optimizer=RATES, hybrid_model=True),
    "local, output gate": _row(LOCAL, {"attention_output_gate": True}),
    "local, softmax offset": _row(LOCAL, {"softmax_type": "learnable"}),
    "local, MTP": _row(LOCAL, {"mtp_num_layers": 2}),
    "local, experts, shared, gate, bias": _row(LOCAL, MOE, SHARED, BIAS),
    "local, experts, biases": _row(LOCAL, PLAIN, MOE, {"add_bias_linear": True}),
    "local, experts behind a dense layer": _row(LOCAL, MOE, {"moe_layer_freq": [0, 1]}),
    "local, experts in all of a list": _row(LOCAL, MOE, {"moe_layer_freq": [1, 1]}),
    "TE": _row(TE),
    "TE, biases": _row(TE, PLAIN, {"normalization": "LayerNorm"}, bf16=False),
    "TE, norms of queries and keys, offset": _row(TE, QK, {"softmax_type": "learnable"}),
    "TE, MTP": _row(TE, {"mtp_num_layers": 1}),
    "TE, MLA": _row(TE, MLA),
    "TE, MLA with norms, experts behind a dense layer, MTP": _row(
        TE, MLA, QK, GROUPED, SHARED, BIAS, {"moe_layer_freq": [0, 1], "mtp_num_layers": 1}
    ),
    "TE, experts": _row(TE, MOE),
    "TE, grouped experts, shared": _row(TE, GROUPED, SHARED),
    "TE, grouped experts with biases": _row(TE, PLAIN, GROUPED),
    "TE, latent experts": _row(TE, GROUPED, {"moe_latent_size": 12}),
    "TE, gated delta net": _row(TE, DELTA),
    "TE, gated delta net, experts": _row(TE, DELTA, GROUPED, SHARED),
    "TE, gated delta net alone": _row(TE, DELTA, {"linear_attention_freq": [1, 1]}),
    "TE, sparse attention": _row(TE, MLA, QK, SPARSE, hybrid_model=True),
    "hybrid": _row(HYBRID, {"num_layers": 4}, family="hybrid", pattern="M*-E"),
    "hybrid of Mamba": _row(TE, MAMBA, family="hybrid", pattern="MM", tied=True),
    "hybrid of attention": _row(TE, family="hybrid", pattern="**", bf16=False),
    "hybrid with MTP": _row(
        HYBRID, {"mtp_num_layers": 1}, family="hybrid", pattern="M-/M*", hybrid_model=True
    ),
    "hybrid of latent attention and delta nets": _row(
        TE,
        MLA,
        {**DELTA, "experimental_attention_variant": None},
        family="hybrid",
        pattern="+G",
        hybrid_model=True,
    ),
    "T5, local": _row(LOCAL, PLAIN, family="t5", args=T5_ARGS, tied=True),
    "T5, TE": _row(TE, PLAIN, family="t5", args=T5_ARGS),
    "T5, relative positions": _row(
        LOCAL, PLAIN, family="t5", args=T5_ARGS, options={"position_embedding_type": "relative"}
    ),
    "BERT, local": _row(LOCAL, PLAIN, family="bert", tied=True),
    "BERT, TE": _row(TE, PLAIN, {"normalization": "LayerNorm"}, family="bert", bf16=False),
}
