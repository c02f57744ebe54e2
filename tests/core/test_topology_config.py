"""Process groups read once, and the configuration of the engine."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_fsdp_adapter.core.comm.all_to_all_sum import ALL_TO_ALL_SUM, FIXED_ALL_TO_ALL_SUM
from megatron_fsdp_adapter.core.comm.communicator import REDUCE_SCATTER
from megatron_fsdp_adapter.core.config import (
    OUTER_STRATEGIES,
    STRATEGIES,
    EngineConfig,
    MixedPrecisionPolicy,
    Strategy,
    strategy_named,
)
from megatron_fsdp_adapter.core.distributed_index import FSDPDistributedIndex
from megatron_fsdp_adapter.core.runtime.device import make_runtime
from megatron_fsdp_adapter.core.topology import DENSE, EXPERT, Axis, ShardDomain
from megatron_fsdp_adapter.megatron.options.ddp_config import (
    DistributedDataParallelConfig as OurConfig,
)
from megatron_fsdp_adapter.megatron.options.ddp_options import engine_config, precision_policy
from megatron_fsdp_adapter.megatron.options.rules import problems
from megatron_fsdp_adapter.megatron.options.table import DDP_CONFIG_RULES
from megatron_fsdp_adapter.megatron.wrapper.process_groups import build_index, groups_of
from tests.lib.engine.pretended import pretended_world

CHECKS = (
    "core/config.py",
    "core/topology.py",
    "core/distributed_index.py",
    "megatron/options/ddp_config.py",
    "megatron/options/ddp_options.py",
    "megatron/wrapper/process_groups.py",
)

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
    assert domain.axis == Axis("dp_cp", world, (0, 1, 2, 3), 2)
    assert domain.axis.size == 4
    assert domain.gather_group is domain.reduce_group is world
    assert domain.grad_scale == 0.25
    assert index.get_fsdp_group() is world
    assert index.get_dp_group() is world
    assert index.get_fsdp_group(independent_all_gather=True) is world
    assert index.get_outer_fsdp_group() is None
    assert domain.mesh.shape == (4,)


def test_gathers_kinds_and_tensor_parallelism_have_groups_of_their_own(world):
    second = dist.new_group([0, 1, 2, 3])
    half = dist.new_group([0, 2])
    alone = dist.new_group([2])
    index = index_of(world, fsdp_group_ag=second, expt_fsdp_group=half, tp_group=alone)
    assert index.get_fsdp_group(independent_all_gather=True) is second
    assert index.get_fsdp_group() is world
    assert index.domain(EXPERT).axis.ranks == (0, 2)
    assert index.domain(EXPERT).axis.rank == 1
    assert index.get_fsdp_group(is_expert_parallel=True) is half
    assert index.get_dp_group(is_expert_parallel=True) is half
    assert index.domain(EXPERT).grad_scale == index.domain(DENSE).grad_scale


def test_an_outer_axis_and_the_mesh_over_it():
    """8 ranks: outer 2 x shards 2 x tensor 2, tensor-parallel ranks being neighbors."""
    with pretended_world(8, rank=5):
        shard = dist.new_group([5, 7])
        outer = dist.new_group([1, 5])
        tensor = dist.new_group([4, 5])
        index = index_of(
            shard,
            outer_fsdp_group=outer,
            tp_group=tensor,
            dp_group=dist.new_group([1, 3, 5, 7]),
            hsdp_outer_dp_shard=True,
        )
        domain = index.domain(DENSE)
        assert domain.outer == Axis("outer_fsdp_dp", outer, (1, 5), 1)
        assert domain.outer_size == 2
        assert index.get_outer_fsdp_group() is outer
        assert index.hybrid_fsdp_group is outer
        assert dist.get_process_group_ranks(index.get_dp_group()) == [1, 3, 5, 7]
        assert domain.mesh.mesh_dim_names == ("outer_fsdp_dp", "dp_cp", "tp")
        assert domain.mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_models_on_other_ranks_have_meshes_of_the_same_names(world):
    """As with several modules of one model, or two models in a process."""
    halves = dist.new_group([0, 2]), dist.new_group([2, 3])
    outer = dist.new_group([0, 2])
    one = index_of(halves[0])
    other = index_of(halves[1], outer_fsdp_group=outer)
    again = index_of(halves[0])
    first, second, third = (index.domain(DENSE).mesh for index in (one, other, again))
    assert first.mesh.tolist() == [0, 2]
    assert third.mesh.tolist() == [0, 2]
    assert second["dp_cp"].mesh.tolist() == [2, 3]
    assert second.mesh_dim_names == ("outer_fsdp_dp", "dp_cp")
    assert first.get_group("dp_cp") is halves[0]
    assert second.get_group("dp_cp") is halves[1]


def domain_of(world, ranks=(0, 1, 2, 3), outer=None):
    axis = dataclasses.replace(Axis.of("dp_cp", world), ranks=ranks)
    if outer is not None:
        outer = Axis("outer_fsdp_dp", world, outer, 0)
    mesh = index_of(world).domain(DENSE).mesh
    return ShardDomain(DENSE, axis, world, world, mesh, 1.0, outer)


def _an_outer_group_has_one_rank_in_common_with(world):
    return domain_of(world, outer=(2, 3))


def _ranks_come_in_the_order_of_the_group(world):
    return domain_of(world, ranks=(1, 0, 2, 3))


def _groups_make_a_mesh(world):
    return index_of(world, tp_group=dist.new_group([2, 3]))


def _a_kind_has_a_group(world):
    return index_of(world).get_fsdp_group(is_expert_parallel=True)


def _a_collection_has_the_shard_group(world):
    return build_index(groups_of(SimpleNamespace()), device=CPU, grad_scale_of=float)


BAD = {
    "an outer group has one rank in common with the shards": (
        _an_outer_group_has_one_rank_in_common_with,
        r"outer group .*\[2, 3\].*\[0, 1, 2, 3\].*no other",
    ),
    "ranks come in the order of the group": (
        _ranks_come_in_the_order_of_the_group,
        "same ranks in the same order",
    ),
    "groups make a mesh": (
        _groups_make_a_mesh,
        r"'dp_cp': \[0, 1, 2, 3\], 'tp': \[2, 3\].* do not make a mesh",
    ),
    "a kind has a group": (
        _a_kind_has_a_group,
        r"kind 'expert'.*\['dense'\].*expt_dp",
    ),
    "a collection has the shard group": (
        _a_collection_has_the_shard_group,
        r"pg_collection\.dp_cp is missing",
    ),
}


def _gathered_by(ranks, world):
    return index_of(world, fsdp_group_ag=dist.new_group(ranks))


def _scaled_by(scale, world):
    return index_of(world, grad_scale=scale)


for ranks in ("0, 2", "0, 1, 2"):
    numbers = [int(rank) for rank in ranks.split(", ")]
    BAD[f"ranks [{ranks}] do not gather what four have"] = (
        partial(_gathered_by, numbers),
        rf"gather group of the dense .* ranks \[{ranks}\].*on ranks \[0, 1, 2, 3\]",
    )
for scale in (0.0, -1.0, float("nan")):
    BAD[f"a gradient scale of {scale}"] = (partial(_scaled_by, scale), "grad_scale")


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
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
    )
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


BF16 = torch.bfloat16
FP32 = torch.float32
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
CONFIGS: list[tuple[dict[str, Any], dict[str, Any]]] = []
"""Options, and fields of the engine's configuration that they give."""
for strategy, row in STRATEGIES.items():
    changes: dict[str, Any] = {"data_parallel_sharding_strategy": strategy}
    changes.update(dict.fromkeys(OVERLAPS, False))
    forced = (row.shard_grads, row.shard_weights)
    CONFIGS.append((changes, dict(zip(OVERLAPS, forced, strict=True))))
for fusion, average in itertools.product((False, True), repeat=2):
    changes = {"gradient_reduce_div_fusion": fusion, "average_in_collective": average}
    CONFIGS.append((changes, {"scale_before_sum": not fusion and not average}))
for strategy, grads in (("optim", None), ("optim_grads", FP32), ("optim_grads_params", None)):
    changes = {
        "data_parallel_sharding_strategy": strategy,
        "megatron_fsdp_main_grads_dtype": grads,
        "reduce_scatter_with_fp32_accumulation": True,
        "megatron_fsdp_grad_comm_dtype": BF16,
    }
    CONFIGS.append((changes, {"reduce_scatter": ALL_TO_ALL_SUM}))
# Experts with a strategy of their own, which may need an overlap that the other does not.
for strategy, row in STRATEGIES.items():
    changes = dict.fromkeys(OVERLAPS, False)
    changes |= {
        "data_parallel_sharding_strategy": "no_shard",
        "expert_data_parallel_sharding_strategy": strategy,
    }
    expected = dict(zip(OVERLAPS, (row.shard_grads, row.shard_weights), strict=True))
    CONFIGS.append((changes, expected | {"domain_strategies": ((EXPERT, row),)}))
# Replicas of experts that split shards again, or not.
for outer, splits in OUTER_STRATEGIES.items():
    changes = {
        "num_distributed_optimizer_instances": 2,
        "outer_dp_sharding_strategy": "optim",
        "expert_outer_dp_sharding_strategy": outer,
    }
    CONFIGS.append((changes, {"shard_outer": True, "domain_shard_outer": ((EXPERT, splits),)}))
# Sums in float32, of experts alone.
changes = {
    "data_parallel_sharding_strategy": "no_shard",
    "expert_data_parallel_sharding_strategy": "optim",
    "reduce_scatter_with_fp32_accumulation": True,
    "megatron_fsdp_grad_comm_dtype": BF16,
}
CONFIGS.append((changes, {"reduce_scatter": ALL_TO_ALL_SUM}))
# Any dtypes, with any strategy.
for strategy in STRATEGIES:
    for dtypes in itertools.product((None, FP32, BF16), repeat=3):
        policy = MixedPrecisionPolicy(*dtypes)
        changes = {f"megatron_fsdp_{name}": dtype for name, dtype in vars(policy).items()}
        changes["data_parallel_sharding_strategy"] = strategy
        CONFIGS.append((changes, {"policy": policy}))


@pytest.mark.parametrize(("changes", "expected"), CONFIGS)
def test_what_the_engine_is_told(changes, expected):
    """Overlaps that a strategy needs are forced, and gradients scaled before the sum where neither
    option says otherwise."""
    config = good(**changes)
    assert problems(config, DDP_CONFIG_RULES) == []
    told = engine_config(config)
    assert {name: getattr(told, name) for name in expected} == expected


PAIRS = list(itertools.product(STRATEGIES.values(), repeat=2))


@pytest.mark.parametrize(("dense", "expert"), PAIRS)
def test_groups_of_a_domain_have_its_strategy(dense, expert):
    """Also in a unit that keeps more, and if one rank has all of the domain."""
    config = EngineConfig(dense, domain_strategies=((EXPERT, expert),))
    assert config.for_group(None, DENSE).strategy == dense
    assert config.for_group(None, EXPERT).strategy == expert
    assert set(config.strategies) == {dense, expert}
    rows = list(STRATEGIES.values())
    for domain, own in ((DENSE, dense), (EXPERT, expert)):
        for number in (1, 2, 3):  # of a unit with groups that shard main weights
            least = rows[min(rows.index(own), number)]
            assert config.for_group(rows[number], domain).strategy == least
    if expert.shard_grads:
        alone = dataclasses.replace(config, whole=(EXPERT,))
        assert alone.for_group(None, EXPERT).strategy == STRATEGIES["optim"]


@pytest.mark.parametrize(
    ("way", "row", "kept"),
    [
        (ALL_TO_ALL_SUM, "no_shard", False),
        (ALL_TO_ALL_SUM, "optim", True),
        (FIXED_ALL_TO_ALL_SUM, "optim", False),
        (FIXED_ALL_TO_ALL_SUM, "optim_grads", True),
    ],
)
def test_a_domain_without_shards_is_reduced_without_what_needs_them(way, row, kept):
    """Experts, and dense parameters beside sharded experts."""
    policy = MixedPrecisionPolicy(grad_comm_dtype=BF16)
    expected = way if kept else REDUCE_SCATTER
    sharded = STRATEGIES["optim_grads_params"]
    for dense, expert in ((sharded, STRATEGIES[row]), (STRATEGIES[row], sharded)):
        config = EngineConfig(
            dense, policy, domain_strategies=((EXPERT, expert),), reduce_scatter=way
        )
        found = {dense: DENSE, expert: EXPERT}
        assert config.for_group(None, found[STRATEGIES[row]]).reduce_scatter is expected
        assert config.for_group(None, found[sharded]).reduce_scatter is way


@pytest.mark.parametrize("own", [None, False, True])
@pytest.mark.parametrize("every", [False, True])
def test_groups_of_a_domain_are_split_over_its_outer_axis(every, own):
    """As the option says for all, or for the domain."""
    apart = () if own is None else ((EXPERT, own),)
    config = EngineConfig(STRATEGIES["optim"], shard_outer=every, domain_shard_outer=apart)
    assert config.for_group(None, DENSE).shard_outer is every
    assert config.for_group(None, EXPERT).shard_outer is (every if own is None else own)


SUMS = "reduce_scatter=all_to_all_sum with"
REFUSED: list[tuple[str, Callable[[], Any]]] = []
for strategy, option in (
    ("optim_grads", "overlap_grad_reduce"),
    ("optim_grads_params", "overlap_grad_reduce"),
    ("optim_grads_params", "overlap_param_gather"),
):
    make = partial(EngineConfig, STRATEGIES[strategy], **{option: False})
    REFUSED.append((f"{option}=False with {strategy}.*Set {option}=True", make))
for strategy, comm, grads in (
    ("no_shard", BF16, None),
    ("optim", None, None),
    ("optim", BF16, BF16),
):
    policy = MixedPrecisionPolicy(main_grads_dtype=grads, grad_comm_dtype=comm)
    make = partial(EngineConfig, STRATEGIES[strategy], policy, reduce_scatter=ALL_TO_ALL_SUM)
    REFUSED.append((SUMS, make))
REFUSED += [
    (
        "grad_comm_dtype=torch.float16: unsupported. Use one of",
        partial(MixedPrecisionPolicy, grad_comm_dtype=torch.float16),
    ),
    ("device=meta: only 'cuda' and 'cpu'", partial(make_runtime, torch.device("meta"))),
    ("data_parallel_sharding_strategy='zero3': unknown", partial(strategy_named, "zero3")),
    (
        "strategy new: shard_weights=True with shard_grads=False",
        partial(Strategy, "new", shard_weights=True, shard_grads=False, shard_main=True),
    ),
    (
        "strategy new: shard_grads=True with shard_main=False",
        partial(Strategy, "new", shard_weights=False, shard_grads=True, shard_main=False),
    ),
    (
        "strategy optim of a unit of a model with no_shard: one of them shards main weights",
        partial(EngineConfig(STRATEGIES["no_shard"]).for_unit, STRATEGIES["optim"]),
    ),
    (
        "bucket_size=5 and num_buckets=2 are mutually exclusive",
        partial(OurConfig, bucket_size=5, num_buckets=2),
    ),
]


@pytest.mark.parametrize(("message", "make"), REFUSED)
def test_what_does_not_go_together_is_refused(message, make):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, MixedPrecisionPolicy()),
        ({"grad_reduce_in_fp32": True}, MixedPrecisionPolicy(FP32, FP32, FP32)),
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


OLDER = {"grad_reduce_in_fp32": True}
CONTRADICTIONS = [
    ({"preserve_fp32_weights": True}, None),
    ({"preserve_fp32_weights": False}, "preserve_fp32_weights"),
    ({**OLDER, "megatron_fsdp_grad_comm_dtype": BF16}, "grad_reduce_in_fp32"),
    ({**OLDER, "megatron_fsdp_main_grads_dtype": FP32}, None),
    ({"grad_reduce_in_fp32": False, "megatron_fsdp_grad_comm_dtype": BF16}, None),
]


@pytest.mark.parametrize(("changes", "refused"), CONTRADICTIONS)
def test_contradictions_of_old_and_new_names_are_refused(changes, refused):
    config = OurConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        **changes,
    )
    found = [line.split("=")[0] for line in problems(config, DDP_CONFIG_RULES)]
    assert found == ([] if refused is None else [refused])


def test_dtypes_default_to_float32():
    policy = MixedPrecisionPolicy()
    assert policy.grads_dtype == FP32
    assert policy.comm_dtype == FP32
    assert policy.main_params_dtype == FP32
    assert MixedPrecisionPolicy(main_grads_dtype=BF16).comm_dtype == BF16
