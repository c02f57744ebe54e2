"""What Megatron sets on process groups (SHARP, NCCL configurations, streams of high priority) holds
for the wrapper: it communicates on Megatron's own groups and makes no others unless asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.core.topology import DENSE
from tests.distributed.gpt import STRATEGIES, Case, build_model, ddp_config

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23)


def _noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The groups that are made from now on."""
    made: list[Any] = []
    new_group = dist.new_group

    def note(*args: Any, **options: Any) -> Any:
        made.append(new_group(*args, **options))
        return made[-1]

    monkeypatch.setattr(dist, "new_group", note)
    return made


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("passed", [True, False])
def test_gathers_and_reductions_run_on_the_groups_of_megatron(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch, strategy: str, passed: bool
) -> None:
    made = _noted(monkeypatch)
    collection = ProcessGroupCollection.use_mpu_process_groups() if passed else None
    model = build_model(CASE, one_rank)
    wrapper = FullyShardedDataParallel(
        model.config, ddp_config(CASE, strategy), model, pg_collection=collection
    )
    domain = wrapper.megatron_fsdp_dist_index.domain(DENSE)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert domain.gather_group is group and domain.reduce_group is group
    assert not made


def test_a_group_is_made_where_one_is_asked_for(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, model = _noted(monkeypatch), build_model(CASE, one_rank)
    config = ddp_config(CASE, "optim_grads_params", {"create_all_gather_group": True})
    wrapper = FullyShardedDataParallel(model.config, config, model)
    assert wrapper.megatron_fsdp_dist_index.domain(DENSE).gather_group in made
