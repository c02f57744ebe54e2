from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fsdp_adapter.tools.models import local_spec
from megatron_fsdp_adapter.tools.models.local_spec import (
    TorchAttention,
    TorchNorm,
    local_block_spec,
)

CHECKS = ("tools/models/local_spec.py",)

SEQUENCE = 7
BATCH = 3
HEADS = 4
GROUPS = 2
WIDTH = 8


def _config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": HEADS * WIDTH,
            "num_attention_heads": HEADS,
            "num_query_groups": GROUPS,
            "attention_dropout": 0.0,
            **changes,
        }
    )


def _attention(mask: AttnMaskType = AttnMaskType.causal, **changes: Any) -> TorchAttention:
    return TorchAttention(_config(**changes), 1, mask, "self")


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for heads in (HEADS, GROUPS, GROUPS):
        found.append(
            torch.randn(SEQUENCE, BATCH, heads, WIDTH, generator=generator, dtype=torch.float64)
        )
    return found


@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.no_mask])
def test_attention_is_softmax_of_scaled_products(mask: AttnMaskType) -> None:
    query, key, value = _inputs()
    got = _attention(mask)(query, key, value, None)
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=2) for x in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / WIDTH**0.5
    if mask == AttnMaskType.causal:
        future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    expected = torch.einsum("bhst,tbhd->sbhd", scores.softmax(dim=-1), value).flatten(2)
    assert got.shape == (SEQUENCE, BATCH, HEADS * WIDTH)
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bias": (
        lambda: _attention()(*_inputs(), None, attention_bias=object()),
        "neither a bias nor packed",
    ),
    "packed": (
        lambda: _attention()(*_inputs(), None, packed_seq_params=object()),
        "neither a bias nor packed",
    ),
    "mask": (lambda: _attention(AttnMaskType.padding), "supports causal and no_mask"),
    "context": (
        lambda: _attention(context_parallel_size=2),
        r"context_parallel_size is 2.*transformer_engine",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses_what_it_does_not_do(name: str) -> None:
    ask, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        ask()


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norm_is_torchs_and_marked_for_sequence_parallelism(kind: str) -> None:
    for parallel in (False, True):
        config = _config(
            normalization=kind,
            sequence_parallel=parallel,
            tensor_model_parallel_size=2 if parallel else 1,
            params_dtype=torch.bfloat16,
        )
        norm: Any = TorchNorm(config, 16, 1e-6)
        assert type(norm).__name__ == kind
        assert norm.eps == 1e-6
        assert {param.sequence_parallel for param in norm.parameters()} == {parallel}
        assert {param.dtype for param in norm.parameters()} == {torch.bfloat16}


@pytest.fixture
def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are on this rank, without process groups."""
    monkeypatch.setattr(local_spec, "get_num_layers_to_build", lambda config, _: config.num_layers)
    monkeypatch.setattr(local_spec, "get_transformer_layer_offset", lambda config, _: 0)


def _parts(spec: Any) -> tuple[Any, Any]:
    """Class and submodules of a spec, which from 0.17 on may be a partial call of the class."""
    if isinstance(spec, functools.partial):
        return spec.func, spec.keywords.get("submodules")
    return getattr(spec, "module", spec), getattr(spec, "submodules", None)


EXPERTS = {"num_moe_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 16}


@pytest.mark.parametrize(
    ("changes", "with_experts"),
    [
        ({}, [False, False]),
        ({"qk_layernorm": True}, [False, False]),
        (EXPERTS, [True, True]),
        ({**EXPERTS, "moe_layer_freq": 2}, [True, False]),
        ({**EXPERTS, "moe_layer_freq": [0, 1]}, [False, True]),
    ],
)
def test_local_layers_are_made_of_them(
    changes: dict[str, Any], with_experts: list[bool], one_stage: None
) -> None:
    """One MLP for each expert, where their frequency says."""
    block: Any = local_block_spec(_config(**changes))
    assert block.layer_norm is TorchNorm
    for spec, has_experts in zip(block.layer_specs, with_experts, strict=True):
        layer = spec.submodules
        attention = spec.submodules.self_attention.submodules
        assert layer.input_layernorm is layer.pre_mlp_layernorm is TorchNorm
        assert attention.core_attention is TorchAttention
        norms = {attention.q_layernorm, attention.k_layernorm}
        assert (norms == {TorchNorm}) is ("qk_layernorm" in changes)
        module, submodules = _parts(layer.mlp)
        assert (module is MoELayer) is has_experts
        assert not has_experts or _parts(submodules.experts)[0] is SequentialMLP
