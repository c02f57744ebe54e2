"""Reports about a wrapper: the table of its domains and parameters, and the report of a failure."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.build import building, fault_report
from megatron_fsdp_adapter.build.description import param_rows
from megatron_fsdp_adapter.build.fault_report import CommunicationError
from megatron_fsdp_adapter.core.comm import communicator as comm
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.lib.gpt.topologies import TOPOLOGIES, build_topology_trainer, case_for, init_topology
from tests.lib.plain.plain import Block, Net
from tests.lib.ranks.launch import run_ranks

CHECKS = ("build/description.py", "build/fault_report.py")


def _described(rank: int, world: int) -> str:
    topology = TOPOLOGIES["ep2-etp2"]
    init_topology(topology)
    [wrapper] = build_topology_trainer(topology, case_for(topology), "optim_grads_params").chunks
    rows = param_rows(wrapper.engine)
    names = Counter(name for row in rows for name in row["parameter"].split(" = "))
    expected = {name for name, _ in wrapper.module.module.named_parameters(remove_duplicate=False)}
    assert set(names) == expected
    assert set(names.values()) == {1}
    assert {row["domain"] for row in rows} == {"dense", "expert"}
    for row in rows:
        assert (row["domain"] == "expert") == (".experts." in row["parameter"]), row
    assert {row["tensor parallel"] for row in rows} == {"column", "row", "replicated"}
    return wrapper.describe()


def test_every_parameter_is_in_one_domain_of_the_table() -> None:
    domains, params = run_ranks(_described, 4)[0].split("\n\n")[1:]
    assert "dp_cp 2 x tp 2" in domains
    assert "0 2" in domains
    assert "0.5" in domains
    assert re.search(r"local_experts\.0\.linear_fc2\.weight +expert .* row ", params)


# The report of a failure raises nothing of its own.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_broadcast_that_fails_after_the_first_unit_is_named(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Before: "data_ptr reads parameter ..., whose weights are not gathered", an error of the
    error's own, since looking for the name read parameters of units that were resharded."""
    monkeypatch.setitem(comm.STREAM_ORDERED, "fake", True)
    monkeypatch.setattr(building, "verify_same_model", lambda *_: None)
    monkeypatch.setattr(fault_report, "timeout_of", lambda *_: 60.0)
    carried: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        carried.append(tensor)
        if len(carried) == 15:  # the second parameter of the third block
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist, "broadcast", broadcast)
    with pytest.raises(CommunicationError) as caught:
        fully_shard_model(
            Net(), None, [Block, torch.nn.Embedding], data_parallel_sharding_strategy=strategy
        )
    text = str(caught.value)
    assert "broadcasting weights of parameter blocks.2.norm.bias of unit blocks.2 at" in text, text
    assert "Connection reset by peer" in text
