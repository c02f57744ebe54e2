"""Megatron-LM's --create-all-gather-group: the second communicator is used for gathers. From 0.18
on `parallel_state` has none, and they are in a ProcessGroupCollection alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from megatron.core import parallel_state

from megatron_fsdp_adapter.core.topology import DENSE
from megatron_fsdp_adapter.megatron.process_groups import build_index, groups_from_parallel_state

OPTION = "create_all_gather_group"
CAN_MAKE = OPTION in inspect.signature(parallel_state.initialize_model_parallel).parameters


@pytest.fixture(params=(True, False) if CAN_MAKE else (False,))
def has_group(four_fake_ranks: None, request: pytest.FixtureRequest) -> Iterator[bool]:
    options = {OPTION: request.param} if CAN_MAKE else {}
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **options)
    yield request.param
    parallel_state.destroy_model_parallel()


def test_dense_weights_are_gathered_on_it(has_group: bool) -> None:
    groups = groups_from_parallel_state()
    assert (groups["fsdp_group_ag"] is not None) == has_group
    assert groups["fsdp_group_ag"] is not groups["fsdp_group"]
    index = build_index(groups, device=torch.device("cpu"), grad_scale_of=lambda ranks: 1 / ranks)
    domain = index.domain(DENSE)
    wanted = groups["fsdp_group_ag"] if has_group else groups["fsdp_group"]
    assert domain.gather_group is wanted
