"""Checkpoints of Megatron-Bridge have no arguments: a run_config.yaml tells what the model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_adapter.checkpoint.convert import convert
from megatron_fsdp_adapter.tools import inspection
from tests.lib.checkpoint.convert_cases import (
    BRIDGE_FOLDER,
    FFN,
    GROUPS,
    HEAD,
    HEADS,
    HIDDEN,
    Model,
    bridge_checkpoint,
    differences,
    load_all,
)

CHECKS = ("checkpoint/convert/run_config.py", "checkpoint/convert/common_state.py")


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


@pytest.mark.parametrize(
    "model", [Model(), Model(experts=4, te=True, grouped=True)], ids=["dense", "experts"]
)
def test_it_tells_what_arguments_tell(tmp_path: Path, model: Model) -> None:
    """There and back, where Megatron-Bridge has its config again, and to `inspect`."""
    source = bridge_checkpoint(tmp_path / "bridge", model, config(model))
    convert(source, tmp_path / "td", "torch_dist")
    convert(tmp_path / "td", tmp_path / "back", "fsdp_dtensor")
    before = load_all(source / BRIDGE_FOLDER)
    after = load_all(tmp_path / "back" / BRIDGE_FOLDER)
    arguments = after.pop("args")
    assert arguments.num_experts == (model.experts or None)
    assert differences(before, after) == []
    file = f"{BRIDGE_FOLDER}/run_config.yaml"
    assert (source / file).read_bytes() == (tmp_path / "td" / file).read_bytes()
    known = inspection.describe(source)["model"]
    assert known["num_layers"] == 2
    assert known["hidden_size"] == HIDDEN
    assert known["ffn_hidden_size"] == FFN
    assert known["bf16"] is True
