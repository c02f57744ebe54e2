"""What grows with the number of ranks: padding, collectives, process groups, metadata of a
checkpoint. From the planner that lays out every model, and the engine's own program."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fsdp_adapter.checkpoint.storage import Once, share_equal_parts
from megatron_fsdp_adapter.cli.estimate import Model

from .configurations import Configuration, planned
from .prediction import program_of
from .program import COLLECTIVES
from .shapes import Parallel, Shape

STORED = 3
"""Tensors that a checkpoint has of each parameter: main weights and two moments."""


COMPARED = 16
"""Bytes of the comparison of what ranks have launched, which is no reduction of gradients."""


@dataclass(frozen=True)
class ScaleRow:
    """Of one way to shard.

    Attributes:
        padding: elements that belong to no parameter, in parts of those that do; worst: of the
            group with most, among those of a million elements and more.
        shard_numel: elements of a rank's shard of a layer.
        gathers, reductions: of a microbatch in the middle of a step; once: of a step, over the
            outer axis.
        groups: process groups that a rank communicates on.
        blocks: of a checkpoint, over all ranks; least: one a unit and a rank that has
            anything of it, which no flat layout goes below. metadata: bytes of them.
        plan_seconds: for all layouts.
    """

    ranks: int
    instances: int
    padding: float
    worst: float
    shard_numel: int
    gathers: int
    reductions: int
    once: int
    groups: int
    blocks: int
    least: int
    metadata: int
    plan_seconds: float


@lru_cache(maxsize=1)
def bytes_of_block() -> float:
    """That torch DCP's metadata takes for a block of a tensor, written as a save writes it: of each
    rank the place of its block, of the block where it begins and ends."""
    once, files = Once(), [f"__{rank}_0.distcp" for rank in range(1000)]
    keys = [f"{kind}decoder.layers.7.mlp.linear_fc2.weight" for kind in ("model.", "exp_avg.")]
    sizes = torch.Size([1, 4096])
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for key in [*keys, f"exp_avg_sq.{keys[0]}"]:
        begins = [torch.Size([rank, 0]) for rank in range(len(files))]
        chunks = [ChunkStorageMetadata(begin, sizes) for begin in begins]
        shape = torch.Size([len(files), 4096])
        tensors[key] = TensorStorageMetadata(TensorProperties(), shape, chunks)
        for rank, begin in enumerate(begins):
            index = MetadataIndex(key, once.size(begin), rank)
            places[index] = _StorageInfo(files[rank], 1 << 20, 4096)
    metadata = Metadata(tensors, None, places)
    share_equal_parts(metadata, once)
    return len(pickle.dumps(metadata)) / len(places)


def scale_row(shape: Shape, chosen: Configuration) -> ScaleRow:
    """For all parameters of a rank; of a pipeline, the first stage's."""
    began = time.perf_counter()
    model = planned(shape, chosen)
    spent = time.perf_counter() - began
    layouts = [(layout, len(kind.names)) for kind in model.kinds for layout in kind.layouts]
    items = sum(layout.item_numel * count for layout, count in layouts)
    padding = sum(layout.padding_numel * count for layout, count in layouts)
    large = [layout.padding_fraction for layout, _ in layouts if layout.item_numel >= 1 << 20]
    blocks = STORED * sum(
        len(layout.holders(index)) * count
        for layout, count in layouts for index in range(len(layout.specs))
    )
    least = STORED * sum(
        -(-layout.item_numel // layout.shard_numel) * count for layout, count in layouts
    )
    gathers, reductions, once, groups = _launches(shape, chosen)
    return ScaleRow(
        chosen.gpus, chosen.instances, padding / items, max(large, default=0.0), _layer(model),
        gathers, reductions, once, groups, blocks, least, int(blocks * bytes_of_block()), spent,
    )  # fmt: skip


def _layer(model: Model) -> int:
    layers = [kind for kind in model.kinds if kind.names[0].startswith("decoder.layers.")]
    return sum(layout.shard_numel for layout in layers[-1].layouts)


def _launches(shape: Shape, chosen: Configuration) -> tuple[int, int, int, int]:
    """Gathers and reductions of the second of three microbatches, reductions over the outer axis in
    a step, and groups. Each further layer launches what the one before it does."""
    few, more = 3, 5
    counts = []
    for layers in (few, more):
        program = program_of(shape, chosen, 3, 0, layers)
        marks = [count for name, count in program.marks if name == "microbatch"]
        middle = [o for o in program.operations[marks[4] : marks[5]] if o.kind in COLLECTIVES]
        steps = [count for name, count in program.marks if name == "step"]
        step = [o for o in program.operations[steps[1] :] if o.kind in COLLECTIVES]
        inner = [o for o in middle if o.group in chosen.shards]
        counts.append((
            sum(o.role == "gather" for o in inner), sum(o.role == "reduce" for o in inner),
            sum(o.group.endswith("outer") and o.amount > COMPARED for o in step),
            len({o.channel for o in step}),
        ))  # fmt: skip
    further = (shape.gpt.num_layers - more) / (more - few)
    less, enough = counts
    gathers, reductions, once = (
        round(more_ + (more_ - less_) * further)
        for less_, more_ in zip(less[:3], enough[:3], strict=True)
    )
    return gathers, reductions, once, enough[3]


def scale_rows(shape: Shape, sizes: Sequence[int], parallel: Parallel) -> list[ScaleRow]:
    """Everything sharded over all ranks and, beyond 512, over 512 of them."""
    rows = []
    for gpus in sizes:
        for inner in sorted({gpus, min(gpus, 512)}, reverse=True):
            mixture = shape.experts is not None
            split = parallel if mixture else replace(parallel, expert=1)
            if gpus < split.expert:
                continue
            chosen = Configuration(
                gpus, split, instances=gpus // inner, separate_gathers=mixture,
            )  # fmt: skip
            rows.append(scale_row(shape, chosen))
    return rows


def render(name: str, rows: Sequence[ScaleRow]) -> list[tuple[str, ...]]:
    """Cells of a table."""
    found: list[tuple[str, ...]] = []
    for row in rows:
        found.append((
            name, f"{row.ranks:,}", f"{row.instances:,}", f"{row.padding:.2%}", f"{row.worst:.2%}",
            f"{row.shard_numel:,}", f"{row.gathers}", f"{row.reductions}", f"{row.once}",
            f"{row.groups}", f"{row.blocks:,}", f"{row.blocks / row.least:.1f}",
            f"{row.metadata / 1e6:,.1f}", f"{row.plan_seconds:.2f}",
        ))  # fmt: skip
    return found


HEAD = ("model", "ranks", "instances", "padding", "worst", "shard of a layer", "gathers",
        "reductions", "outer", "groups", "blocks", "x least", "metadata MB",
        "s to plan")  # fmt: skip
