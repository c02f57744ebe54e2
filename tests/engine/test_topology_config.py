"""Process groups read once, and what the engine is told."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_fsdp_adapter.comm.all_to_all_sum import ALL_TO_ALL_SUM
from megatron_fsdp_adapter.core.config import (
    STRATEGIES,
    EngineConfig,
    MixedPrecisionPolicy,
    forced_overlaps,
    strategy_named,
)
from megatron_fsdp_adapter.core.topology import DENSE, EXPERT, Axis, ShardDomain
from megatron_fsdp_adapter.megatron.options.ddp_config import (
    DistributedDataParallelConfig as OurConfig,
)
from megatron_fsdp_adapter.megatron.options.ddp_options import engine_config, precision_policy
from megatron_fsdp_adapter.megatron.options.rules import problems
from megatron_fsdp_adapter.megatron.options.table import DDP_CONFIG_RULES
from megatron_fsdp_adapter.megatron.process_groups import build_index, groups_of
from megatron_fsdp_adapter.sharding.distributed_index import FSDPDistributedIndex
from tests.engine.pretended import pretended_world

CPU = torch.device("cpu")


@pytest.fixture
def world():
    with pretended_world(4, rank=2):
        yield dist.group.WORLD


def index_of(group, grad_scale=0.25, **options) -> FSDPDistributedIndex:
    return FSDPDistributedIndex(group, device_type="cpu", grad_scale=grad_scale, **options)


# Topology.


def test_one_group_serves_everything(world):
    index = index_of(world)
    domain = index.domain(DENSE)
    assert domain.axis == Axis("dp_cp", world, (0, 1, 2, 3), 2) and domain.axis.size == 4
    assert domain.gather_group is domain.reduce_group is world and domain.grad_scale == 0.25
    assert index.get_fsdp_group() is index.get_dp_group() is world
    assert index.get_fsdp_group(independent_all_gather=True) is world
    assert index.get_outer_fsdp_group() is None
    assert domain.mesh.mesh_dim_names == ("dp_cp",) and domain.mesh.shape == (4,)


def test_gathers_kinds_and_tensor_parallelism_have_groups_of_their_own(world):
    second, half, alone = (dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [0, 2], [2]))
    index = index_of(world, fsdp_group_ag=second, expt_fsdp_group=half, tp_group=alone)
    assert index.get_fsdp_group(independent_all_gather=True) is second
    assert index.get_fsdp_group() is world
    assert index.domain(EXPERT).axis.ranks == (0, 2) and index.domain(EXPERT).axis.rank == 1
    assert index.get_fsdp_group(is_expert_parallel=True) is half
    assert index.get_dp_group(is_expert_parallel=True) is half
    assert index.domain(EXPERT).mesh.shape == (2,)
    assert index.domain(EXPERT).grad_scale == index.domain(DENSE).grad_scale
    assert index.domain(DENSE).mesh.mesh_dim_names == ("dp_cp",)


def test_missing_kinds_are_named(world):
    index = index_of(world)
    with pytest.raises(ValueError, match=r"kind 'expert'.*\['dense'\].*expt_dp"):
        index.get_fsdp_group(is_expert_parallel=True)


def test_an_outer_axis_and_the_mesh_over_it():
    """8 ranks: outer 2 x shards 2 x tensor 2, tensor-parallel ranks being neighbors."""
    with pretended_world(8, rank=5):
        shard, outer, tensor = (dist.new_group(ranks) for ranks in ([5, 7], [1, 5], [4, 5]))
        index = index_of(
            shard, outer_fsdp_group=outer, tp_group=tensor, dp_group=dist.new_group([1, 3, 5, 7]),
            hsdp_outer_dp_shard=True,
        )  # fmt: skip
        domain = index.domain(DENSE)
        assert domain.outer == Axis("outer_fsdp_dp", outer, (1, 5), 1) and domain.outer_size == 2
        assert index.get_outer_fsdp_group() is index.hybrid_fsdp_group is outer
        assert dist.get_process_group_ranks(index.get_dp_group()) == [1, 3, 5, 7]
        assert domain.mesh.mesh_dim_names == ("outer_fsdp_dp", "dp_cp", "tp")
        assert domain.mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_models_on_other_ranks_have_meshes_of_the_same_names(world):
    """As with several modules of one model, or two models in a process."""
    halves = dist.new_group([0, 2]), dist.new_group([2, 3])
    outer = dist.new_group([0, 2])
    one, other = index_of(halves[0]), index_of(halves[1], outer_fsdp_group=outer)
    again = index_of(halves[0])
    meshes = [index.domain(DENSE).mesh for index in (one, other, again)]
    assert meshes[0].mesh.tolist() == [0, 2] == meshes[2].mesh.tolist()
    assert meshes[1]["dp_cp"].mesh.tolist() == [2, 3]
    assert meshes[1].mesh_dim_names == ("outer_fsdp_dp", "dp_cp")
    for mesh, group in zip(meshes, halves, strict=False):
        assert mesh.get_group("dp_cp") is group


def domain_of(world, ranks=(0, 1, 2, 3), outer=None):
    axis = dataclasses.replace(Axis.of("dp_cp", world), ranks=ranks)
    outer = None if outer is None else Axis("outer_fsdp_dp", world, outer, 0)
    mesh = index_of(world).domain(DENSE).mesh
    return ShardDomain(DENSE, axis, world, world, mesh, 1.0, outer)


BAD = {
    "an outer group has one rank in common with the shards": (
        lambda world: domain_of(world, outer=(2, 3)),
        r"outer group .*\[2, 3\].*\[0, 1, 2, 3\].*no other",
    ),
    "ranks come in the order of the group": (
        lambda world: domain_of(world, ranks=(1, 0, 2, 3)), "same ranks in the same order",
    ),
    "groups make a mesh": (
        lambda world: index_of(world, tp_group=dist.new_group([2, 3])),
        r"'dp_cp': \[0, 1, 2, 3\], 'tp': \[2, 3\].* do not make a mesh",
    ),
    **{
        f"ranks {ranks} do not gather what four have": (
            lambda world, ranks=ranks: index_of(world, fsdp_group_ag=dist.new_group(ranks)),
            rf"gather group of the dense .* ranks \[{str(ranks)[1:-1]}\].*on ranks \[0, 1, 2, 3\]",
        )
        for ranks in ([0, 2], [0, 1, 2])
    },
    **{
        f"a gradient scale of {scale}": (
            lambda world, scale=scale: index_of(world, grad_scale=scale), "grad_scale",
        )
        for scale in (0.0, -1.0, float("nan"))
    },
    "a collection has the shard group": (
        lambda world: build_index(groups_of(SimpleNamespace()), device=CPU, grad_scale_of=float),
        r"pg_collection\.dp_cp is missing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_groups_that_do_not_fit_are_refused(world, name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make(world)


def test_groups_are_read_where_they_are_set(world):
    groups = groups_of(SimpleNamespace(dp_cp=world, dp_cp_ag=None))
    assert groups["fsdp_group"] is world
    given = [name for name, group in groups.items() if group is not None]
    assert given == ["dp_group", "fsdp_group"]
    index = build_index(groups, device=CPU, grad_scale_of=lambda ranks: 1.0 / ranks)
    assert index.domain(DENSE).grad_scale == 0.25


# Configuration.


def good(**changes) -> DistributedDataParallelConfig:
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
    )  # fmt: skip
    for name, value in changes.items():
        setattr(config, name, value)
    return config


ACCEPTED = {
    "bucket_size": 5,
    "num_buckets": 5,
    "megatron_fsdp_version": 2,
    "megatron_fsdp_use_decoupled_grad": True,
    "megatron_fsdp_cuda_graph_mode": True,
    "fsdp_db_use_persist_buf_on_alloc_fail": True,
    "fsdp_all_gather_in_start_param_sync": False,
    "param_name_patterns_for_fp32_local_accumulation": ("*router*", "all"),
    "fp8_param_gather": True,
    "reuse_grad_buf_for_mxfp8_param_ag": True,
}


@pytest.mark.parametrize("option", ACCEPTED)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accepted_options_change_nothing(strategy, option):
    plain = good(data_parallel_sharding_strategy=strategy)
    config = good(data_parallel_sharding_strategy=strategy, **{option: ACCEPTED[option]})
    assert problems(config, DDP_CONFIG_RULES) == []
    assert engine_config(config) == engine_config(plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_dtypes_go_with_any_strategy(strategy):
    dtypes = (None, torch.float32, torch.bfloat16)
    for policy in itertools.starmap(MixedPrecisionPolicy, itertools.product(dtypes, repeat=3)):
        given = {f"megatron_fsdp_{name}": dtype for name, dtype in vars(policy).items()}
        config = good(data_parallel_sharding_strategy=strategy, **given)
        assert problems(config, DDP_CONFIG_RULES) == []
        assert engine_config(config).policy == policy


@pytest.mark.parametrize(
    ("strategy", "comm", "grads", "allowed"),
    [
        ("optim", torch.bfloat16, None, True),
        ("optim_grads", torch.bfloat16, torch.float32, True),
        ("optim_grads_params", torch.bfloat16, None, True),
        ("no_shard", torch.bfloat16, None, False),
        ("optim", None, None, False),
        ("optim", torch.bfloat16, torch.bfloat16, False),
    ],
)
def test_sums_in_float32_are_for_a_reduce_scatter_of_bf16(strategy, comm, grads, allowed):
    config = good(
        data_parallel_sharding_strategy=strategy,
        reduce_scatter_with_fp32_accumulation=True,
        megatron_fsdp_grad_comm_dtype=comm,
        megatron_fsdp_main_grads_dtype=grads,
    )
    found = problems(config, DDP_CONFIG_RULES)
    assert (found == []) is allowed
    policy = MixedPrecisionPolicy(main_grads_dtype=grads, grad_comm_dtype=comm)
    if allowed:
        assert engine_config(config).reduce_scatter is ALL_TO_ALL_SUM
    else:
        with pytest.raises(ValueError, match="reduce_scatter=all_to_all_sum with"):
            EngineConfig(STRATEGIES[strategy], policy, reduce_scatter=ALL_TO_ALL_SUM)


PREFER_FP32 = MixedPrecisionPolicy(*[torch.float32] * 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, MixedPrecisionPolicy()),
        ({"grad_reduce_in_fp32": True}, PREFER_FP32),
    ],
)
@pytest.mark.parametrize("make", [DistributedDataParallelConfig, OurConfig])
def test_the_older_names_map_onto_the_policy_and_warn_once(make, changes, expected):
    """Of core's plain config, and of ours."""
    if not all(hasattr(make, name) for name in changes):
        pytest.skip("gone in this release")
    config = make(**changes)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        policies = {precision_policy(config) for _ in range(3)}
    assert policies == {expected}
    said = [str(warning.message).split(" is read as ")[0] for warning in shown]
    assert said == [f"{name}={value}" for name, value in changes.items()]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"preserve_fp32_weights": True}, None),
        ({"preserve_fp32_weights": False}, "preserve_fp32_weights"),
        ({"grad_reduce_in_fp32": True, "megatron_fsdp_grad_comm_dtype": torch.bfloat16},
         "grad_reduce_in_fp32"),
        ({"grad_reduce_in_fp32": True, "megatron_fsdp_main_grads_dtype": torch.float32}, None),
        ({"grad_reduce_in_fp32": False, "megatron_fsdp_grad_comm_dtype": torch.bfloat16}, None),
    ],
)  # fmt: skip
def test_contradictions_of_old_and_new_names_are_refused(changes, refused):
    config = OurConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params", **changes,
    )  # fmt: skip
    found = [line.split("=")[0] for line in problems(config, DDP_CONFIG_RULES)]
    assert found == ([] if refused is None else [refused])


def test_our_config_has_main_s_fields_with_main_s_defaults():
    config = OurConfig(use_megatron_fsdp=True, use_distributed_optimizer=True)
    assert isinstance(config, DistributedDataParallelConfig)
    assert problems(config, DDP_CONFIG_RULES) == []
    ours = {field.name for field in dataclasses.fields(OurConfig)}
    assert ours >= {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    plain = good(data_parallel_sharding_strategy="no_shard")
    assert engine_config(config) == engine_config(plain)
    with pytest.raises(ValueError, match="bucket_size=5 and num_buckets=2 are mutually exclusive"):
        OurConfig(bucket_size=5, num_buckets=2)


@pytest.mark.parametrize(
    ("fusion", "average", "before"),
    [(True, False, False), (True, True, False), (False, True, False), (False, False, True)],
)
def test_where_the_gradient_scale_is_applied(fusion, average, before):
    config = good(gradient_reduce_div_fusion=fusion, average_in_collective=average)
    assert engine_config(config).scale_before_sum is before


def test_strategies_are_rows_in_order_of_what_they_shard():
    rows = list(STRATEGIES.values())
    sharded = [(row.shard_main, row.shard_grads, row.shard_weights) for row in rows]
    assert sharded == [(False,) * 3, (True, False, False), (True, True, False), (True,) * 3]
    assert all(strategy_named(name) is row for name, row in STRATEGIES.items())
    with pytest.raises(ValueError, match="data_parallel_sharding_strategy='zero3': unknown"):
        strategy_named("zero3")


@pytest.mark.parametrize(
    ("strategy", "forced"),
    [
        ("no_shard", set()),
        ("optim", set()),
        ("optim_grads", {"overlap_grad_reduce"}),
        ("optim_grads_params", {"overlap_grad_reduce", "overlap_param_gather"}),
    ],
)
def test_overlaps_that_a_strategy_needs_are_forced(strategy, forced):
    assert forced_overlaps(STRATEGIES[strategy]) == dict.fromkeys(forced, True)
    config = engine_config(
        good(data_parallel_sharding_strategy=strategy, overlap_grad_reduce=False,
             overlap_param_gather=False)
    )  # fmt: skip
    assert config.overlap_grad_reduce is ("overlap_grad_reduce" in forced)
    assert config.overlap_param_gather is ("overlap_param_gather" in forced)
    for option in forced:
        with pytest.raises(ValueError, match=f"{option}=False with {strategy}.*Set {option}=True"):
            EngineConfig(STRATEGIES[strategy], **{option: False})


def test_dtypes_default_to_float32_and_float16_is_no_dtype_of_the_wire():
    policy = MixedPrecisionPolicy()
    assert policy.grads_dtype == policy.comm_dtype == policy.main_params_dtype == torch.float32
    assert MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16).comm_dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"grad_comm_dtype=torch.float16: unsupported. Use one of"):
        MixedPrecisionPolicy(grad_comm_dtype=torch.float16)
