"""The table of domains and parameters."""

from __future__ import annotations

from collections import Counter

from megatron_fsdp_adapter.diagnostics.description import param_rows, ranks_text
from tests.distributed.launch import run_ranks
from tests.distributed.topologies import (
    TOPOLOGIES,
    build_topology_trainer,
    case_for,
    init_topology,
)


def _described(rank: int, world: int) -> str:
    topology = TOPOLOGIES["ep2-etp2"]
    init_topology(topology)
    [wrapper] = build_topology_trainer(topology, case_for(topology), "optim_grads_params").chunks
    rows = param_rows(wrapper.engine)
    names = Counter(name for row in rows for name in row["parameter"].split(" = "))
    expected = {name for name, _ in wrapper.module.module.named_parameters(remove_duplicate=False)}
    assert set(names) == expected and set(names.values()) == {1}
    assert {row["domain"] for row in rows} == {"dense", "expert"}
    for row in rows:
        assert (row["domain"] == "expert") == (".experts." in row["parameter"]), row
    split = {row["tensor parallel"] for row in rows}
    assert split == {"column", "row", "replicated"}
    return wrapper.describe()


def test_every_parameter_is_in_one_domain_of_the_table() -> None:
    text = run_ranks(_described, 4)[0]
    print(text)
    domains, params = text.split("\n\n")[1:]
    assert domains.splitlines()[1].split()[0] == "dense"
    assert "dp_cp 2 x tp 2" in domains and "0 2" in domains and "0.5" in domains
    line = next(line for line in params.splitlines() if "local_experts.0.linear_fc2.weight" in line)
    assert line.split()[1] == "expert" and " row " in line
    widths = {len(row) for row in params.splitlines()}
    assert max(widths) < 160


def test_long_lists_of_ranks_are_abbreviated() -> None:
    assert ranks_text([0, 2, 4]) == "0 2 4"
    assert ranks_text(range(0, 64, 4)) == "0 4 .. 60 (16)"
