"""Prints the padding of the planner and of its alternatives as a Markdown table.

Run `python tests/layout/padding_table.py`; docs/layout.md holds its output, kept by a test.
"""

from __future__ import annotations

import math

from layout_cases import PUBLISHED, TABLE_SHARDS, Shape, lcm_total, specs_of

from megatron_fsdp_adapter.core.layout import plan_group

ALIGN = 16
HEADER = (
    "| group | shards | LCM | per parameter, dim 0 | element cut | ours | segments |",
    "|---|---|---|---|---|---|---|",
)


def dim0_total(shapes: list[Shape], num_shards: int) -> int:
    """FSDP2: every parameter cut into equal blocks of rows, the last ones padded."""
    return sum(
        math.ceil(shape[0] / num_shards) * num_shards * math.prod(shape[1:]) for shape in shapes
    )


def element_total(shapes: list[Shape], num_shards: int) -> int:
    """One flat run of aligned parameters, cut anywhere that is aligned."""
    end = sum(math.ceil(math.prod(shape) / ALIGN) * ALIGN for shape in shapes)
    return math.ceil(end / (num_shards * ALIGN)) * num_shards * ALIGN


def rows() -> list[str]:
    """The table's lines."""
    lines = list(HEADER)
    for name, shapes in PUBLISHED.items():
        specs = specs_of(shapes)
        real = sum(spec.numel for spec in specs)
        for num_shards in TABLE_SHARDS:
            layout = plan_group(specs, num_shards, align=ALIGN)
            totals = (
                lcm_total(specs, num_shards, ALIGN),
                dim0_total(shapes, num_shards),
                element_total(shapes, num_shards),
                layout.total_numel,
            )
            cells = " | ".join(f"{total / real - 1:.2%}" for total in totals)
            lines.append(f"| {name} | {num_shards} | {cells} | {len(layout.segments)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(rows()))
