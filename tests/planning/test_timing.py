"""Programs are timed as streams, events, communicators and the host allow."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from megatron_fsdp_adapter.planning.machine import (
    GPUS,
    NETWORKS,
    Contention,
    Group,
    Machine,
    collective_seconds,
    machine_named,
)
from megatron_fsdp_adapter.planning.program import Kind, Operation, Program
from megatron_fsdp_adapter.planning.timing import HOST, time_program

ALONE = Contention(*[1.0] * len(fields(Contention)))
GPU = replace(GPUS["h200"], memory_tbps=1.0, product_tflops=1.0, kernel_us=1e-9, sustained=1.0)
MACHINE = Machine(GPU, NETWORKS["nvlink4-ib400"], ALONE, host=1.0)
PAIR = {"dense": Group(2, 2)}
MS = 1e9
"""Amount of a product, or of a pass, that takes a millisecond on that GPU."""


def timed(*operations: Operation, machine: Machine = MACHINE):
    marks = (("step", 0), ("end", len(operations)))
    return time_program(Program(operations, marks), machine, PAIR, window=("step", 0))


def product(amount: float = MS, **given) -> Operation:
    return Operation("compute", Kind.PRODUCT, amount, part="forward", **given)


def gather(nbytes: float, **given) -> Operation:
    return Operation("gather", Kind.ALL_GATHER, nbytes, group="dense", channel="dense", **given)


def test_a_stream_runs_one_thing_after_the_other_and_streams_run_at_once():
    both = timed(product(), Operation("gather", Kind.MEMORY, MS), product())
    assert both.starts == pytest.approx([0.0, 0.0, 1e-3])
    assert both.ends == pytest.approx([1e-3, 1e-3, 2e-3])


def test_what_waits_for_an_event_begins_behind_it():
    found = timed(product(), Operation("gather", Kind.MEMORY, MS, after=(0,)), product(after=(1,)))
    assert found.starts == pytest.approx([0.0, 1e-3, 2e-3])


def test_collectives_of_one_communicator_run_one_after_the_other_on_whatever_stream():
    first = gather(1e9)
    second = Operation("reduce", Kind.REDUCE_SCATTER, 1e9, group="dense", channel="dense")
    found = timed(first, second)
    assert found.starts[1] == pytest.approx(found.ends[0])
    apart = timed(first, replace(second, channel="other"))
    assert apart.starts[1] == 0.0


def test_things_that_run_at_once_slow_each_other_as_long_as_they_do():
    slower = replace(MACHINE, contention=replace(ALONE, product_beside_nccl=2.0))
    alone = timed(gather(1e8)).ends[0]
    found = timed(product(2 * MS), gather(1e8), machine=slower)
    assert found.ends[1] == pytest.approx(alone)
    assert found.ends[0] == pytest.approx(2e-3 + alone / 2)


def test_nothing_runs_before_the_host_has_launched_it_and_that_time_is_told():
    found = timed(product(), product(host=5000.0))
    assert found.starts[1] == pytest.approx(5e-3)
    assert found.spent[HOST] == pytest.approx(4e-3)
    slow = timed(product(), product(host=5000.0), machine=replace(MACHINE, host=2.0))
    assert slow.starts[1] == pytest.approx(10e-3)


def test_exposed_communication_is_what_nothing_of_compute_runs_beside():
    found = timed(product(), gather(1e9), product(after=(1,)))
    assert found.spent["exposed all-gather"] == pytest.approx(found.starts[2] - 1e-3)


def test_products_that_are_all_that_runs_meet_the_limit_of_power():
    hot = replace(MACHINE, gpu=replace(GPU, sustained=1.1, busy=0.5))
    assert timed(product(10 * MS), machine=hot).seconds == pytest.approx(11e-3)
    idle = Operation("compute", Kind.MEMORY, 30 * MS, part="optimizer")
    assert timed(product(10 * MS), idle, machine=hot).seconds == pytest.approx(40e-3)


def test_a_program_that_waits_for_itself_is_an_error():
    with pytest.raises(RuntimeError, match="circular dependency"):
        timed(product(after=(0,)))


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE])
@pytest.mark.parametrize("group", [Group(2, 2), Group(8, 8), Group(64, 8), Group(4096, 1)])
def test_more_bandwidth_is_never_slower_and_more_bytes_are_never_faster(kind, group):
    network = NETWORKS["nvlink4-ib400"]
    links = {ranks: 2 * gbps for ranks, gbps in network.link_gbps.items()}
    faster = replace(network, link_gbps=links, rail_gbps=2 * network.rail_gbps)
    for nbytes in (1e3, 1e6, 1e9):
        now = collective_seconds(kind, nbytes, group, network)
        assert collective_seconds(kind, nbytes, group, faster) <= now
        assert collective_seconds(kind, 2 * nbytes, group, network) >= now
    assert collective_seconds(kind, 1e9, Group(1, 1), network) == 0.0


def test_a_name_that_is_no_machine_is_an_error():
    with pytest.raises(ValueError, match="--gpu 'v100' is unknown"):
        machine_named("v100")


def test_every_row_of_the_tables_says_where_it_is_from():
    assert all(row.source for table in (GPUS, NETWORKS) for row in table.values())
