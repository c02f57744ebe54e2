"""Checkpoints of Megatron-Bridge have no arguments: a run_config.yaml tells what the model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from convert_cases import FFN, GROUPS, HEAD, HEADS, HIDDEN, Model, fsdp_state, save_fsdp

from megatron_fsdp_adapter.checkpoint import inspection
from megatron_fsdp_adapter.checkpoint.convert import convert

FOLDER = "iter_0000003"


def config(model: Model) -> dict[str, Any]:
    """As Megatron-Bridge writes it: fields of its model provider, functions and dtypes by name."""
    return {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "checkpoint": {"ckpt_format": "fsdp_dtensor"},
        "model": {
            "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
            "num_layers": model.layers, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
            "num_query_groups": GROUPS, "kv_channels": HEAD, "ffn_hidden_size": FFN,
            "normalization": "RMSNorm", "position_embedding_type": "rope", "seq_length": 32,
            "layernorm_epsilon": 1e-5, "gated_linear_unit": model.swiglu, "bf16": model.bf16,
            "fp16": False, "transformer_impl": "transformer_engine" if model.te else "local",
            "num_moe_experts": model.experts or None, "moe_grouped_gemm": model.grouped,
            "moe_router_topk": 2, "moe_ffn_hidden_size": FFN if model.experts else None,
            "rotary_base": 10000.0, "rope_scaling": False,
            "activation_func": {"_call_": False, "_target_": "torch.nn.functional.silu"},
            "params_dtype": {"_call_": False, "_target_": "torch.bfloat16"},
        },
    }  # fmt: skip


def state_of(model: Model) -> dict[str, Any]:
    """Without the buffers of a router, which Hugging Face's models do not have."""
    state = fsdp_state(model)
    state["model"] = {k: v for k, v in state["model"].items() if "expert_bias" not in k}
    return state


def bridge_checkpoint(root: Path, model: Model, told: Any) -> Path:
    state = state_of(model)
    del state["args"]
    save_fsdp(root, state)
    (root / FOLDER / "run_config.yaml").write_text(yaml.safe_dump(told))
    return root


@pytest.mark.parametrize(
    "model", [Model(), Model(experts=4, te=True, grouped=True)], ids=["dense", "experts"]
)
def test_it_tells_what_arguments_tell(tmp_path: Path, model: Model) -> None:
    """To Hugging Face, without --hf-config; through torch_dist too, without --transformer-impl."""
    sources = {
        "expected": save_fsdp(tmp_path / "lm", state_of(model)),
        "found": bridge_checkpoint(tmp_path / "bridge", model, config(model)),
    }
    for name, source in sources.items():
        convert(source, tmp_path / name, "huggingface")
        convert(source, tmp_path / f"{name}-td", "torch_dist")
        convert(tmp_path / f"{name}-td", tmp_path / f"{name}-through", "huggingface")
    for end in ("", "-through"):
        expected, found = tmp_path / f"expected{end}", tmp_path / f"found{end}"
        names = sorted(path.name for path in expected.iterdir())
        assert sorted(path.name for path in found.iterdir()) == names and len(names) > 1
        for name in names:
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def test_inspect_knows_the_model_too(tmp_path: Path) -> None:
    model = Model()
    found = inspection.describe(bridge_checkpoint(tmp_path / "b", model, config(model)))
    expected = inspection.describe(save_fsdp(tmp_path / "lm", fsdp_state(model)))
    shared = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "bf16")
    assert {name: found.model[name] for name in shared} == {
        name: expected.model[name] for name in shared
    }


def test_the_factor_of_rotary_scaling_is_taken_over(tmp_path: Path) -> None:
    told = config(Model())
    told["model"].update(rope_scaling=True, rope_scaling_factor=32.0)
    convert(bridge_checkpoint(tmp_path / "b", Model(), told), tmp_path / "hf", "huggingface")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
