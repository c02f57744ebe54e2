"""Rows of docs/performance.md, predicted and measured: `python scripts/plan_against_measured.py`.

Whole models go through the engine, no layers left out. "held" rows were kept aside when the tables
of `plan` were fitted; those "measured after" came later. Exit status 1 if the median error of the
held ones is above 5%, or two rows of one table come in the wrong order by more than their spread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from lib.measured_rows import (
    AFTER,
    FITTED,
    HELD,
    MACHINE,
    ROWS,
    UNEVEN,
    Measured,
    Table,
    machine_row,
    use_of,
)

from megatron_fsdp_adapter.cli.quantised_options import PLAIN, Quantisation
from megatron_fsdp_adapter.core.config import STRATEGIES, EngineConfig, MixedPrecisionPolicy
from megatron_fsdp_adapter.core.layout.format import BLOCK128, PER_TENSOR
from megatron_fsdp_adapter.planning.configurations import Configuration, kept_rows
from megatron_fsdp_adapter.planning.features import Features
from megatron_fsdp_adapter.planning.machine import Group, Machine, from_json, machine_named
from megatron_fsdp_adapter.planning.models import shape_named
from megatron_fsdp_adapter.planning.muon import muon_work
from megatron_fsdp_adapter.planning.program import Program
from megatron_fsdp_adapter.planning.shapes import (
    Parallel,
    Shape,
    layer_bytes,
    units,
    with_layers,
)
from megatron_fsdp_adapter.planning.step import StepSetup, record_step
from megatron_fsdp_adapter.planning.timing import time_program

HOST = 0.934
"""Times the host's share of a DDP step: ours launches a little more or less. Fitted."""

BISECTIONS = 8

FORMS = {"tensorwise": PER_TENSOR, "blockwise": BLOCK128}


@dataclass(frozen=True)
class WideBuckets(EngineConfig):
    """The engine until copy engines carried gradients as autograd gives them."""

    @property
    def narrows_buckets(self) -> bool:
        return False


@dataclass(frozen=True)
class Compared:
    row: Measured
    use: str
    ms: float

    @property
    def error(self) -> float:
        return self.ms / self.row.ms - 1


def shape_of(table: Table) -> Shape:
    return replace(with_layers(shape_named(table.model), table.layers), seq_length=table.seq)


def setup_of(row: Measured) -> StepSetup:
    """What the benchmark's wrapper tells the engine."""
    table, words = row.table, row.wrapper.split("-")
    copies, graph, layers = "ce" in words, "graph" in words, "layers" in words
    reduces = copies and (graph or layers or "rs" in words)
    slots = graph or layers or reduces or "ub" in words
    wire = torch.bfloat16 if row.wire == "bf16" else None
    engine = (EngineConfig if table.today else WideBuckets)(
        STRATEGIES[row.strategy], MixedPrecisionPolicy(grad_comm_dtype=wire), poison_buffers=False,
        weight_slots=slots or copies, bucket_slots=slots, exchange_gradients=reduces,
        fp32_accumulation=wire is not None, offload="stream" in words,
        whole=("expert",) if row.whole else (),
    )  # fmt: skip
    shards = {"dense": (table.gpus, 1)}
    shape = shape_of(table)
    if shape.experts is not None:
        shards["expert"] = (table.gpus // table.expert, 1)
    muon = muon_work(
        shape, Parallel(expert=table.expert), 0, table.gpus, table.gpus // table.expert,
        engine.strategy.shard_main,
    )  # fmt: skip
    return StepSetup(
        engine, shards, row.microbatches, separate_gathers="ag" in words, copy_gathers=copies,
        copy_reduces=reduces, fused=table.fused if row.fused is None else row.fused, graph=graph,
        clips=table.clips or row.microbatches > 1, one_pass=table.one_pass, layer_graphs=layers,
        weight_format=quantised_of(row).weights, host_layers=row.host_layers,
        host_bytes=layer_bytes(shape, Parallel(), table.microbatch),
        muon=muon if "muon" in words else None, streamed="stream" in words,
        rows=kept_rows(shape, _with_budget(row), 0), unit_numel=row.unit_numel,
        expert_overlap=row.expert_overlap,
    )  # fmt: skip


def _with_budget(row: Measured) -> Configuration:
    table = row.table
    return Configuration(
        table.gpus, Parallel(expert=table.expert), row.strategy,
        features=Features(budget_gib=row.budget, unit_numel=row.unit_numel),
    )  # fmt: skip


def quantised_of(row: Measured) -> Quantisation:
    return Quantisation(FORMS[row.fp8]) if row.fp8 else PLAIN


def program_of(row: Measured) -> Program:
    table = row.table
    parallel = Parallel(expert=table.expert)
    joined = "muon" not in row.wrapper
    own = units(shape_of(table), parallel, table.microbatch, 0, quantised_of(row), joined)
    return record_step(own, setup_of(row))


def milliseconds(program: Program, table: Table, machine: Machine) -> float:
    apart = table.gpus // table.expert
    groups = {"dense": Group(table.gpus, table.gpus), "expert": Group(apart, apart),
              "expert parallel": Group(table.expert, table.expert)}  # fmt: skip
    return 1e3 * time_program(program, machine, groups).seconds


def machine_of(table: Table, machine: Machine) -> Machine:
    """`machine` with the host of this table, and its release's products of experts."""
    if table.experts_tflops:
        machine = replace(machine, gpu=replace(machine.gpu, grouped_tflops=table.experts_tflops))
    if not table.known:
        return machine
    if table.known == "step":
        return _as_fast_as(machine_row(table), machine)
    strategy = "optim_grads_params" if table.known == "ours" else "optim"
    count = min(row.microbatches for row in ROWS if row.table is table)
    program = program_of(Measured(table, "ours", 0, 0, 0, count, strategy))
    begin = [count for name, count in program.marks if name == "step"][1]
    known = sum(one.host for one in program.operations[begin:]) / 1e3
    return replace(machine, host=(HOST if table.known == "ddp" else 1.0) * table.host / known)


def beside_floor(row: Measured, machine: Machine) -> Machine:
    """`machine` with the host as fast as it was in the rounds of this row."""
    if not row.floor:
        return machine
    return replace(machine, host=machine.host * row.floor / machine_row(row.table).floor)


def _as_fast_as(row: Measured, machine: Machine) -> Machine:
    """The host with which a row takes what it was measured to take."""
    program, low, high = program_of(row), 0.2, 5.0
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        slow = milliseconds(program, row.table, replace(machine, host=middle)) > row.ms
        low, high = (low, middle) if slow else (middle, high)
    return replace(machine, host=(low * high) ** 0.5)


def compare(rows: Sequence[Measured], machine: Machine) -> list[Compared]:
    machines: dict[str, Machine] = {}
    found = []
    for number, row in enumerate(rows):
        table, use = row.table, use_of(number)
        if table.name not in machines:
            machines[table.name] = machine_of(table, machine)
        if use != MACHINE:
            ms = milliseconds(program_of(row), table, beside_floor(row, machines[table.name]))
            found.append(Compared(row, use, ms))
    return found


def inversions(found: Sequence[Compared]) -> list[str]:
    """Pairs of a table in the wrong order by more than the spread of what was measured and more
    than 1% of what is predicted."""
    lines = []
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            same = one.row.table is other.row.table
            if not same or one.row.microbatches != other.row.microbatches:
                continue
            fast, slow = sorted((one, other), key=lambda each: each.row.ms)
            apart = slow.row.low - fast.row.high
            if apart > 0 and fast.ms > 1.01 * slow.ms:
                lines.append(
                    f"{one.row.table.name}: {fast.row.name} measured "
                    f"{slow.row.ms - fast.row.ms:.1f} ms below {slow.row.name}, "
                    f"predicted {fast.ms - slow.ms:.1f} ms above"
                )
    return lines


def with_field_of(machine: Machine, tables: Machine, name: str) -> Machine:
    """`machine` with a part, or a field of the GPU, of `tables`; AttributeError for other names."""
    if name in ("contention", "network"):
        return replace(machine, **{name: getattr(tables, name)})
    return replace(machine, gpu=replace(machine.gpu, **{name: getattr(tables.gpu, name)}))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", help="what `plan --measure` has written; default: the tables")
    parser.add_argument("--of-tables", metavar="NAMES", default="", help="with --machine: what is "
                        "the tables' all the same: contention, network, fields of the GPU; these "
                        "were fitted to the rows that are not kept aside")  # fmt: skip
    given = parser.parse_args(arguments)
    tables = machine_named("h200")
    machine = from_json(given.machine) if given.machine else tables
    for name in filter(None, given.of_tables.split(",")):
        machine = with_field_of(machine, tables, name)
    found = compare(ROWS, machine)
    print("| table | wrapper | microbatches | measured ms | predicted ms | off | |")
    print("|" + "---|" * 7)
    for one in found:
        row = one.row
        print(
            f"| {row.table.name} | {row.name} | {row.microbatches} | "
            f"{row.ms:.1f} ({row.low:.1f}-{row.high:.1f}) | {one.ms:.1f} | {one.error:+.1%} | "
            f"{one.use} |"
        )
    medians = {}
    uneven = [one for one in found if one.use == UNEVEN]
    for name in (FITTED, HELD, AFTER, "all"):
        errors = [
            abs(one.error) for one in found if name in (one.use, "all") and one.use != UNEVEN
        ]
        medians[name] = statistics.median(errors)
        beyond = sum(error > 0.1 for error in errors)
        print(f"{name}: {len(errors)} rows, median error {medians[name]:.1%}, worst "
              f"{max(errors):.1%}, {beyond} above 10%")  # fmt: skip
    inside = sum(one.row.low <= one.ms <= one.row.high or abs(one.error) <= 0.1 for one in uneven)
    print(f"uneven: {inside} of {len(uneven)} rows within what was measured, or 10% of its median")
    wrong = inversions(found)
    print("\n".join(["inversions larger than the spread:", *(wrong or ["none"])]))
    return int(medians[HELD] > 0.05 or bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
