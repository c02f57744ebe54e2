"""Programs are timed as streams, events, communicators and the host allow."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from megatron_fsdp_adapter.tools.planning.machine import (
    GPUS,
    NETWORKS,
    Group,
    Machine,
    collective_seconds,
)
from megatron_fsdp_adapter.tools.planning.program import Kind, Operation, Program
from megatron_fsdp_adapter.tools.planning.timing import HOST, simulate, time_windows

CHECKS = ("tools/planning/timing.py", "tools/planning/machine.py", "tools/planning/program.py")

ALONE = {one.name: 1.0 for one in fields(Machine) if "_beside_" in one.name}
GPU = replace(GPUS["h200"], memory_tbps=1.0, product_tflops=1.0, kernel_us=1e-9, sustained=1.0)
MACHINE = Machine(GPU, NETWORKS["nvlink4-ib400"], host=1.0, **ALONE)
PAIR = {"dense": Group(2, 2)}
MS = 1e9
"""Amount of a product, or of a pass, that takes a millisecond on that GPU."""


def timed(*operations: Operation, machine: Machine = MACHINE):
    program = Program(operations, (("step", 0), ("end", len(operations))))
    state, _ = simulate(program, machine, PAIR)
    [(seconds, spent)] = time_windows(program, machine, PAIR, [("step", 0)])
    return {"ends": state.ends, "seconds": seconds, "spent": spent}


def product(amount: float = MS, **given) -> Operation:
    return Operation("compute", Kind.PRODUCT, amount, part="forward", **given)


def gather(nbytes: float, **given) -> Operation:
    return Operation("gather", Kind.ALL_GATHER, nbytes, group="dense", channel="dense", **given)


def memory(role: str = "gather", amount: float = MS, **given) -> Operation:
    return Operation(role, Kind.MEMORY, amount, part="optimizer", **given)


REDUCE = Operation("reduce", Kind.REDUCE_SCATTER, 1e9, group="dense", channel="dense")
ALONE_S = timed(gather(1e8))["ends"][0]
LONG_S = timed(gather(1e9))["ends"][0]
SLOWED = replace(MACHINE, product_beside_nccl=2.0)
HOT = replace(MACHINE, gpu=replace(GPU, sustained=1.1, busy=0.5))
TIMES = {
    "one thing after the other on a stream, and streams at once": (
        (product(), memory(), product()),
        MACHINE,
        {"ends": [1e-3, 1e-3, 2e-3]},
    ),
    "what waits for an event begins behind it": (
        (product(), memory(after=(0,)), product(after=(1,))),
        MACHINE,
        {"ends": [1e-3, 2e-3, 3e-3]},
    ),
    "collectives of one communicator one after the other, on whatever stream": (
        (gather(1e9), REDUCE),
        MACHINE,
        {"ends": [LONG_S, 2 * LONG_S]},
    ),
    "collectives of two communicators at once": (
        (gather(1e9), replace(REDUCE, channel="other")),
        MACHINE,
        {"ends": [LONG_S, LONG_S]},
    ),
    "things that run at once slow each other as long as they do": (
        (product(2 * MS), gather(1e8)),
        SLOWED,
        {"ends": [2e-3 + ALONE_S / 2, ALONE_S]},
    ),
    "nothing runs before the host has launched it, and that time is told": (
        (product(), product(host=5000.0)),
        MACHINE,
        {"ends": [1e-3, 6e-3], "spent": {"forward": 2e-3, "products": 2e-3, HOST: 4e-3}},
    ),
    "a slow host": (
        (product(), product(host=5000.0)),
        replace(MACHINE, host=2.0),
        {"ends": [1e-3, 11e-3]},
    ),
    "exposed communication is what nothing of compute runs beside": (
        (product(), gather(1e9), product(after=(1,))),
        MACHINE,
        {"spent": {"forward": 2e-3, "products": 2e-3, "exposed all-gather": LONG_S - 1e-3}},
    ),
    "products that are all that runs meet the limit of power": (
        (product(10 * MS),),
        HOT,
        {"seconds": 11e-3},
    ),
    "products among other things do not": (
        (product(10 * MS), memory("compute", 30 * MS)),
        HOT,
        {"seconds": 40e-3},
    ),
}
"""Operations, the machine, and what is found."""


@pytest.mark.parametrize("name", TIMES)
def test_times(name):
    operations, machine, expected = TIMES[name]
    found = timed(*operations, machine=machine)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value), key


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
