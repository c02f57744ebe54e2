"""A bad argument is one ValueError before any collective, naming option, value and remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.core.comm import communicator as comm
from tests.lib.gpt.gpt import Case, ddp_config, model_config

CHECKS = ("megatron/wrapper/problems.py", "megatron/wrapper/arguments.py", "core/problems.py")

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "recv",
)  # fmt: skip


class CollectiveError(Exception):
    """A collective was about to run."""


@pytest.fixture(autouse=True)
def no_collectives(monkeypatch: pytest.MonkeyPatch, four_fake_ranks: None) -> Iterator[None]:
    """Every collective raises; the fake backend counts as one that can do everything."""

    def refuse(*_: Any, **__: Any) -> None:
        raise CollectiveError

    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, refuse)
        monkeypatch.setattr(dist.distributed_c10d, name, refuse)
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(comm, name, refuse)
    monkeypatch.setitem(comm.STREAM_ORDERED, "fake", True)
    yield
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def groups(**ranks: list[int] | None) -> ProcessGroupCollection:
    """A collection for a world of four data-parallel ranks, with some groups replaced, or without
    those that are None."""
    everyone = [0, 1, 2, 3]
    alone = [0]
    chosen = {
        "dp": everyone,
        "dp_cp": everyone,
        "intra_dp_cp": everyone,
        "expt_dp": everyone,
        "tp": alone,
        "pp": alone,
        "cp": alone,
        "ep": alone,
        "mp": alone,
        **ranks,
    }
    collection = ProcessGroupCollection()
    for name, members in chosen.items():
        if members is not None:
            setattr(collection, name, dist.new_group(members))
    return collection


def frozen() -> nn.Module:
    return nn.Linear(3, 3).requires_grad_(False)


def compiled_in_place() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    module[0].compile(backend="eager")
    return module


def compiled() -> nn.Module:
    return nn.Sequential(torch.compile(nn.Linear(3, 3)))


def partly_on_meta() -> nn.Module:
    there = nn.Linear(3, 3, device="meta")
    return nn.ModuleDict({"here": nn.Linear(3, 3), "there": there})


def with_an_expert() -> nn.Module:
    experts = nn.ModuleList([nn.Linear(3, 3)])
    return nn.ModuleDict({"experts": experts})


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.GELU(), nn.Linear(3, 3))


@dataclass(frozen=True)
class Bad:
    """Arguments that differ from good ones, and what the error must say."""

    says: tuple[str, ...]
    ddp: dict[str, Any] = field(default_factory=dict)
    module: Callable[[], nn.Module] = model
    ranks: dict[str, Any] | None = field(default_factory=dict)
    """Of groups that are not the good ones, None for a group that is missing. None: no groups."""
    options: dict[str, Any] = field(default_factory=dict)


BAD: dict[str, Bad] = {}
BAD["several optimizer instances in groups of one"] = Bad(
    ("num_distributed_optimizer_instances=2", "4 ranks [0, 1, 2, 3]", "shard group"),
    ddp={"num_distributed_optimizer_instances": 2},
)
BAD["several optimizer instances without a group across them"] = Bad(
    ("num_distributed_optimizer_instances=2", "inter_dist_opt", "has ranks []", "Initialize"),
    ddp={"num_distributed_optimizer_instances": 2},
    ranks={"intra_dp_cp": [0, 1], "intra_expt_dp": [0, 1]},
)
BAD["an outer group that is no outer group"] = Bad(
    ("outer_fsdp_dp", "[0, 1]", "do not make a mesh"),
    ddp={"num_distributed_optimizer_instances": 2},
    ranks={"intra_dp_cp": [0, 1], "intra_expt_dp": [0, 1], "inter_dist_opt": [0, 1]},
)
BAD["groups made for several optimizer instances"] = Bad(
    ("num_distributed_optimizer_instances=1", "[0, 1]", "[0, 1, 2, 3]", "Initialize"),
    ranks={"intra_dp_cp": [0, 1]},
)
BAD["so many replicas of experts as ranks cannot make"] = Bad(
    ("expert_num_distributed_optimizer_instances=3", "4 ranks [0, 1, 2, 3] of expt_dp", "divisor"),
    ddp={"expert_num_distributed_optimizer_instances": 3},
)
BAD["replicas of experts without a group to split"] = Bad(
    ("expert_num_distributed_optimizer_instances=2", "but not expt_dp", "that has it"),
    ddp={"expert_num_distributed_optimizer_instances": 2},
    ranks={"expt_dp": None, "intra_expt_dp": [0, 1, 2, 3]},
)
BAD["no data-parallel group"] = Bad(
    ("pg_collection.dp_cp is missing", "Pass a ProcessGroupCollection that has it"),
    ranks={"dp_cp": None},
)
BAD["no groups at all"] = Bad(
    ("pg_collection=None", "parallel_state.initialize_model_parallel()"), ranks=None
)
BAD["a group without this rank"] = Bad(
    ("dp_cp", "rank 0 is not a member"),
    ranks={"dp_cp": [1, 2], "intra_dp_cp": [1, 2]},
)
BAD["gather group with other ranks"] = Bad(
    ("gather group of the dense parameters", "[0, 1]", "[0, 1, 2, 3]", "same order"),
    ranks={"dp_cp_ag": [0, 1]},
)
BAD["gather group of experts with other ranks"] = Bad(
    ("gather group of the expert parameters", "[0, 3]", "same ranks"),
    ranks={"expt_dp_ag": [0, 3]},
)
BAD["tensor-parallel group and size disagree"] = Bad(
    ("tensor_model_parallel_size=1", "tp process group has 2 ranks", "Initialize"),
    ranks={"tp": [0, 1], "dp_cp": [0, 2], "intra_dp_cp": [0, 2]},
)
BAD["pipeline group and size disagree"] = Bad(
    ("pipeline_model_parallel_size=1", "pp process group has 4 ranks"),
    ranks={"pp": [0, 1, 2, 3], "dp_cp": [0], "intra_dp_cp": [0]},
)
BAD["context-parallel group and size disagree"] = Bad(
    ("context_parallel_size=1", "cp process group has 2 ranks"),
    ranks={"cp": [0, 1]},
)
BAD["expert-parallel group and size disagree"] = Bad(
    ("expert_model_parallel_size=1", "ep process group has 2 ranks"),
    ranks={"ep": [0, 1]},
)
BAD["unit class that matches nothing"] = Bad(
    ("fsdp_unit_modules=['Conv2d']", "no module of Sequential is a Conv2d", "leave"),
    options={"fsdp_unit_modules": [nn.Conv2d]},
)
BAD["main weights of fewer bits than the parameters"] = Bad(
    ("main_params_dtype=torch.bfloat16", "0.weight is torch.float32", "or None"),
    ddp={"megatron_fsdp_main_params_dtype": torch.bfloat16},
)
BAD["no trainable parameter"] = Bad(
    ("module=Linear has no trainable parameter", "Set requires_grad"), module=frozen
)
BAD["no parameter"] = Bad(("module=GELU has no trainable parameter",), module=nn.GELU)
BAD["a parameter on the meta device"] = Bad(
    ("there.weight is on the meta device", "Set init_model_with_meta_device=True"),
    module=partly_on_meta,
)
BAD["another device than the parameters'"] = Bad(
    ("device=meta", "are on cpu", "leave the argument out"), options={"device": "meta"}
)
BAD["compiled module"] = Bad(
    ("compiled modules are not tested", "Wrap the original module"),
    module=compiled,
)
BAD["module compiled by its method"] = Bad(
    ("module 0: compiled modules are not tested", "Wrap the original module"),
    module=compiled_in_place,
)
BAD["expert parameters without a group for them"] = Bad(
    ("kind 'expert'", "Pass expt_dp"),
    ranks={"expt_dp": None},
    module=with_an_expert,
)


def wrap(bad: Bad) -> FullyShardedDataParallel:
    module = bad.module()
    collection = None
    if bad.ranks is not None:
        collection = groups(**bad.ranks)
    return FullyShardedDataParallel(
        model_config(Case()),
        ddp_config(Case(), "optim_grads_params", bad.ddp),
        module,
        pg_collection=collection,
        **bad.options,
    )


@pytest.mark.parametrize("name", BAD)
def test_bad_argument_is_an_early_error(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        wrap(BAD[name])
    for fragment in BAD[name].says:
        assert fragment in str(caught.value), (fragment, str(caught.value))


def test_good_arguments_reach_the_first_collective() -> None:
    """Without this the tests above would pass with a wrapper that refuses everything."""
    with pytest.raises(CollectiveError):
        wrap(Bad(()))


def test_all_problems_are_listed_at_once() -> None:
    bad = Bad(
        (),
        ddp={"data_parallel_sharding_strategy": "zero3", "fp8_param_gather": True},
        module=frozen,
        ranks={"dp_cp_ag": [0, 1], "ep": [0, 1]},
        options={"fsdp_unit_modules": [nn.Conv2d, nn.LSTM], "device": "meta"},
    )
    with pytest.raises(ValueError) as caught:
        wrap(bad)
    for fragment in (
        "zero3", "fp8_param_gather", "no trainable", "is a Conv2d",
        "is a LSTM",
        "device=meta", "ep process group has 2", "gather group",
    ):  # fmt: skip
        assert fragment in str(caught.value), (fragment, str(caught.value))


def test_parallel_state_and_config_disagree() -> None:
    """Without a collection the sizes come from parallel_state."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, create_gloo_process_groups=False
    )
    with pytest.raises(ValueError, match="tp process group has 2 ranks"):
        wrap(Bad((), ranks=None))


def test_a_refused_module_is_left_as_it_was() -> None:
    """The caller can mend the configuration and wrap the same module again."""
    module = model()
    before = [(id(param), param.data_ptr(), nn.Parameter) for param in module.parameters()]
    with pytest.raises(ValueError):
        wrap(Bad((), ddp={"fp8_param_gather": True}, module=lambda: module))
    after = [(id(param), param.data_ptr(), type(param)) for param in module.parameters()]
    assert after == before
    assert not module._forward_pre_hooks
    assert module.half() is module
