"""Rows of docs/performance.md, predicted and measured: `python scripts/plan_against_measured.py`.

Whole models go through the engine, no layers left out. Every second row was kept aside when the
tables of `plan` were fitted: those are "held". Exit status 1 if the median error of those is above
5%, or two rows of one table come in the wrong order by more than their spread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from lib.measured_rows import ROWS, Measured, Table

from megatron_fsdp_adapter.core.config import STRATEGIES, EngineConfig, MixedPrecisionPolicy
from megatron_fsdp_adapter.planning.machine import Group, Machine, machine_named
from megatron_fsdp_adapter.planning.shapes import Parallel, Shape, shape_named, units, with_layers
from megatron_fsdp_adapter.planning.step import StepSetup, record_step
from megatron_fsdp_adapter.planning.timing import time_program

HOST = 0.934
"""Times the host's share of a DDP step: ours launches a little more or less. Fitted."""


@dataclass(frozen=True)
class Compared:
    row: Measured
    held: bool
    ms: float

    @property
    def error(self) -> float:
        return self.ms / self.row.ms - 1


def shape_of(table: Table) -> Shape:
    return replace(with_layers(shape_named(table.model), table.layers), seq_length=table.seq)


def setup_of(row: Measured) -> StepSetup:
    """What the benchmark's wrapper tells the engine."""
    table, words = row.table, row.wrapper.split("-")
    copies, graph = "ce" in words, "graph" in words
    reduces = copies and (graph or "rs" in words)
    slots = graph or reduces or "ub" in words
    wire = torch.bfloat16 if row.wire == "bf16" else None
    engine = EngineConfig(
        STRATEGIES[row.strategy], MixedPrecisionPolicy(grad_comm_dtype=wire), poison_buffers=False,
        weight_slots=slots or copies, bucket_slots=slots, exchange_gradients=reduces,
        fp32_accumulation=wire is not None,
    )  # fmt: skip
    shards = {"dense": (table.gpus, 1)}
    if shape_of(table).experts is not None:
        shards["expert"] = (table.gpus // table.expert, 1)
    return StepSetup(
        engine, shards, row.microbatches, separate_gathers="ag" in words, copy_gathers=copies,
        copy_reduces=reduces, fused=table.fused, graph=graph,
        clips=table.clips or row.microbatches > 1,
    )  # fmt: skip


def machine_of(table: Table) -> Machine:
    """That of the tables, with the host of this one, known from a row that is not predicted."""
    first = next(row for row in ROWS if row.table is table)
    plain = Measured(table, "ours", 0, 0, 0, 1, "optim")
    program = record_step(_units(table), setup_of(replace(plain, ms=first.ms)))
    begin = [count for name, count in program.marks if name == "step"][1]
    known = sum(one.host for one in program.operations[begin:]) / 1e3
    return replace(machine_named("h200"), host=HOST * table.host / known)


def _units(table: Table) -> list:
    return units(shape_of(table), Parallel(expert=table.expert), 1)


def compare(rows: Sequence[Measured]) -> list[Compared]:
    machines: dict[str, Machine] = {}
    found = []
    for number, row in enumerate(rows):
        table = row.table
        machine = machines.setdefault(table.name, machines.get(table.name) or machine_of(table))
        apart = table.gpus // table.expert
        groups = {"dense": Group(table.gpus, table.gpus), "expert": Group(apart, apart),
                  "expert parallel": Group(table.expert, table.expert)}  # fmt: skip
        program = record_step(_units(table), setup_of(row))
        seconds = time_program(program, machine, groups).seconds
        found.append(Compared(row, number % 2 == 1, 1e3 * seconds))
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
                    f"{one.row.table.name}: {fast.row.wrapper} {fast.row.strategy} measured "
                    f"{slow.row.ms - fast.row.ms:.1f} ms below {slow.row.wrapper} "
                    f"{slow.row.strategy}, predicted {fast.ms - slow.ms:.1f} ms above"
                )
    return lines


def main(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    found = compare(ROWS)
    print("| table | wrapper | microbatches | measured ms | predicted ms | off | |")
    print("|" + "---|" * 7)
    for one in found:
        row = one.row
        wire = ", bf16 wire" if row.wire == "bf16" else ""
        print(
            f"| {row.table.name} | {row.wrapper}:{row.strategy}{wire} | {row.microbatches} | "
            f"{row.ms:.1f} ({row.low:.1f}-{row.high:.1f}) | {one.ms:.1f} | {one.error:+.1%} | "
            f"{'held' if one.held else 'fitted'} |"
        )
    medians = {}
    for name, chosen in (("fitted", False), ("held", True)):
        errors = [abs(one.error) for one in found if one.held is chosen]
        medians[name] = statistics.median(errors)
        beyond = sum(error > 0.1 for error in errors)
        print(f"{name}: {len(errors)} rows, median error {medians[name]:.1%}, worst "
              f"{max(errors):.1%}, {beyond} above 10%")  # fmt: skip
    wrong = inversions(found)
    print("\n".join(["inversions larger than the spread:", *(wrong or ["none"])]))
    return int(medians["held"] > 0.05 or bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
