"""Sizes that divide each other, as megatron-core finds them to."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron_fsdp_adapter.megatron.options import sizes
from tests.lib.megatron.core_layers import layers_of_core

CHECKS = ("megatron/options/sizes.py",)


def ours(options: dict[str, Any]) -> list[list[int]] | None:
    try:
        return sizes.stage_layers(options)
    except ValueError:
        return None


def test_layers_of_stages_are_those_that_core_builds_and_what_it_refuses_is_refused() -> None:
    choices = []
    for layers, stages, virtual in product(range(1, 13), (2, 3, 4), (None, 2, 3)):
        pipeline = {
            "num_layers": layers,
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": virtual,
        }
        for first, last in product((None, 1, 2, 4), repeat=2):
            ends = {
                "num_layers_in_first_pipeline_stage": first,
                "num_layers_in_last_pipeline_stage": last,
            }
            choices.append(pipeline | ends)
        for embedding, loss in product((False, True), repeat=2):
            accounts = {
                "account_for_embedding_in_pipeline_split": embedding,
                "account_for_loss_in_pipeline_split": loss,
            }
            choices.append(pipeline | accounts)
    assert [one for one in choices if ours(one) != layers_of_core(one)] == []
    built = [one for one in choices if ours(one)]
    assert len(choices) > len(built) > 100
    for one in built:
        assert sum(map(sum, sizes.stage_layers(one))) == one["num_layers"]


LAYOUTS = [
    ("Et*2|t*2L", {}), ("Ettt|(tt|)*2L", {}), ("Et*3|(tt|)*5,tL", {}), ("E|t*4|t|L", {}),
    ("Et|t|t|tL", {"virtual_pipeline_model_parallel_size": 2}),
    ("Et|t|t|tL", {"virtual_pipeline_model_parallel_size": 4}),
    ("Et|t|tL", {}), ("t|tL", {}), ("Et|t", {}), ("Etx|tL", {}), ("Et|tLt", {}), ("EEt|tL", {}),
    ("Et|tmL", {}), ("Et|tmL", {"mtp_num_layers": 1}), ("Etm|tL", {"mtp_num_layers": 1}),
    ("Et|tL", {"num_layers_in_first_pipeline_stage": 1}),
    ("Et|tL", {"account_for_loss_in_pipeline_split": True}), ("Et|tL", {"num_layers": 3}),
    ([["embedding", "decoder"], ["decoder", "loss"]], {}), ([["embedding", "gate"], ["loss"]], {}),
    (sizes.layout_of(61, 2, 1), {}), (sizes.layout_of(61, 4, 2), {}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=str)
def test_layouts_are_read_as_core_reads_them(layout: Any, options: dict[str, Any]) -> None:
    if isinstance(layout, str):
        text = layout
    else:
        text = "".join(word[0] for row in layout for word in row)
    if "*" not in text:
        layers = text.count("t")
    else:
        layers = sum(map(len, sizes._expanded(text))) - 2
    options = {
        "num_layers": max(1, layers),
        "pipeline_model_parallel_size": 2,
        sizes.LAYOUT: layout,
        **options,
    }
    if isinstance(layout, list):
        options["num_layers"] = sum(row.count("decoder") for row in layout) or 1
    assert ours(options) == layers_of_core(options)


def test_a_layout_is_as_even_as_can_be() -> None:
    assert sizes.layout_of(61, 2, 1) == "Et*31|t*30L"
    options = {
        "num_layers": 61,
        "pipeline_model_parallel_size": 4,
        sizes.LAYOUT: sizes.layout_of(61, 4, 2),
    }
    assert sizes.stage_layers(options) == [[8, 8], [8, 7], [8, 7], [8, 7]]


MODEL = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 4096,
         "micro_batch_size": 2}  # fmt: skip


FOUND = [
    ({}, None),
    ({"num_attention_heads": 2, "tensor_model_parallel_size": 4},
     "num_attention_heads=2: no multiple of"),
    ({"num_attention_heads": 3}, "num_attention_heads=3: does not divide hidden_size=512"),
    ({"num_attention_heads": 3, "kv_channels": 64}, None),
    ({"num_query_groups": 3}, "num_query_groups=3: does not divide num_attention_heads=8"),
    ({"num_query_groups": 3, "group_query_attention": False}, None),
    ({"num_query_groups": 2, "tensor_model_parallel_size": 8}, None),
    ({"ffn_hidden_size": 1002, "tensor_model_parallel_size": 4}, "ffn_hidden_size=1002: no"),
    ({"context_parallel_size": 4, "seq_length": 4100}, "seq_length=4100: no multiple of 2 x"),
    ({"tensor_model_parallel_size": 8, "sequence_parallel": True, "seq_length": 4},
     "seq_length=4: no multiple of tensor"),
    ({"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8},
     "tensor_model_parallel_size=4 x pipeline_model_parallel_size=8: 32 does not divide 16"),
    ({"global_batch_size": 36}, "global_batch_size=36: no multiple of micro_batch_size=2 x 16"),
    ({"global_batch_size": 64}, None),
    ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size=0: not an integer above 0"),
    ({"num_distributed_optimizer_instances": 3}, "num_distributed_optimizer_instances=3: does"),
    ({"expert_model_parallel_size": 2}, "expert_model_parallel_size=2: the model has no"),
    ({"num_experts": 6, "expert_model_parallel_size": 4}, "expert_model_parallel_size=4: does"),
    ({"num_moe_experts": 4, "moe_router_topk": 5}, "moe_router_topk=5: more than"),
    ({"num_experts": 8, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 4},
     "expert_model_parallel_size=8 x expert_tensor_parallel_size=4 x pipeline"),
    ({"num_experts": 8, "expert_model_parallel_size": 8,
      "num_distributed_optimizer_instances": 4}, "num_distributed_optimizer_instances=4: does"),
    ({"num_experts": 8, "expert_model_parallel_size": 4,
      "expert_num_distributed_optimizer_instances": 3},
     "expert_num_distributed_optimizer_instances=3: does not divide the 4 ranks with the same"),
    ({"num_experts": 8, "expert_model_parallel_size": 4,
      "expert_num_distributed_optimizer_instances": 4}, None),
    ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3},
     "num_virtual_stages_per_pipeline_rank=3: 4 layers of a pipeline stage"),
    ({"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2,
      "global_batch_size": 8 * 6}, "global_batch_size=48: 6 microbatches are no multiple of"),
    ({"num_virtual_stages_per_pipeline_rank": 2}, "there is one pipeline stage"),
    ({"num_layers": 7, "pipeline_model_parallel_size": 2, "hybrid_layer_pattern": "M*"}, None),
]  # fmt: skip
"""Options beside those of the model, and how the line begins that tells what is wrong."""


@pytest.mark.parametrize(("options", "named"), FOUND)
def test_what_does_not_divide_is_told_with_option_value_and_remedy(
    options: dict[str, Any], named: str | None
) -> None:
    found = sizes.size_problems({**MODEL, **options}, 16)
    if named is None:
        assert found == []
    else:
        assert len(found) == 1, found
        assert named in found[0]


def test_without_a_number_of_ranks_only_what_does_not_depend_on_it_is_told() -> None:
    [line] = sizes.size_problems(
        {**MODEL, "pipeline_model_parallel_size": 3, "global_batch_size": 5}, None
    )
    assert line.startswith("pipeline_model_parallel_size=3: does not divide")
