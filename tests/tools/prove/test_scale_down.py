"""Rules that make a run small keep what it is: kinds stay, sizes shrink, changes are printed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.megatron.options.sizes import EXPERT_INSTANCES
from megatron_fsdp_adapter.tools.prove import source
from megatron_fsdp_adapter.tools.prove.scale_down import (
    AXES,
    DROPPED,
    SIZES,
    Room,
    ScaledDown,
    shrink,
)

CHECKS = ("tools/prove/scale_down.py", "tools/prove/source.py")

LLAMA: dict[str, Any] = {
    "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336,
    "group_query_attention": True, "num_query_groups": 8, "seq_length": 4096, "bf16": True,
    "micro_batch_size": 1, "global_batch_size": 512, "swiglu": True, "lr": 1e-5, "min_lr": 0.0,
    "data_parallel_sharding_strategy": "optim_grads_params", "padded_vocab_size": 128256,
    "expert_tensor_parallel_size": 1, "transformer_impl": "local", "original_data_parallel_size": 8,
}  # fmt: skip

NOT_SIZES = {
    "lr",
    "min_lr",
    "initial_loss_scale",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "sequence_parallel",
}

RUNS = st.fixed_dictionaries(
    {
        "tensor_model_parallel_size": st.sampled_from([1, 2, 8]),
        "pipeline_model_parallel_size": st.sampled_from([1, 4]),
        "context_parallel_size": st.sampled_from([1, 2]),
        "num_distributed_optimizer_instances": st.sampled_from([1, 2]),
        "expert_model_parallel_size": st.sampled_from([1, 8]),
        "num_moe_experts": st.sampled_from([None, 8, 64]),
        EXPERT_INSTANCES: st.sampled_from([None, 1, 4]),
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
def test_sizes_shrink_kinds_stay_and_every_change_is_told(run: dict[str, Any], room: Room) -> None:
    """Other options stay, or are listed as not compared, as are axes that are lost."""
    before = {**LLAMA, **run}
    after = small(run, room)
    dropped = set(DROPPED)
    told = {change.option: change.after for change in after.changes}
    for change in after.changes:
        assert change.reason
    for name in before.keys() | after.options.keys():
        if before.get(name) == after.options.get(name):
            continue
        assert name in SIZES | dropped | NOT_SIZES, name
        assert told[name] == after.options.get(name), name
        if name in dropped:
            assert is_left_out(after, f"{name}="), name
    for name in AXES:
        if run[name] > 1 and after.options[name] <= 1:
            assert is_left_out(after, f"{name}="), name


@given(RUNS, ROOMS)
def test_what_comes_out_can_be_built(run: dict[str, Any], room: Room) -> None:
    after = small(run, room)
    o = after.options
    heads = o["num_attention_heads"]
    groups = o["num_query_groups"]
    stages = o["pipeline_model_parallel_size"] or 1
    experts = o["num_moe_experts"]
    axes = math.prod(o.get(name) or 1 for name in AXES)
    multiple = 16 if o["fp8"] else 8
    assert 1 <= after.world_size <= room.ranks
    assert after.world_size % axes == 0
    assert heads % groups == 0
    assert groups % (o["tensor_model_parallel_size"] or 1) == 0
    assert o["hidden_size"] % multiple == 0
    assert o["ffn_hidden_size"] % multiple == 0
    if run["num_layers"] >= 4:
        assert o["num_layers"] % stages == 0
    if experts:
        assert experts % o["expert_model_parallel_size"] == 0
        split = o["expert_model_parallel_size"] * (o["expert_tensor_parallel_size"] or 1) * stages
        assert after.world_size % (split * (o[EXPERT_INSTANCES] or 1)) == 0


def is_left_out(after: ScaledDown, beginning: str) -> bool:
    return any(line.startswith(beginning) for line in after.left_out)


TWO = Room(2, False, False)
FOUR = Room(4, False, False)
GPUS = Room(2, True, True)
FLEX = {"num_moe_experts": 8, "moe_token_dispatcher_type": "flex", "moe_paged_stash": True}
RECOMPUTED = {
    "num_moe_experts": 8,
    "moe_grouped_gemm": True,
    "recompute_granularity": "selective",
    "recompute_modules": ["moe_act", "layernorm"],
}
AND_ATTENTION = {**RECOMPUTED, "recompute_modules": ["core_attn", "moe_act", "layernorm"]}
AWARE = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
SPLIT = {"num_moe_experts": 8, "expert_model_parallel_size": 4, "moe_router_topk": 2}
KEEP = ("hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
RULES: dict[str, tuple[dict[str, Any], Room, dict[str, Any], tuple[str, ...]]] = {
    "a dispatcher that needs a package": (
        FLEX,
        TWO,
        {"moe_paged_stash": False, "moe_token_dispatcher_type": "alltoall"},
        ("moe_token_dispatcher_type=flex",),
    ),
    "what core recomputes only with another option or package": (
        RECOMPUTED,
        TWO,
        {"recompute_modules": [], "recompute_granularity": None},
        ("recompute_modules=moe_act: only with moe_grouped_gemm", "recompute_modules=layernorm: "),
    ),
    "the rest is recomputed": (
        AND_ATTENTION,
        TWO,
        {"recompute_modules": ["core_attn"], "recompute_granularity": "selective"},
        (),
    ),
    "all of it with both": (
        AND_ATTENTION,
        GPUS,
        {name: AND_ATTENTION[name] for name in ("recompute_modules", "recompute_granularity")},
        (),
    ),
    "a dtype goes with a precision-aware optimizer": (AWARE, TWO, {"main_grads_dtype": "fp32"}, ()),
    "a dtype of torch goes with it": (
        {**AWARE, "main_grads_dtype": "torch.bfloat16"},
        TWO,
        {"main_grads_dtype": "fp32"},
        (),
    ),
    "it stays where there is one": (AWARE, GPUS, AWARE, ()),
    "dropout is off also where it is not given": (
        {},
        GPUS,
        {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        ("hidden_dropout=",),
    ),
    "data-parallel ranks come first": (
        {"tensor_model_parallel_size": 8},
        GPUS,
        {"world_size": 2, "tensor_model_parallel_size": 1},
        ("tensor_model_parallel_size=",),
    ),
    "then others": (
        {"tensor_model_parallel_size": 8},
        Room(4, True, True),
        {"world_size": 4, "tensor_model_parallel_size": 2},
        (),
    ),
    "experts are split and sharded": (
        SPLIT,
        FOUR,
        {"world_size": 4, "expert_model_parallel_size": 2},
        (),
    ),
    "experts are split on few ranks": (
        SPLIT,
        TWO,
        {"world_size": 2, "expert_model_parallel_size": 2},
        ("shards of experts: each expert is on one rank",),
    ),
    "several microbatches": ({"global_batch_size": 512}, TWO, {"microbatches": 3}, ()),
    "one microbatch": ({"global_batch_size": 8}, TWO, {"microbatches": 1}, ()),
}
"""Options, where they are run, what becomes of them, and beginnings of what is left out."""

for ranks, size in ((1, 1), (2, 1), (4, 2)):
    RULES[f"a dense run keeps no more ranks of experts than of tensors, {ranks}"] = (
        {"tensor_model_parallel_size": 8, "expert_tensor_parallel_size": 8},
        Room(ranks, False, False),
        {"tensor_model_parallel_size": size, "expert_tensor_parallel_size": size},
        (),
    )


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    options, room, expected, left_out = RULES[name]
    after = small(options, room)
    for option, value in expected.items():
        assert after.options[option] == value, option
    for beginning in left_out:
        assert is_left_out(after, beginning), after.left_out


def test_sizes_that_are_kept_stay_and_what_cannot_be_is_refused() -> None:
    after = small({}, GPUS, keep=frozenset(KEEP))
    for name in KEEP:
        assert after.options[name] == LLAMA[name], name
    with pytest.raises(ValueError, match="--keep bf16"):
        small({}, GPUS, keep=frozenset({"bf16"}))
    with pytest.raises(ValueError, match="spec='my.module'"):
        small({"spec": "my.module"}, GPUS)


def test_a_preset_is_completed_like_a_command_line() -> None:
    preset = {
        "num-layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 8,
        "disable_bias_linear": True,
        "bf16": True,
        "grad_reduce_in_bf16": True,
        "data_parallel_sharding_strategy": "optim",
    }
    options = source.of_options(preset, "it", 1).options
    assert options["data_parallel_sharding_strategy"] == "optim", "it was said"
    assert options["add_bias_linear"] is False
    assert str(options["megatron_fsdp_grad_comm_dtype"]) == "torch.bfloat16"
    with pytest.raises(ValueError, match="num_layers, hidden_size"):
        source.of_options({"num_attention_heads": 4}, "it", 1)


def test_this_repositorys_own_script_is_refused_with_what_says_the_same() -> None:
    script = Path(__file__).parents[3] / "scripts" / "pretrain_gpt.py"
    with pytest.raises(ValueError, match="pretrain_gpt.py: not Megatron-LM's.*by --config"):
        source.of_script(script, [], 2)
