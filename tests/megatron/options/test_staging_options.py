"""Options of fixed and registered buffers: what they ask of the engine, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.distributed_index import FSDPDistributedIndex
from megatron_fsdp_adapter.core.topology import DENSE, EXPERT
from megatron_fsdp_adapter.megatron.options import staging_options, table
from megatron_fsdp_adapter.megatron.options.ddp_options import engine_config
from megatron_fsdp_adapter.megatron.options.rules import problems
from megatron_fsdp_adapter.megatron.wrapper.domains import read_index
from tests.lib.engine.pretended import pretended_world
from tests.lib.gpt.gpt import Case, ddp_config, model_config

CHECKS = ("megatron/options/staging_options.py", "megatron/options/ddp_options.py")

CASE = Case(num_layers=4, hidden=12, heads=2, ffn=20, vocab=23)
ZERO_3 = "optim_grads_params"
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
CE = table.CE_ALL_GATHER
CE_RS = table.CE_REDUCE_SCATTER


def config(strategy: str = ZERO_3, **options: Any) -> Any:
    return ddp_config(CASE, strategy, options)


SLOTS: list[Any] = [
    ({}, (False, False)),
    ({"fsdp_double_buffer": True}, (True, True)),
    ({"nccl_ub": True}, (True, True)),
    ({"megatron_fsdp_max_pool_double_buffer": True}, (True, True)),
    ({CE: True}, (True, False)),
    ({CE: True, "nccl_ub": True}, (True, True)),
    ({CE_RS: True}, (False, True)),
    ({CE: True, CE_RS: True}, (True, True)),
]
"""Options, and whether weights and buckets are in slots."""


@pytest.mark.parametrize(("options", "slots"), SLOTS)
def test_which_buffers_are_in_slots(options, slots):
    found = engine_config(config(**options))
    assert (found.weight_slots, found.bucket_slots) == slots
    assert found.reduce_scatter.fixed == bool(options.get(CE_RS))


@pytest.mark.parametrize("option", ["nccl_ub", CE, CE_RS])
def test_registration_is_between_the_ranks_of_one_instance(option):
    """Several optimizer instances register side by side, over groups that have no rank in common:
    none waits for another."""
    seen = []
    for rank in range(4):
        with pretended_world(4, rank):
            instances = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            index = FSDPDistributedIndex(
                instances[rank // 2],
                device_type="cpu",
                grad_scale=0.25,
                outer_fsdp_group=across[rank % 2],
            )
            memory = staging_options.slot_memory(config(**{option: True}), index, CPU)
            assert memory is not None
            seen.append([tuple(dist.get_process_group_ranks(g)) for g in memory._groups])
    assert seen == [[(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)]]


@pytest.mark.parametrize(
    ("dense", "experts", "kinds"),
    [
        ("optim", "optim_grads_params", [EXPERT]),
        ("optim_grads_params", "optim", [DENSE]),
        ("optim_grads_params", None, [DENSE, EXPERT]),
    ],
)
@pytest.mark.parametrize("option", [CE, CE_RS])
def test_copy_engines_move_what_is_sharded(option, dense, experts, kinds):
    """Of dense parameters or of experts, if these have another strategy."""
    chosen = config(dense, **{option: True, table.EXPERT_STRATEGY: experts})
    with pretended_world(4, 0):
        groups = {DENSE: dist.group.WORLD, EXPERT: dist.new_group([0, 2])}
        index = FSDPDistributedIndex(
            groups[DENSE], expt_fsdp_group=groups[EXPERT], device_type="cpu", grad_scale=0.25
        )
        memory = staging_options.slot_memory(chosen, index, CPU)
        assert memory._groups == [groups[kind] for kind in kinds]
    suffix = staging_options.ROLES[option]
    for kind in groups:
        made = staging_options.copy_engine_roles(chosen, kind)
        assert made == ([suffix] if kind in kinds else [])
    assert "not sharded" not in str(problems(chosen, table.DDP_CONFIG_RULES))


def test_copy_engines_take_no_gather_groups_of_the_caller(one_rank):
    groups = SimpleNamespace(dp_cp=dist.group.WORLD, dp_cp_ag=dist.group.WORLD)
    model = torch.nn.Linear(2, 2)
    _, (line,) = read_index(model, model_config(CASE), config(**{CE: True}), CUDA, groups)
    assert line.startswith(f"{CE}=True: ")
    assert "Leave them out, and the wrapper makes" in line
