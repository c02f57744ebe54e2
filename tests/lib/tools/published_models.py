"""Published models, by their names on Hugging Face: the fields of config.json on which parameters
depend, and the number of parameters.

`parameters` was counted once by transformers 5.24 (`AutoModelForCausalLM.from_config` on the meta
device, each weight once). `billions` is the number that the model's publisher or its page on
Hugging Face gives, rounded or cut off. Layers of multi-token prediction are in neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    model_type: str
    parameters: int
    billions: float
    fields: Mapping[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """The content of its config.json."""
        return {"model_type": self.model_type, **self.fields}


def sizes(vocab: int, hidden: int, ffn: int, layers: int, heads: int) -> dict[str, int]:
    """The sizes that most families have, by their keys in config.json."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


PUBLISHED: Mapping[str, Published] = {
    "deepseek-ai/DeepSeek-V2-Lite": Published("deepseek_v2", 15_706_484_224, 15.7, {
        **sizes(102_400, 2_048, 10_944, 27, 16), "num_key_value_heads": 16,
        "tie_word_embeddings": False, "first_k_dense_replace": 1, "moe_intermediate_size": 1_408,
        "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }),
    "deepseek-ai/DeepSeek-V2": Published("deepseek_v2", 235_741_434_880, 236, {
        **sizes(102_400, 5_120, 12_288, 60, 128), "num_key_value_heads": 128,
        "tie_word_embeddings": False, "first_k_dense_replace": 1, "moe_intermediate_size": 1_536,
        "moe_layer_freq": 1, "n_routed_experts": 160, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "q_lora_rank": 1_536, "n_group": 8, "topk_group": 3,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }),
    "deepseek-ai/DeepSeek-V3": Published("deepseek_v3", 671_026_404_352, 671, {
        **sizes(129_280, 7_168, 18_432, 61, 128), "num_key_value_heads": 128,
        "tie_word_embeddings": False, "first_k_dense_replace": 3, "moe_intermediate_size": 2_048,
        "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "q_lora_rank": 1_536, "num_nextn_predict_layers": 1,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }),
    "moonshotai/Moonlight-16B-A3B": Published("deepseek_v3", 15_960_108_544, 16, {
        **sizes(163_840, 2_048, 11_264, 27, 16), "num_key_value_heads": 16,
        "tie_word_embeddings": False, "first_k_dense_replace": 1, "moe_intermediate_size": 1_408,
        "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
        "num_nextn_predict_layers": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    }),
    "rednote-hilab/dots.llm1.base": Published("dots1", 142_774_373_888, 142, {
        **sizes(152_064, 4_096, 10_944, 62, 32), "num_key_value_heads": 32,
        "tie_word_embeddings": False, "first_k_dense_replace": 1, "moe_intermediate_size": 1_408,
        "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1,
        "topk_group": 1,
    }),
    "LGAI-EXAONE/EXAONE-4.0-32B": Published("exaone4", 32_003_216_384, 32, {
        **sizes(102_400, 5_120, 27_392, 64, 40), "num_key_value_heads": 8,
        "tie_word_embeddings": False, "head_dim": 128,
    }),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": Published("exaone4", 1_279_391_488, 1.28, {
        **sizes(102_400, 2_048, 4_096, 30, 32), "num_key_value_heads": 8,
        "tie_word_embeddings": True, "head_dim": 64,
    }),
    "google/gemma-2b": Published("gemma", 2_506_172_416, 2.51, {
        **sizes(256_000, 2_048, 16_384, 18, 8), "num_key_value_heads": 1, "head_dim": 256,
    }),
    "google/gemma-7b": Published("gemma", 8_537_680_896, 8.54, {
        **sizes(256_000, 3_072, 24_576, 28, 16), "num_key_value_heads": 16, "head_dim": 256,
    }),
    "google/gemma-2-9b": Published("gemma2", 9_241_705_984, 9.24, {
        **sizes(256_000, 3_584, 14_336, 42, 16), "num_key_value_heads": 8, "head_dim": 256,
    }),
    "google/gemma-2-27b": Published("gemma2", 27_227_128_320, 27.2, {
        **sizes(256_000, 4_608, 36_864, 46, 32), "num_key_value_heads": 16, "head_dim": 128,
    }),
    "google/gemma-3-1b-pt": Published("gemma3_text", 999_885_952, 1, {
        **sizes(262_144, 1_152, 6_912, 26, 4), "num_key_value_heads": 1, "head_dim": 256,
    }),
    "zai-org/glm-4-9b-hf": Published("glm", 9_399_951_360, 9.4, {
        **sizes(151_552, 4_096, 13_696, 40, 32), "num_key_value_heads": 2, "head_dim": 128,
        "tie_word_embeddings": False, "attention_bias": True,
    }),
    "zai-org/GLM-4-9B-0414": Published("glm4", 9_400_279_040, 9.4, {
        **sizes(151_552, 4_096, 13_696, 40, 32), "num_key_value_heads": 2, "head_dim": 128,
        "tie_word_embeddings": False, "attention_bias": True,
    }),
    "zai-org/GLM-4-32B-0414": Published("glm4", 32_566_081_536, 32, {
        **sizes(151_552, 6_144, 23_040, 61, 48), "num_key_value_heads": 2, "head_dim": 128,
        "tie_word_embeddings": False, "attention_bias": False,
    }),
    "zai-org/GLM-4.5-Air": Published("glm4_moe", 106_852_245_504, 106, {
        **sizes(151_552, 4_096, 10_944, 46, 96), "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False, "attention_bias": True, "first_k_dense_replace": 1,
        "moe_intermediate_size": 1_408, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "use_qk_norm": False,
    }),
    "openai-community/gpt2": Published("gpt2", 124_439_808, 0.124, {
        "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1_024,
    }),
    "openai-community/gpt2-xl": Published("gpt2", 1_557_611_200, 1.56, {
        "vocab_size": 50_257, "n_embd": 1_600, "n_layer": 48, "n_head": 25, "n_positions": 1_024,
    }),
    "bigcode/starcoderbase": Published("gpt_bigcode", 15_517_456_384, 15.5, {
        "vocab_size": 49_152, "n_embd": 6_144, "n_layer": 40, "n_head": 48, "n_positions": 8_192,
        "n_inner": 24_576, "multi_query": True,
    }),
    "EleutherAI/pythia-6.9b": Published("gpt_neox", 6_857_302_016, 6.857302016, {
        **sizes(50_432, 4_096, 16_384, 32, 32), "tie_word_embeddings": False,
    }),
    "EleutherAI/gpt-neox-20b": Published("gpt_neox", 20_554_567_680, 20.55456768, {
        **sizes(50_432, 6_144, 24_576, 44, 64), "tie_word_embeddings": False,
    }),
    "openai/gpt-oss-20b": Published("gpt_oss", 20_914_757_184, 20.9, {
        **sizes(201_088, 2_880, 2_880, 24, 64), "num_key_value_heads": 8, "head_dim": 64,
        "tie_word_embeddings": False, "attention_bias": True, "num_local_experts": 32,
        "num_experts_per_tok": 4,
    }),
    "openai/gpt-oss-120b": Published("gpt_oss", 116_829_156_672, 117, {
        **sizes(201_088, 2_880, 2_880, 36, 64), "num_key_value_heads": 8, "head_dim": 64,
        "tie_word_embeddings": False, "attention_bias": True, "num_local_experts": 128,
        "num_experts_per_tok": 4,
    }),
    "ibm-granite/granite-3.1-2b-base": Published("granite", 2_533_531_648, 2.53, {
        **sizes(49_155, 2_048, 8_192, 40, 32), "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }),
    "ibm-granite/granite-3.1-8b-base": Published("granite", 8_170_848_256, 8.17, {
        **sizes(49_155, 4_096, 12_800, 40, 32), "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }),
    "ibm-granite/granite-3.0-1b-a400m-base": Published("granitemoe", 1_334_628_352, 1.33, {
        **sizes(49_155, 1_024, 512, 24, 16), "num_key_value_heads": 8,
        "tie_word_embeddings": True, "num_local_experts": 32, "num_experts_per_tok": 8,
    }),
    "meta-llama/Llama-2-7b-hf": Published("llama", 6_738_415_616, 6.74, {
        **sizes(32_000, 4_096, 11_008, 32, 32), "tie_word_embeddings": False,
    }),
    "meta-llama/Meta-Llama-3-8B": Published("llama", 8_030_261_248, 8.03, {
        **sizes(128_256, 4_096, 14_336, 32, 32), "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }),
    "meta-llama/Llama-3.2-1B": Published("llama", 1_235_814_400, 1.24, {
        **sizes(128_256, 2_048, 8_192, 16, 32), "num_key_value_heads": 8, "head_dim": 64,
        "tie_word_embeddings": True,
    }),
    "mistralai/Mistral-7B-v0.1": Published("mistral", 7_241_732_096, 7.24, {
        **sizes(32_000, 4_096, 14_336, 32, 32), "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }),
    "mistralai/Mistral-Nemo-Base-2407": Published("mistral", 12_247_782_400, 12.2, {
        **sizes(131_072, 5_120, 14_336, 40, 32), "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False,
    }),
    "mistralai/Mixtral-8x7B-v0.1": Published("mixtral", 46_702_792_704, 46.7, {
        **sizes(32_000, 4_096, 14_336, 32, 32), "num_key_value_heads": 8,
        "tie_word_embeddings": False, "num_local_experts": 8, "num_experts_per_tok": 2,
    }),
    "nvidia/Minitron-4B-Base": Published("nemotron", 4_190_509_056, 4.2, {
        **sizes(256_000, 3_072, 9_216, 32, 24), "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False,
    }),
    "allenai/OLMo-2-1124-7B": Published("olmo2", 7_298_617_344, 7.3, {
        **sizes(100_352, 4_096, 11_008, 32, 32), "num_key_value_heads": 32,
        "tie_word_embeddings": False,
    }),
    "allenai/OLMo-2-0325-32B": Published("olmo2", 32_234_279_936, 32, {
        **sizes(100_352, 5_120, 27_648, 64, 40), "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }),
    "allenai/Olmo-3-1025-7B": Published("olmo3", 7_298_011_136, 7, {
        **sizes(100_278, 4_096, 11_008, 32, 32), "num_key_value_heads": 32,
        "tie_word_embeddings": False,
    }),
    "allenai/OLMoE-1B-7B-0924": Published("olmoe", 6_919_161_856, 6.92, {
        **sizes(50_304, 2_048, 1_024, 16, 16), "num_key_value_heads": 16,
        "tie_word_embeddings": False, "num_experts": 64, "num_experts_per_tok": 8,
    }),
    "microsoft/Phi-3-mini-4k-instruct": Published("phi3", 3_821_079_552, 3.82, {
        **sizes(32_064, 3_072, 8_192, 32, 32), "num_key_value_heads": 32,
        "tie_word_embeddings": False,
    }),
    "microsoft/phi-4": Published("phi3", 14_659_507_200, 14.7, {
        **sizes(100_352, 5_120, 17_920, 40, 40), "num_key_value_heads": 10,
        "tie_word_embeddings": False,
    }),
    "microsoft/Phi-4-mini-instruct": Published("phi3", 3_836_021_760, 3.84, {
        **sizes(200_064, 3_072, 8_192, 32, 24), "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }),
    "Qwen/Qwen2.5-0.5B": Published("qwen2", 494_032_768, 0.494, {
        **sizes(151_936, 896, 4_864, 24, 14), "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }),
    "Qwen/Qwen2.5-7B": Published("qwen2", 7_615_616_512, 7.61, {
        **sizes(152_064, 3_584, 18_944, 28, 28), "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }),
    "Qwen/Qwen1.5-MoE-A2.7B": Published("qwen2_moe", 14_315_784_192, 14.3, {
        **sizes(151_936, 2_048, 5_632, 24, 16), "num_key_value_heads": 16,
        "tie_word_embeddings": False, "moe_intermediate_size": 1_408,
        "shared_expert_intermediate_size": 5_632, "num_experts": 60, "num_experts_per_tok": 4,
    }),
    "Qwen/Qwen2-57B-A14B": Published("qwen2_moe", 57_408_658_944, 57.4, {
        **sizes(151_936, 3_584, 18_944, 28, 28), "num_key_value_heads": 4,
        "tie_word_embeddings": False, "moe_intermediate_size": 2_560,
        "shared_expert_intermediate_size": 20_480, "num_experts": 64, "num_experts_per_tok": 8,
    }),
    "Qwen/Qwen3-0.6B": Published("qwen3", 596_049_920, 0.6, {
        **sizes(151_936, 1_024, 3_072, 28, 16), "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True,
    }),
    "Qwen/Qwen3-8B": Published("qwen3", 8_190_735_360, 8.19, {
        **sizes(151_936, 4_096, 12_288, 36, 32), "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False,
    }),
    "Qwen/Qwen3-30B-A3B": Published("qwen3_moe", 30_532_122_624, 30.5, {
        **sizes(151_936, 2_048, 6_144, 48, 32), "num_key_value_heads": 4, "head_dim": 128,
        "tie_word_embeddings": False, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8,
    }),
    "ByteDance-Seed/Seed-OSS-36B-Base": Published("seed_oss", 36_151_104_512, 36, {
        **sizes(155_136, 5_120, 27_648, 64, 80), "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False, "attention_bias": True, "attention_out_bias": False,
    }),
    "HuggingFaceTB/SmolLM3-3B": Published("smollm3", 3_075_098_624, 3.08, {
        **sizes(128_256, 2_048, 11_008, 36, 16), "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }),
    "stabilityai/stablelm-2-1_6b": Published("stablelm", 1_644_515_328, 1.64, {
        **sizes(100_352, 2_048, 5_632, 24, 32), "num_key_value_heads": 32,
        "tie_word_embeddings": False, "use_qkv_bias": True,
    }),
    "bigcode/starcoder2-3b": Published("starcoder2", 3_030_371_328, 3.03, {
        **sizes(49_152, 3_072, 12_288, 30, 24), "num_key_value_heads": 2,
    }),
    "bigcode/starcoder2-15b": Published("starcoder2", 15_957_889_024, 16, {
        **sizes(49_152, 6_144, 24_576, 40, 48), "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip
"""Name of a model -> the model."""
