"""Models of Hugging Face: the count of published ones, and what is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_adapter.tools.cli import estimate, plan
from megatron_fsdp_adapter.tools.models.families import FAMILIES
from megatron_fsdp_adapter.tools.models.hugging_face import read_hugging_face
from megatron_fsdp_adapter.tools.models.sources import from_options
from megatron_fsdp_adapter.tools.models.spec import ModelSpec
from tests.lib.tools.published_models import PUBLISHED

CHECKS = ("tools/models/families.py", "tools/models/hugging_face.py")

ROOT = Path(__file__).resolve().parents[3]


def described(folder: Path, config: Any) -> ModelSpec:
    """The model of a config.json, with the vocabulary that it names: Megatron's is padded."""
    (folder / "config.json").write_text(json.dumps(config))
    options = read_hugging_face(str(folder))
    return from_options({**options, "make_vocab_size_divisible_by": 1}, "")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_counted_exactly(tmp_path: Path, name: str) -> None:
    model = PUBLISHED[name]
    found = described(tmp_path, model.config).num_parameters
    assert found == model.parameters
    assert found / 1e9 == pytest.approx(model.billions, rel=0.05)


def test_each_family_has_a_published_model() -> None:
    assert {model.model_type for model in PUBLISHED.values()} == set(FAMILIES)


def test_the_page_lists_the_families() -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    [line] = re.findall(r"^\| known \| (.*) \|$", page, re.MULTILINE)
    assert re.findall(r"`(\w+)`", line) == list(FAMILIES)


OTHER_KEYS: dict[str, dict[str, Any]] = {
    "bigcode/starcoder2-15b": {
        "_name_or_path": "bigcode/starcoder2-15b", "architectures": ["Starcoder2ForCausalLM"],
        "attention_dropout": 0.1, "bos_token_id": 0, "embedding_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.01275, "mlp_type": "default",
        "max_position_embeddings": 16384, "norm_epsilon": 1e-05, "norm_type": "layer_norm",
        "residual_dropout": 0.1, "rope_theta": 100000, "sliding_window": 4096,
        "torch_dtype": "float32", "transformers_version": "4.40.1", "use_bias": True,
        "use_cache": True,
    },
    "google/gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "bos_token_id": 2,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"] * 21, "pad_token_id": 0,
        "max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
    },
    "zai-org/GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "hidden_act": "silu", "n_group": 1,
        "max_position_embeddings": 131072, "norm_topk_prob": True, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "topk_group": 1,
        "torch_dtype": "bfloat16", "use_cache": True,
    },
    "meta-llama/Meta-Llama-3-8B": {
        "attention_bias": False, "pretraining_tp": 1, "rope_scaling": {"rope_type": "llama3"},
        "quantization_config": {"quant_method": "fp8"}, "a_new_key_that_is_off": False,
    },
    "openai-community/gpt2": {
        "architectures": ["GPT2LMHeadModel"], "n_ctx": 1024, "resid_pdrop": 0.1,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
}  # fmt: skip
"""Name of a model -> keys of its file that add no parameters."""


@pytest.mark.parametrize("name", OTHER_KEYS)
def test_keys_without_parameters_change_nothing(tmp_path: Path, name: str) -> None:
    model = PUBLISHED[name]
    found = described(tmp_path, {**model.config, **OTHER_KEYS[name]})
    assert found.num_parameters == model.parameters


def test_other_releases_spelling_of_experts_is_read(tmp_path: Path) -> None:
    model = PUBLISHED["Qwen/Qwen3-30B-A3B"]
    config = model.config
    config["num_local_experts"] = config.pop("num_experts")
    assert described(tmp_path, config).num_parameters == model.parameters


LLAMA = PUBLISHED["meta-llama/Meta-Llama-3-8B"].config
QWEN_MOE = PUBLISHED["Qwen/Qwen1.5-MoE-A2.7B"].config
GPT2 = PUBLISHED["openai-community/gpt2"].config
REFUSED: dict[str, tuple[Any, str]] = {
    "family": (
        {**LLAMA, "model_type": "llama4_text", "interleave_moe_layer_step": 2},
        r"model_type='llama4_text': not a known family. Known are deepseek_v2, .*, starcoder2. "
        "Give the sizes by flags",
    ),
    "no family": (
        {k: v for k, v in LLAMA.items() if k != "model_type"},
        "model_type=None: not a known family",
    ),
    "several kinds of data": (
        {"model_type": "gemma3", "text_config": LLAMA},
        r"'gemma3': not a known family.*text_config, saved as a file of its own, may be of one",
    ),
    "biases": ({**LLAMA, "attention_bias": True}, "attention_bias=true: .*other than false"),
    "dense layers among sparse ones": (
        {**QWEN_MOE, "mlp_only_layers": [0, 3]},
        r"mlp_only_layers=\[0, 3\]: the parameters of qwen2_moe",
    ),
    "every second layer is sparse": (
        {**QWEN_MOE, "decoder_sparse_step": 2},
        "decoder_sparse_step=2: .*other than 1",
    ),
    "key of another family": (
        {**LLAMA, "num_local_experts": 8},
        "num_local_experts=8: the parameters of llama models with a value of this key are not "
        "known. Remove the key",
    ),
    "layers of another kind": (
        {**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 16},
        "layer_types=.*linear_attention.*not known",
    ),
    "no output layer": (
        {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
        r"architectures=\['LlamaForSequenceClassification'\]: only models with an output layer",
    ),
    "cross attention": ({**GPT2, "add_cross_attention": True}, "add_cross_attention=true"),
    "missing size": (
        {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"},
        "no config of llama, because it has no num_hidden_layers",
    ),
    "size that is null": ({**LLAMA, "hidden_size": None}, "it has no hidden_size"),
    "experts twice": (
        {**QWEN_MOE, "num_local_experts": 8},
        "num_local_experts=8: the parameters of qwen2_moe",
    ),
    "missing width of the shared expert": (
        {k: v for k, v in QWEN_MOE.items() if not k.startswith("shared_expert")},
        "it has no shared_expert_intermediate_size",
    ),
    "text in place of a number": ({**LLAMA, "hidden_size": "4k"}, "hidden_size='4k': no number"),
    "list": ([LLAMA], "no config of a model"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_counted_is_refused(tmp_path: Path, what: str) -> None:
    config, message = REFUSED[what]
    with pytest.raises(ValueError, match=message) as error:
        described(tmp_path, config)
    assert str(error.value).startswith(f"--hf-config {tmp_path}/config.json: ")


@pytest.mark.parametrize("command", [estimate, plan], ids=["estimate", "plan"])
def test_commands_name_an_unknown_family(tmp_path: Path, capsys: Any, command: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "falcon"}))
    words = ["--hf-config", str(tmp_path)]
    if command is plan:
        words += ["--gpus", "8", "--gpu", "h100", "--global-batch-size", "8"]
    assert command.main(words) == 2
    assert "model_type='falcon': not a known family" in capsys.readouterr().err
