"""`transformers` and megatron-core give the same logits for converted weights, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from convert_cases import halves, save_fsdp
from launch import run_ranks

from megatron_fsdp_adapter.checkpoint.convert import Options, convert

pytest.importorskip("transformers", reason="pip install 'transformers<5'")

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "groups": 2, "ffn": 48, "vocab": 128, "seq": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, scaled": {"factor": 8.0},
    "llama, scaled by 32": {"factor": 32.0},
    "llama, tied": {"tied": True},
    "mixtral": {"experts": 4},
}
TOLERANCE = 1e-5
"""Logits are near 1, in fp32: a few hundred roundings."""
BASE = 2e5
"""Of rotary frequencies. With heads of 8, two are left as they are by Llama 3's scaling, one is
between and one is divided by the factor."""
EPSILON = 3e-3


def _gpt(
    experts: int = 0, tied: bool = False, factor: float | None = None, seed: int = 7
) -> Any:
    """Core's GPT with the modules of a Llama or a Mixtral, and without Transformer Engine."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    moe: dict[str, Any] = {}
    if experts:
        moe = {"num_moe_experts": experts, "moe_router_topk": 2, "moe_grouped_gemm": False,
               "moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": SIZES["ffn"],
               "moe_token_dispatcher_type": "allgather"}  # fmt: skip
    config = TransformerConfig(
        num_layers=SIZES["layers"], hidden_size=SIZES["hidden"], ffn_hidden_size=SIZES["ffn"],
        num_attention_heads=SIZES["heads"], num_query_groups=SIZES["groups"],
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, attention_dropout=0.0, hidden_dropout=0.0,
        bias_dropout_fusion=False, persist_layer_norm=False, use_cpu_initialization=True,
        layernorm_epsilon=EPSILON, **moe,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=experts or None, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    model = GPTModel(
        config, spec, vocab_size=SIZES["vocab"], max_sequence_length=512,
        share_embeddings_and_output_weights=tied, position_embedding_type="rope",
        rotary_base=BASE, rope_scaling=factor is not None, rope_scaling_factor=factor or 8.0,
    )  # fmt: skip
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model.eval()


def _tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, SIZES["vocab"], (2, SIZES["seq"]), generator=generator)


def _core_logits(model: Any) -> torch.Tensor:
    positions = torch.arange(SIZES["seq"]).expand(2, -1)
    mask = torch.ones(SIZES["seq"], SIZES["seq"], dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return model(_tokens(), positions, mask)


def _hugging_face_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(_tokens()).logits


def _hugging_face_model(
    folder: Path, experts: int = 0, tied: bool = False, factor: float | None = None
) -> None:
    """Random weights, written by transformers itself."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": SIZES["hidden"], "intermediate_size": SIZES["ffn"],
        "vocab_size": SIZES["vocab"], "num_hidden_layers": SIZES["layers"],
        "num_attention_heads": SIZES["heads"], "num_key_value_heads": SIZES["groups"],
        "max_position_embeddings": 512, "rms_norm_eps": EPSILON, "rope_theta": BASE,
        "tie_word_embeddings": tied, "initializer_range": 0.2,
    }  # fmt: skip
    if factor is not None:
        sizes["rope_scaling"] = {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
    torch.manual_seed(5)
    if experts:
        model: Any = MixtralForCausalLM(
            MixtralConfig(num_local_experts=experts, num_experts_per_tok=2, **sizes)
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(folder)


def _arguments(
    experts: int = 0, tied: bool = False, factor: float | None = None
) -> dict[str, Any]:
    """As a training script saves its options, by the names that Megatron-LM has for them."""
    return {
        "num_layers": SIZES["layers"], "hidden_size": SIZES["hidden"],
        "num_attention_heads": SIZES["heads"], "num_query_groups": SIZES["groups"],
        "ffn_hidden_size": SIZES["ffn"], "num_experts": experts or None, "moe_router_topk": 2,
        "moe_ffn_hidden_size": SIZES["ffn"], "max_position_embeddings": 512, "swiglu": True,
        "normalization": "RMSNorm", "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": not tied, "layernorm_epsilon": EPSILON,
        "rotary_base": BASE, "use_rope_scaling": factor is not None,
        "rope_scaling_factor": factor or 8.0,
    }  # fmt: skip


class _Gated:
    swiglu = True


def _check(folder: str, family: dict[str, Any]) -> None:
    import gpt

    gpt.init_megatron()
    root = Path(folder)
    options = Options(transformer_impl="local", experts="sequential", block_bytes=1000,
                      make_vocab_size_divisible_by=1)  # fmt: skip

    model = _gpt(**family)
    weights: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            weights.update({f"module.{k}": v for k, v in halves(name, value, _Gated()).items()})
    args = _arguments(**family)
    save_fsdp(root / "ours", {"model": weights, "args": args, "iteration": 3})
    convert(root / "ours", root / "exported", "huggingface", options=options)
    ours = _core_logits(model)
    theirs = _hugging_face_logits(root / "exported")
    assert ours.std() > 0.1, "logits that tell nothing"
    torch.testing.assert_close(theirs, ours, rtol=TOLERANCE, atol=TOLERANCE)
    if "factor" in family:
        for other_factor in {None, 8.0, 32.0} - {family["factor"]}:
            unlike = _core_logits(_gpt(**{**family, "factor": other_factor}))
            assert not torch.allclose(unlike, ours, atol=20 * TOLERANCE), "scaling tells nothing"

    _hugging_face_model(root / "hf", **family)
    convert(root / "hf", root / "imported", "fsdp_dtensor", options=options)
    other = _gpt(**family, seed=8)
    _load(other, root / "imported" / "iter_0000001")
    expected = _hugging_face_logits(root / "hf")
    assert not torch.allclose(expected, ours, atol=0.05)
    torch.testing.assert_close(_core_logits(other), expected, rtol=TOLERANCE, atol=TOLERANCE)


def _load(model: Any, folder: Path) -> None:
    from convert_cases import load_all

    stored = load_all(folder)
    state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            pieces = [stored.pop(f"model.module.{key}") for key in halves(name, value, _Gated())]
            state[name] = torch.cat(pieces)
    model.load_state_dict(state, strict=False)
    assert not [key for key in stored if key.startswith("model.")]


def _check_all(rank: int, size: int, folder: str) -> None:
    for name, family in FAMILIES.items():
        _check(f"{folder}/{name}", family)


def test_transformers_and_core_give_the_same_logits(tmp_path: Path) -> None:
    run_ranks(_check_all, 1, str(tmp_path), timeout=400)
