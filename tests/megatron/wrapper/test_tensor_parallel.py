"""The cut of a parameter: by its marks where it has some, else by the class of its layer."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

from megatron_fsdp_adapter.megatron.wrapper.tensor_parallel import (
    COLUMN,
    ROW,
    mark_tensor_parallel,
    tensor_parallel_mode,
)
from megatron_fsdp_adapter.megatron.wrapper.tensor_parallel import REPLICATED as WHOLE
from tests.lib.gpt.one_layer import wrapped

CHECKS = ("megatron/wrapper/tensor_parallel.py",)


def layer(name: str, base: type[nn.Module] = nn.Module) -> nn.Module:
    """An instance of a class called `name`."""
    return type(name, (base,), {})()


def param(dim: int | None = None) -> nn.Parameter:
    """Marked as cut along `dim`; -1 means marked as whole, None not marked."""
    made = nn.Parameter(torch.zeros(4, 4))
    if dim is not None:
        set_tensor_model_parallel_attributes(made, dim >= 0, dim, 1)
    return made


@pytest.mark.parametrize(
    ("owner", "name", "dim", "mode"),
    (
        # Marks of core tell, in a layer that is known or not.
        ("ColumnParallelLinear", "weight", 0, COLUMN),
        ("RowParallelLinear", "weight", 1, ROW),
        ("ColumnParallelLinear", "weight", -1, WHOLE),
        ("GroupedMLP", "weight1", 1, ROW),
        ("GroupedMLP", "weight2", 0, COLUMN),
        # Without marks the class does.
        ("ColumnParallelLinear", "bias", None, COLUMN),
        ("RowParallelLinear", "weight", None, ROW),
        ("RowParallelLinear", "bias", None, WHOLE),
        ("VocabParallelEmbedding", "weight", None, COLUMN),
        # Transformer Engine marks every weight as cut along dim 0 (trap T1).
        ("TERowParallelGroupedLinear", "weight3", 0, ROW),
        ("TEColumnParallelGroupedLinear", "weight0", 0, COLUMN),
        ("TERowParallelLinear", "weight", 0, ROW),
        ("TERowParallelLinear", "bias", None, WHOLE),
        ("TELinear", "weight", 0, WHOLE),
        ("TELayerNormColumnParallelLinear", "layer_norm_weight", None, WHOLE),
        ("TELayerNormColumnParallelLinear", "bias", 0, COLUMN),
        # Core does not mark these, which each rank has for its own heads.
        ("DotProductAttention", "softmax_offset", None, COLUMN),
        # Nothing is known of the others.
        ("LayerNorm", "weight", None, WHOLE),
        ("TopKRouter", "weight", None, WHOLE),
    ),
)
def test_mode(owner: str, name: str, dim: int | None, mode: str) -> None:
    assert tensor_parallel_mode(param(dim), layer(owner), name) is mode


def test_a_subclass_is_known_by_its_nearest_base() -> None:
    base = type(layer("TERowParallelLinear", type(layer("TELinear"))))
    assert tensor_parallel_mode(param(0), layer("Own", base), "weight") is ROW


def test_what_checkpoint_code_of_core_reads() -> None:
    for mode, dim in ((COLUMN, 0), (ROW, 1), (WHOLE, None)):
        marked = param(0)
        mark_tensor_parallel(marked, mode)
        assert marked._tensor_parallel_mode == mode
        assert marked._mcore_tp is (mode is not WHOLE)
        assert getattr(marked, "_tp_partition_dim", None) == dim
        assert marked._tp_duplicated is (mode is WHOLE)


def test_every_parameter_of_a_model_is_marked_on_both_identities(one_rank: torch.device) -> None:
    modes = {}
    for name, shown in wrapped("optim_grads").named_parameters():
        assert shown._tensor_parallel_mode == shown.orig_param._tensor_parallel_mode
        modes[name.removeprefix("module.module.")] = shown._tensor_parallel_mode
    assert (
        modes.items()
        >= {
            "embedding.word_embeddings.weight": COLUMN,
            "decoder.layers.0.self_attention.linear_proj.weight": ROW,
            "decoder.layers.0.self_attention.linear_proj.bias": WHOLE,
            "decoder.layers.0.mlp.linear_fc1.bias": COLUMN,
            "decoder.layers.0.input_layernorm.weight": WHOLE,
            "output_layer.weight": COLUMN,
        }.items()
    )
