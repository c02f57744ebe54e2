"""Parameter groups for the layout tests: random ones, and those of published models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.layout import (
    FlatRange,
    GroupLayout,
    ParamSpec,
    plan_group,
    row_granularity,
)

Shape = tuple[int, ...]


def specs_of(shapes: Sequence[Shape], granularities: Sequence[int] = ()) -> list[ParamSpec]:
    """One bf16 parameter per shape, of row granularity unless granularities are given."""
    chosen = granularities or [row_granularity(shape) for shape in shapes]
    return [
        ParamSpec(i, (f"p{i}",), shape, torch.bfloat16, True, granularity)
        for i, (shape, granularity) in enumerate(zip(shapes, chosen, strict=True))
    ]


SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 200)),
    st.tuples(st.integers(1, 60), st.sampled_from([1, 3, 8, 16, 20, 32, 33, 48, 64, 172])),
    st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
)


@st.composite
def _granularity(draw: st.DrawFn, shape: Shape) -> int:
    kind = draw(st.sampled_from(["row", "row", "row", "rows", "tensor", "element"]))
    if kind == "rows":
        rows = shape[0] if shape else 1
        return draw(st.sampled_from(divisors(rows))) * row_granularity(shape)
    if kind == "tensor":
        return math.prod(shape)
    return 1 if kind == "element" else row_granularity(shape)


@st.composite
def row_specs(draw: st.DrawFn) -> list[ParamSpec]:
    """A random group in which every parameter has row granularity."""
    return specs_of(draw(st.lists(SHAPES, min_size=1, max_size=10)))


@st.composite
def any_specs(draw: st.DrawFn) -> list[ParamSpec]:
    """A random group with every kind of granularity."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=10))
    return specs_of(shapes, [draw(_granularity(shape)) for shape in shapes])


ALIGNMENTS = st.sampled_from([1, 4, 16, 128])
SHARDS = st.integers(1, 64)


LARGEST_BUFFER = 1 << 20
"""Tests that fill buffers skip longer ones: common multiples of odd sizes know no bound."""


@st.composite
def layouts(draw: st.DrawFn) -> GroupLayout:
    """A planned layout of a random group, short enough to be filled."""
    layout = plan_group(
        draw(any_specs()),
        draw(SHARDS),
        align=draw(ALIGNMENTS),
        max_segments=draw(st.integers(1, 4)),
        padding_bound=draw(st.sampled_from([0.0, 0.01, 0.2])),
    )
    assume(layout.total_numel <= LARGEST_BUFFER)
    return layout


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def lcm_total(specs: Sequence[ParamSpec], num_shards: int, align: int) -> int:
    """Plain LCM packing in input order, written independently of the package."""
    end = 0
    for spec in specs:
        step = math.lcm(spec.granularity, align)
        end = (end + step - 1) // step * step + spec.numel
    unit = num_shards * math.lcm(align, *(spec.granularity for spec in specs))
    return (end + unit - 1) // unit * unit


def scatter(layout: GroupLayout, items: list[np.ndarray]) -> list[np.ndarray]:
    """Every rank's flat shard buffer, padding -1, for the given flat items."""
    full = np.full(layout.total_numel, -1)
    for index, item in enumerate(items):
        extent = layout.item_range(index)
        full[extent.start : extent.stop] = item
    shards = [np.full(layout.shard_numel, -2) for _ in range(layout.num_shards)]
    for rank, shard in enumerate(shards):
        for source, target in layout.segment_shards(rank):
            shard[target.start : target.stop] = full[source.start : source.stop]
    return shards


def in_shard(layout: GroupLayout, index: int, rank: int) -> FlatRange:
    """Where the piece of item `index` that `rank` holds is in its flat shard buffer; empty if it
    holds none."""
    piece = layout.shard_range(index, rank)
    item = layout.item_range(index)
    full, own = layout.segment_shards(rank)[layout.placements[index].segment]
    if piece.empty:
        return piece
    return piece.shift(item.start - full.start + own.start)


def gpt_layer(hidden: int, ffn: int, heads: int, groups: int, head_dim: int = 128) -> list[Shape]:
    """Parameters of one Llama layer in the order in which megatron-core registers them."""
    return [
        (hidden,),
        (hidden, heads * head_dim),
        ((heads + 2 * groups) * head_dim, hidden),
        (hidden,),
        (2 * ffn, hidden),
        (hidden, ffn),
    ]


# DeepSeek-V3: q_lora 1536, kv_lora 512 + 64 rotary, 128 heads of 128 + 64 (value heads 128).
_DEEPSEEK_ATTENTION: list[Shape] = [
    (7168,),
    (1536, 7168),
    (1536,),
    (128 * (128 + 64), 1536),
    (512 + 64, 7168),
    (512,),
    (128 * (128 + 128), 512),
    (7168, 128 * 128),
    (7168,),
]
_GPT_OSS_WITHOUT_ROUTED: list[Shape] = [
    (2880,),
    (2880, 4096),
    (2880,),
    (5120, 2880),
    (5120,),
    (64,),
    (2880,),
    (128, 2880),
    (128,),
]

LLAMA3_405B_LAYER = gpt_layer(16384, 53248, heads=128, groups=8)

PUBLISHED: dict[str, list[Shape]] = {
    "Llama-3 70B layer": gpt_layer(8192, 28672, heads=64, groups=8),
    "Llama-2 13B layer": gpt_layer(5120, 13824, heads=40, groups=40),
    "DeepSeek-V3 dense layer": [*_DEEPSEEK_ATTENTION, (2 * 18432, 7168), (7168, 18432)],
    "DeepSeek-V3 attention + shared MLP": [
        *_DEEPSEEK_ATTENTION,
        (256, 7168),
        (2 * 2048, 7168),
        (7168, 2048),
    ],
    "DeepSeek-V3 routed MLPs, 8 per rank": [(2 * 2048, 7168)] * 8 + [(7168, 2048)] * 8,
    "small layer with biases, h=2880": _GPT_OSS_WITHOUT_ROUTED,
}
TABLE_SHARDS = (8, 64, 512)
