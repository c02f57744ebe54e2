"""Names and cuts of exports in Hugging Face's names, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.quantised.blocks import in_blocks
from megatron_fsdp_adapter.sharding.export_names import HuggingFaceNames, OwnNames

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 250,
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN2 = {**LLAMA, "model_type": "qwen2"}
QWEN3 = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0]}
DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 8, "first_k_dense_replace": 1,
}  # fmt: skip
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
QKV_ROWS = 4 * 128 + 2 * 2 * 128


def cut(config: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(HuggingFaceNames.of(config).cut(name, tensor, len(tensor)))


@pytest.mark.parametrize(
    ("config", "name", "rows", "expected"),
    [
        (LLAMA, "decoder.layers.0.mlp.linear_fc1.weight", 768,
         ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]),
        (LLAMA, "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", 256,
         ["model.layers.0.post_attention_layernorm.weight"]),
        (LLAMA, "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", 256,
         ["model.layers.1.input_layernorm.weight"]),
        (LLAMA, QKV, QKV_ROWS,
         [f"model.layers.1.self_attn.{one}_proj.weight" for one in "qkv"]),
        (MIXTRAL, "decoder.layers.0.mlp.experts.linear_fc1.weight7", 768,
         [f"model.layers.0.block_sparse_moe.experts.7.{one}.weight" for one in ("w1", "w3")]),
        (MIXTRAL, "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight", 256,
         ["model.layers.0.block_sparse_moe.experts.3.w2.weight"]),
        (QWEN2, "decoder.layers.1.self_attention.linear_qkv.bias", QKV_ROWS,
         [f"model.layers.1.self_attn.{one}_proj.bias" for one in "qkv"]),
        (QWEN3, "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", 768,
         [f"model.layers.1.mlp.experts.3.{one}_proj.weight" for one in ("gate", "up")]),
        (QWEN3, "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", 256,
         ["model.layers.0.post_attention_layernorm.weight"]),
        (QWEN3, "decoder.layers.0.self_attention.k_layernorm.weight", 128,
         ["model.layers.0.self_attn.k_norm.weight"]),
        (DEEPSEEK, "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight", 64,
         ["model.layers.1.self_attn.kv_a_layernorm.weight"]),
        (DEEPSEEK, "decoder.layers.1.self_attention.linear_q_proj.weight", 256,
         ["model.layers.1.self_attn.q_proj.weight"]),
        (DEEPSEEK, "decoder.layers.1.mlp.shared_experts.linear_fc2.weight", 256,
         ["model.layers.1.mlp.shared_experts.down_proj.weight"]),
        (DEEPSEEK, "decoder.layers.1.mlp.router.expert_bias", 8,
         ["model.layers.1.mlp.gate.e_score_correction_bias"]),
        (MIXTRAL, "decoder.layers.0.mlp.router.weight", 8,
         ["model.layers.0.block_sparse_moe.gate.weight"]),
    ],
)  # fmt: skip
def test_modules_of_every_kind_have_hugging_faces_names(
    config: Any, name: str, rows: int, expected: list[str]
) -> None:
    tensor = torch.arange(rows * 3.0).view(rows, 3)
    found = cut(config, name, tensor)
    assert list(found) == expected
    assert sum(len(part) for part in found.values()) == rows
    names = HuggingFaceNames.of(config)
    for told, total, at, start, stop in names.overlaps(name, rows, 5, rows - 3):
        assert len(found[told]) == total
        assert torch.equal(found[told][at : at + stop - start], tensor[start:stop]), told


def test_padding_of_the_vocabulary_is_left_out() -> None:
    found = cut(LLAMA, "output_layer.weight", torch.arange(256.0)[:, None])
    assert torch.equal(found["lm_head.weight"], torch.arange(250.0)[:, None])
    assert list(HuggingFaceNames.of(LLAMA).overlaps("output_layer.weight", 256, 240, 256)) == [
        ("lm_head.weight", 250, 240, 240, 250)
    ]


def test_scales_of_blocks_are_cut_with_the_rows_that_they_are_of() -> None:
    names = HuggingFaceNames.of(LLAMA)
    weight = torch.arange(float(QKV_ROWS))[:, None].expand(-1, 256)
    scales = torch.arange(QKV_ROWS / 128)[:, None].expand(-1, 2)
    assert not names.cut_problems(QKV, tuple(weight.shape), (128, 128))
    rows, blocks = (dict(names.cut(QKV, one, QKV_ROWS)) for one in (weight, scales))
    for name, part in rows.items():
        assert torch.equal(part[::128, 0] // 128, blocks[name][:, 0]), name
    (one,) = {len(dict(names.cut(QKV, torch.ones(1), QKV_ROWS)))}
    assert one == 3, "one number for all of them"
    narrow = HuggingFaceNames.of({**LLAMA, "head_dim": 64})
    (problem,) = narrow.cut_problems(QKV, (QKV_ROWS // 2, 256), (128, 128))
    assert "inside of blocks of 128" in problem


def test_a_config_may_be_a_mapping_a_folder_or_an_object(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(str(LLAMA).replace("'", '"'))
    given = (LLAMA, tmp_path, str(tmp_path / "config.json"),
             SimpleNamespace(to_dict=lambda: LLAMA))  # fmt: skip
    assert len({HuggingFaceNames.of(one).model.hidden for one in given}) == 1


def test_what_does_not_fit_is_named() -> None:
    names = HuggingFaceNames.of(LLAMA)
    unknown = "decoder.layers.9.mlp.linear_fc1.weight"
    assert "have no such weight" in names.problems(unknown, (1,))[0]
    assert "4 heads of 128" in names.problems(QKV, (17, 3))[0]
    assert "vocab_size=250" in names.problems("output_layer.weight", (249, 3))[0]
    assert OwnNames().problems("anything", ()) == []


@pytest.mark.parametrize("shape", [(128, 128), (300, 260), (1, 7), (257, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_in_blocks_is_what_each_block_of_it_is_cast_to(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    matrix = (torch.randn(shape) * torch.rand(shape).mul(9).exp()).to(dtype)
    matrix[0, 0] = 0.0
    stored, inverses = in_blocks(matrix)
    assert stored.shape == shape and stored.dtype == torch.float8_e4m3fn
    assert inverses.shape == tuple(-(-n // 128) for n in shape)
    meta = in_blocks(matrix.to("meta"))
    assert [(m.shape, m.dtype) for m in meta] == [(t.shape, t.dtype) for t in (stored, inverses)]
    for row in range(inverses.shape[0]):
        for column in range(inverses.shape[1]):
            place = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            block = matrix[place].float()
            scale = torch.tensor(448.0) / block.abs().max()
            bytes_of = (block * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(stored[place].float(), bytes_of.float()), (row, column)
            assert inverses[row, column] == 1.0 / scale
    blocks_of_zeros, ones = in_blocks(torch.zeros(130, 2))
    assert not blocks_of_zeros.float().any() and torch.equal(ones, torch.ones(2, 1))
