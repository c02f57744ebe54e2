"""Rules that make a run small keep what it is: kinds stay, sizes shrink, every change is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.prove import source
from megatron_fsdp_adapter.prove.scale_down import (
    AXES,
    DROPPED,
    SIZES,
    Room,
    reference_kind,
    shrink,
)

LLAMA: dict[str, Any] = {
    "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336,
    "group_query_attention": True, "num_query_groups": 8, "seq_length": 4096, "bf16": True,
    "micro_batch_size": 1, "global_batch_size": 512, "swiglu": True, "lr": 1e-5, "min_lr": 0.0,
    "data_parallel_sharding_strategy": "optim_grads_params", "padded_vocab_size": 128256,
    "expert_tensor_parallel_size": 1, "transformer_impl": "local", "original_data_parallel_size": 8,
}  # fmt: skip

NOT_SIZES = {"lr", "min_lr", "initial_loss_scale", "num_layers_at_start_in_bf16",
             "num_layers_at_end_in_bf16", "sequence_parallel"}  # fmt: skip

RUNS = st.fixed_dictionaries(
    {
        "tensor_model_parallel_size": st.sampled_from([1, 2, 8]),
        "pipeline_model_parallel_size": st.sampled_from([1, 4]),
        "context_parallel_size": st.sampled_from([1, 2]),
        "num_distributed_optimizer_instances": st.sampled_from([1, 2]),
        "expert_model_parallel_size": st.sampled_from([1, 8]),
        "num_moe_experts": st.sampled_from([None, 8, 64]),
        "fp8": st.sampled_from([None, "hybrid"]),
        "fp8_recipe": st.sampled_from(["tensorwise", "blockwise", "mxfp8"]),
        "fp8_param_gather": st.booleans(),
        "hidden_size": st.sampled_from([1024, 4096]),
        "num_layers": st.sampled_from([1, 12, 80]),
        "hidden_dropout": st.sampled_from([0.0, 0.1]),
        "overlap_grad_reduce": st.booleans(),
        "gradient_accumulation_fusion": st.booleans(),
        "recompute_granularity": st.sampled_from([None, "full", "selective"]),
        "global_batch_size": st.sampled_from([None, 8, 512]),
    }
)
ROOMS = st.builds(
    Room, ranks=st.sampled_from([1, 2, 4, 8]), cuda=st.booleans(), transformer_engine=st.booleans()
)


def small(changes: dict[str, Any], room: Room, **more: Any) -> Any:
    return shrink({**LLAMA, **changes}, room, **more)


@given(RUNS, ROOMS)
def test_options_that_are_no_sizes_stay_or_are_listed_as_not_compared(
    run: dict[str, Any], room: Room
) -> None:
    before, after = {**LLAMA, **run}, small(run, room)
    dropped = {row.option for row in DROPPED}
    for name in before.keys() | after.options.keys():
        if before.get(name) != after.options.get(name):
            assert name in SIZES | dropped | NOT_SIZES, name
        if name in dropped and before.get(name) != after.options.get(name):
            assert any(line.startswith(f"{name}=") for line in after.left_out), name


@given(RUNS, ROOMS)
def test_every_change_is_told_with_its_reason(run: dict[str, Any], room: Room) -> None:
    before, after = {**LLAMA, **run}, small(run, room)
    told = {change.option: change.after for change in after.changes}
    assert all(change.reason for change in after.changes)
    for name, value in after.options.items():
        if before.get(name) != value:
            assert told[name] == value


@given(RUNS, ROOMS)
def test_what_comes_out_can_be_built(run: dict[str, Any], room: Room) -> None:
    after = small(run, room)
    o = after.options
    assert 1 <= after.world_size <= room.ranks
    split = 1
    for name in AXES:
        split *= o.get(name) or 1
    assert after.world_size % split == 0
    assert o["num_attention_heads"] % o["num_query_groups"] == 0
    assert o["num_query_groups"] % (o["tensor_model_parallel_size"] or 1) == 0
    assert o["hidden_size"] % 8 == 0 and o["ffn_hidden_size"] % 8 == 0
    if o["fp8"]:
        assert o["hidden_size"] % 16 == 0 and o["ffn_hidden_size"] % 16 == 0
    assert o["num_layers"] % (o["pipeline_model_parallel_size"] or 1) == 0 or run["num_layers"] < 4
    if o["num_moe_experts"]:
        assert o["num_moe_experts"] % o["expert_model_parallel_size"] == 0


@given(RUNS, ROOMS)
def test_an_axis_that_is_lost_is_not_compared(run: dict[str, Any], room: Room) -> None:
    after = small(run, room)
    for name in AXES:
        if run[name] > 1 and after.options[name] == 1:
            assert any(line.startswith(f"{name}=") for line in after.left_out)


def test_a_dispatcher_that_needs_a_package_is_replaced_and_said() -> None:
    flex = {"num_moe_experts": 8, "moe_token_dispatcher_type": "flex", "moe_paged_stash": True}
    after = small(flex, Room(2, False, False))
    assert after.options["moe_paged_stash"] is False
    assert after.options["moe_token_dispatcher_type"] == "alltoall"
    assert any(line.startswith("moe_token_dispatcher_type=flex") for line in after.left_out)


@pytest.mark.parametrize("others", ([], ["core_attn"]))
def test_what_core_recomputes_only_with_another_option_or_package_is_not_without(
    others: list[str],
) -> None:
    run = {
        "num_moe_experts": 8, "moe_grouped_gemm": True, "recompute_granularity": "selective",
        "recompute_modules": [*others, "moe_act", "layernorm"],
    }  # fmt: skip
    without, with_them = small(run, Room(2, False, False)), small(run, Room(2, True, True))
    assert without.options["recompute_modules"] == others
    assert without.options["recompute_granularity"] == ("selective" if others else None)
    assert "recompute_modules=moe_act: only with moe_grouped_gemm" in without.left_out
    assert any(line.startswith("recompute_modules=layernorm: ") for line in without.left_out)
    assert with_them.options["recompute_modules"] == [*others, "moe_act", "layernorm"]


@pytest.mark.parametrize("dtype", ("bf16", "torch.bfloat16"))
def test_dtypes_of_a_precision_aware_optimizer_go_with_it(dtype: str) -> None:
    run = {"use_precision_aware_optimizer": True, "main_grads_dtype": dtype}
    without, with_it = small(run, Room(2, False, False)), small(run, Room(2, True, True))
    assert without.options["main_grads_dtype"] == "fp32"
    assert with_it.options["main_grads_dtype"] == dtype


def test_dropout_is_off_also_where_nobody_gave_it() -> None:
    after = small({}, Room(2, True, True))
    assert after.options["hidden_dropout"] == after.options["attention_dropout"] == 0.0


def test_data_parallel_ranks_come_first() -> None:
    after = small({"tensor_model_parallel_size": 8}, Room(2, True, True))
    assert after.world_size == 2 and after.options["tensor_model_parallel_size"] == 1
    after = small({"tensor_model_parallel_size": 8}, Room(4, True, True))
    assert after.world_size == 4 and after.options["tensor_model_parallel_size"] == 2


def test_experts_are_split_and_sharded_where_there_are_ranks() -> None:
    moe = {"num_moe_experts": 8, "expert_model_parallel_size": 4, "moe_router_topk": 2}
    after = small(moe, Room(4, False, False))
    assert (after.world_size, after.options["expert_model_parallel_size"]) == (4, 2)
    after = small(moe, Room(2, False, False))
    assert (after.world_size, after.options["expert_model_parallel_size"]) == (2, 2)
    assert "shards of experts: each expert is on one rank" in after.left_out


def test_several_microbatches_stay_several() -> None:
    assert small({"global_batch_size": 512}, Room(2, False, False)).options["microbatches"] == 3
    assert small({"global_batch_size": 8}, Room(2, False, False)).options["microbatches"] == 1


def test_sizes_that_are_kept_stay() -> None:
    keep = frozenset({"hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"})
    after = small({}, Room(2, True, True), keep=keep)
    assert {name: after.options[name] for name in keep} == {name: LLAMA[name] for name in keep}
    with pytest.raises(ValueError, match="--keep bf16"):
        small({}, Room(2, True, True), keep=frozenset({"bf16"}))


def test_a_model_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match="spec='my.module'"):
        small({"spec": "my.module"}, Room(2, True, True))


def test_the_reference_is_one_rank_where_the_model_is_whole() -> None:
    assert reference_kind(small({}, Room(2, False, False))) == "unsharded"
    for split in ({"tensor_model_parallel_size": 2}, {"fp8": "hybrid"},
                  {"num_moe_experts": 8, "expert_model_parallel_size": 2}):  # fmt: skip
        assert reference_kind(small(split, Room(4, True, True))) == "ddp"


def test_a_preset_is_completed_like_a_command_line() -> None:
    recipe = source.of_options(
        {"num-layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 8,
         "disable_bias_linear": True, "bf16": True, "grad_reduce_in_bf16": True}, "it", 1,
    )  # fmt: skip
    assert recipe.options["add_bias_linear"] is False
    assert str(recipe.options["megatron_fsdp_grad_comm_dtype"]) == "torch.bfloat16"
    with pytest.raises(ValueError, match="num_layers, hidden_size"):
        source.of_options({"num_attention_heads": 4}, "it", 1)


def test_this_repositorys_own_script_is_read_with_the_options_that_it_has() -> None:
    """It has fewer than Megatron-LM: what it does not say is as Megatron's configs have it."""
    root = Path(__file__).parents[2]
    arguments = ["--config", str(root / "configs" / "llama-1.5b.yaml"), "--mock-data"]
    found = source.of_script(root / "scripts" / "pretrain_gpt.py", arguments, 2)
    assert (found.options["optimizer"], found.options["hidden_size"]) == ("adam", 2048)
    assert found.options["bf16"] and found.options["ckpt_format"] == "fsdp_dtensor"
    assert [change.option for change in found.changes][:1] == ["--use-megatron-fsdp"]
    small = shrink(found.options, Room(2, True, True))
    assert small.options["num_layers"] < found.options["num_layers"]


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_a_dense_run_keeps_no_more_ranks_of_experts_than_of_tensors(ranks: int) -> None:
    """Megatron fills the size in from tensor parallelism, and divides the ranks by it."""
    split = {"tensor_model_parallel_size": 8, "expert_tensor_parallel_size": 8}
    found = small(split, Room(ranks, False, False)).options
    assert found["expert_tensor_parallel_size"] == found["tensor_model_parallel_size"]
    assert found["world_size"] % found["expert_tensor_parallel_size"] == 0
