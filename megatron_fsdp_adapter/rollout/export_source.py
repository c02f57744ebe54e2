"""A wrapped model as an export sees it: its weights, their names in the whole model, and how they
are split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.engine.engine import FsdpEngine
from ..core.engine.params import ParamPair


@dataclass(frozen=True)
class Described:
    """A parameter of one rank's model, or a persistent buffer.

    name: in the whole model.
    split: the dim along which tensor parallelism splits it; None if it does not.
    tensor: the tensor-parallel group; None if it is not split.
    halves: number of parts that dim 0 consists of, each of which is split on its own.
    expert: it is an expert's; other expert-parallel ranks have other experts.
    is_copy: another pipeline stage has the same one.
    is_buffer: it may change at any time, and keeps its dtype.
    """

    name: str
    split: int | None = None
    tensor: dist.ProcessGroup | None = None
    halves: int = 1
    expert: bool = False
    is_copy: bool = False
    is_buffer: bool = False

    @property
    def parts(self) -> int:
        """The number of tensor-parallel ranks that it is split over."""
        if self.split is None or self.tensor is None:
            return 1
        return dist.get_world_size(self.tensor)


@dataclass(frozen=True)
class Source:
    """One model chunk as an export sees it.

    describe: gives the `Described` of a parameter of the engine; rest: parameters and buffers that
    the engine does not have, with the tensors of the module; experts: the expert-parallel group;
    stages: the pipeline-parallel group."""

    engine: FsdpEngine
    describe: Callable[[ParamPair], Described]
    rest: Sequence[tuple[Described, torch.Tensor]] = ()
    experts: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None


def beside_engine(
    module: nn.Module, engine: FsdpEngine
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, is a buffer) of everything in `module` that the engine does not manage:
    parameters that were left alone, quantized ones as they are, and persistent buffers."""
    managed: set[int] = set()
    for pair in engine.pairs:
        managed.update((id(pair.unsharded), id(pair.sharded)))
    for name, param in module.named_parameters():
        if id(param) not in managed:
            yield name, param, False
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer, True


def sources(model: Any) -> list[Source]:
    """The sources of a wrapped model, or of its chunks. ValueError for anything else."""
    chunks = list(model) if isinstance(model, Sequence) else [model]
    for chunk in chunks:
        if not hasattr(chunk, "export_source"):
            raise ValueError(
                f"model: a {type(chunk).__name__} is not wrapped. Pass the result of "
                "FullyShardedDataParallel(...) or fully_shard_model(...)"
            )
    return [chunk.export_source() for chunk in chunks]
