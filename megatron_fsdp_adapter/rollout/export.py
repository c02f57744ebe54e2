"""The weights of a live wrapped model, for an engine that generates with them (vLLM, SGLang).

    for name, tensor in export_weights(model):
        rollout.load(name, tensor)

Whole tensors come unit by unit (`unit_copies.py`), so no rank ever has the whole model in memory:
only the unit at hand, the next one, and what the caller keeps. Each tensor is then joined over
tensor-parallel ranks, exchanged between expert-parallel ranks and sent to the other pipeline
stages, one at a time. `export_shards` does none of that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..core.comm.communicator import Communicator
from ..core.engine.buffer import COMPUTE_WEIGHTS, MAIN_WEIGHTS, check_here
from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.params import ParamPair
from ..core.layout.format import BLOCK128, MXFP8, PER_TENSOR, WeightFormat
from ..core.layout.ranges import Shape, divide_up
from ..core.problems import raise_problems
from ..quantized import dequantized, scales_of
from .export_source import Described, Source, sources
from .unit_copies import SCALE, WEIGHT, Planes, Wanted, add_scale, cast_to, unit_copies

ALL = "all"
CHANGED = "changed"
TRAINED = "trained"
MODEL = "model"
STAGE = "stage"
SCALE_SUFFIX = "_scale_inv"
"""Suffix of the name of the tensor that a quantized weight's bytes are multiplied by."""
SCALES = (SCALE, "rowwise_scales")
BLOCKS = {PER_TENSOR.name: (1, 1), BLOCK128.name: (128, 128), MXFP8.name: (1, 32)}
"""Rows and columns that share a scale, by format."""

_EXPORTED: weakref.WeakKeyDictionary[FsdpEngine, int] = weakref.WeakKeyDictionary()
"""`FsdpEngine.loads` of an engine at its last export of everything."""

ExportedEntry = tuple[str, torch.Tensor]
ExportedEntries = Iterator[ExportedEntry]
Listed = tuple[str, Shape, torch.dtype]
"""Name, shape and dtype of a tensor that a stage will send."""


@dataclass(frozen=True)
class WeightShard:
    """Rows of a tensor that this rank holds: `tensor` is the block that begins at `offsets` of the
    whole tensor `name` of `shape`."""

    name: str
    tensor: torch.Tensor
    offsets: Shape
    shape: Shape


def export_weights(
    model: Any,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    which: str = ALL,
    scope: str = MODEL,
    quantized: bool = False,
) -> ExportedEntries:
    """Yields the name and the full tensor of every weight, on every rank.

    Weights are gathered unit by unit, the next unit while the caller uses the current one. After
    the units come parameters that are not sharded, and persistent buffers in their own dtype.

    Collective: all ranks of the model iterate to the end, between two steps. The caller may keep
    tensors. A kept tensor keeps the memory of the other weights of its unit and dtype too.

    Examples:
        >>> model = fully_shard_model(nn.Linear(8, 4))
        >>> for name, tensor in export_weights(model):
        ...     print(name, tuple(tensor.shape), tensor.dtype)
        weight (4, 8) torch.bfloat16
        bias (4,) torch.bfloat16

    Args:
        model: a model of `FullyShardedDataParallel` or `fully_shard_model`, or a list of chunks of
            one.
        dtype: dtype of the tensors. Floating-point weights are cast to it before they are gathered.
            None: the dtype of main weights.
        which: "all", "changed" or "trained". "changed" leaves out frozen weights, unless a load has
            written weights since the last export. "trained" leaves out frozen weights and buffers,
            for example to export adapters.
        scope: "model" yields all tensors on every rank. "stage" yields those of this rank's
            pipeline stage and experts, and sends nothing between stages.
        quantized: True yields two tensors for a quantized weight: its bytes under its name, and the
            factors to multiply them by under the name with `_scale_inv`. There is one factor for
            the weight, for each 128 x 128 elements, or for each 32 elements of a row (then an
            exponent, as uint8).

    Raises:
        ValueError: an invalid option, or quantized weights that cannot be joined. Nothing is
            gathered.
        RuntimeError: `release_memory` has freed weights that are needed.
    """
    _check(which, scope, dtype)
    return _run(_chunks("export_weights", model, which, dtype, quantized, scope == MODEL))


def export_shards(
    model: Any,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    which: str = ALL,
) -> Iterator[WeightShard]:
    """Yields this rank's rows of every weight, with their place in it. Nothing is sent.

    A rank may have no rows of a weight, or several blocks of it. Replicas have the same rows.
    Arguments and errors are those of `export_weights`.

    Examples:
        >>> model = fully_shard_model(nn.Linear(8, 4, bias=False))
        >>> [shard] = export_shards(model)
        >>> shard.name, shard.shape, tuple(shard.tensor.shape)  # on each of two ranks
        ('weight', (4, 8), (2, 8))
        >>> shard.offsets == (2 * dist.get_rank(), 0)
        True

    Yields:
        `WeightShard`: a name, a copy of the rows in `dtype`, the index of its first element
            (`offsets`), and the shape of the full weight.
    """
    _check(which, MODEL, dtype)
    chunks = _chunks("export_shards", model, which, dtype)
    return (shard for chunk in chunks for shard in chunk.shards())


def _chunks(
    action: str,
    model: Any,
    which: str,
    dtype: torch.dtype | None,
    quantized: bool = False,
    whole_model: bool = False,
) -> list[_Chunk]:
    """The exports of a model's chunks. Raises RuntimeError if memory that they need is released,
    ValueError for a weight that cannot be exported as asked."""
    given = sources(model)
    needed = [MAIN_WEIGHTS, COMPUTE_WEIGHTS] if quantized else [MAIN_WEIGHTS]
    for source in given:
        check_here(source.engine.away, action, needed)
    chunks = [_Chunk(source, which, dtype, quantized, whole_model) for source in given]
    found = []
    for chunk in chunks:
        found += chunk.problems()
    raise_problems(action, found)
    return chunks


def _check(which: str, scope: str, dtype: torch.dtype | None) -> None:
    # Raises ValueError for options with a wrong value.
    found = []
    if which not in (ALL, CHANGED, TRAINED):
        found.append(f"which={which!r}: unknown. Use one of {[ALL, CHANGED, TRAINED]}")
    if scope not in (MODEL, STAGE):
        found.append(f"scope={scope!r}: unknown. Use one of {[MODEL, STAGE]}")
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
        found.append(
            f"dtype={dtype}: an unscaled cast to it is not supported. Use torch.bfloat16, "
            "float16, float32 or None, and quantized=True for the bytes of quantized weights"
        )
    raise_problems("export_weights", found)


def _run(chunks: Sequence[_Chunk]) -> ExportedEntries:
    stages = chunks[0].source.stages
    if chunks[0].whole_model and stages is not None and dist.get_world_size(stages) > 1:
        yield from _over_stages(chunks, stages)
    else:
        for chunk in chunks:
            yield from chunk.tensors()
    for chunk in chunks:
        if chunk.frozen_too:
            _EXPORTED[chunk.source.engine] = chunk.loads


def _over_stages(chunks: Sequence[_Chunk], stages: Any) -> ExportedEntries:
    """All stages' tensors, chunk by chunk and stage by stage. Each stage lists what it will send,
    by a run on the meta device, and stages exchange these lists once."""
    mine = dist.get_rank(stages)
    size = dist.get_world_size(stages)
    own = [chunk.listed() for chunk in chunks]
    every: list[Any] = [None] * size
    dist.all_gather_object(every, own, group=stages)
    for number, chunk in enumerate(chunks):
        for stage in range(size):
            listed = every[stage][number]
            sender = dist.get_global_rank(stages, stage)
            entries = chunk.tensors() if stage == mine else _empty(listed, chunk.device)
            for name, _, _ in listed:
                given_name, tensor = next(entries)
                assert name == given_name, (name, given_name)
                tensor = tensor.contiguous()
                dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=sender, group=stages)
                yield name, tensor
            assert next(entries, None) is None, "more than was listed"


def _empty(listed: Sequence[Listed], device: torch.device) -> ExportedEntries:
    """Memory for what another stage sends, one tensor at a time."""
    for name, shape, dtype in listed:
        yield name, torch.empty(shape, dtype=dtype, device=device)


def _presented(plane: str, name: str, tensor: torch.Tensor) -> ExportedEntry:
    """The exported name and tensor of one plane of the weight `name`."""
    if plane in SCALES:
        return name + SCALE_SUFFIX, tensor
    if plane == WEIGHT:
        return name, tensor
    return name, tensor.view(torch.float8_e4m3fn)


class _Chunk:
    """The export of one model chunk. whole_model: the scope is "model", not "stage"."""

    def __init__(
        self,
        source: Source,
        which: str,
        dtype: torch.dtype | None,
        quantized: bool,
        whole_model: bool,
    ) -> None:
        engine = source.engine
        was_loaded = which == CHANGED and _EXPORTED.get(engine) != engine.loads
        self.source = source
        self.whole_model = whole_model
        # True if frozen weights are exported, or buffers.
        self.frozen_too = which == ALL or was_loaded
        self.buffers_too = which != TRAINED
        self.device = engine.runtime.device
        # The engine's number of loads now; noted as exported when the export ends.
        self.loads = engine.loads
        self.wanted = Wanted(self._is_chosen, dtype, quantized)
        # By the id of the engine's pair.
        self._described = {id(pair): source.describe(pair) for pair in engine.pairs}
        # By this rank's name of an expert's weight, the names on all expert-parallel ranks.
        self._names_on_ranks = self._names_of_experts()

    def _is_chosen(self, group: ParamGroup) -> bool:
        return self.frozen_too or group.key.requires_grad

    def _is_left_out(self, described: Described) -> bool:
        # The other stage sends it.
        return described.is_copy and self.whole_model

    def _rest(self) -> Sequence[tuple[Described, torch.Tensor]]:
        """The entries of `Source.rest` that are exported."""
        if self.frozen_too:
            return self.source.rest
        if not self.buffers_too:
            return ()
        return [entry for entry in self.source.rest if entry[0].is_buffer]

    @property
    def _exchanges(self) -> bool:
        # True if weights of experts are exchanged between expert-parallel ranks.
        group = self.source.experts
        return self.whole_model and group is not None and dist.get_world_size(group) > 1

    def _names_of_experts(self) -> dict[str, list[str]]:
        """This rank's name of a weight -> the names on all expert-parallel ranks."""
        if not self._exchanges:
            return {}
        described = list(self._described.values())
        described += [one for one, _ in self.source.rest]
        own = [one.name for one in described if one.expert]
        group: Any = self.source.experts
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, own, group=group)
        return {name: list(names) for name, *names in zip(own, *every, strict=True)}

    def problems(self) -> list[str]:
        """One line for each weight that cannot be exported as asked."""
        if not self.wanted.quantized:
            return []
        found = []
        for pair in self.source.engine.pairs:
            described = self._described[id(pair)]
            group = pair.group
            if self._is_chosen(group) and not self._is_left_out(described):
                found += _quantized_problems(described, pair.spec.shape, group.key.quantized)
        return found

    def listed(self) -> list[Listed]:
        """Names, shapes and dtypes of the tensors that `tensors` will give."""
        found = []
        for name, tensor in self.tensors(meta=True):
            found.append((name, tuple(tensor.shape), tensor.dtype))
        return found

    def tensors(self, meta: bool = False) -> ExportedEntries:
        """Names and tensors of this chunk. meta: tensors are on the meta device, and nothing is
        communicated."""
        weights = self._on_meta() if meta else self._gathered()
        for described, planes in weights:
            if not self._is_left_out(described):
                found = self._exported(described, planes)
                while found:  # no reference to what the caller has had stays here
                    yield found.pop()

    def _exported(self, described: Described, planes: Planes) -> list[ExportedEntry]:
        """The exported entries of one weight, the last one first: the caller pops them. Collective.
        Empties `planes`, so that no reference to a plane stays."""
        exchange = self._exchanges and described.expert
        names = self._names_on_ranks[described.name] if exchange else [described.name]
        found: list[ExportedEntry] = []
        for plane in list(planes):
            whole = _joined(described, planes.pop(plane))
            parts: Sequence[torch.Tensor] = [whole]
            if exchange:
                parts = _all_gathered(self.source.experts, whole).unbind(0)
            for name, part in zip(names, parts, strict=True):
                found.append(_presented(plane, name, part))
        return found[::-1]

    def _gathered(self) -> Iterator[tuple[Described, Planes]]:
        # Popped, so that this frame keeps no reference to what the caller has had.
        for unit in unit_copies(self.source.engine, self.wanted):
            unit.reverse()
            while unit:
                pair, planes = unit.pop()
                yield self._described[id(pair)], _trimmed(pair, planes)
        for described, tensor in self._rest():
            yield described, {WEIGHT: self._cast(described, tensor)}

    def _on_meta(self) -> Iterator[tuple[Described, Planes]]:
        # In the order of `_gathered`.
        for unit in self.source.engine.units:
            for group in filter(self._is_chosen, unit.groups):
                for pair in self.source.engine.pairs:
                    if pair.group is group:
                        yield self._described[id(pair)], self._planes_on_meta(pair)
        for described, tensor in self._rest():
            dtype = self._dtype(described, tensor)
            yield described, {WEIGHT: torch.empty(tensor.shape, dtype=dtype, device="meta")}

    def _planes_on_meta(self, pair: ParamPair) -> Planes:
        planes = {}
        for plane, _ in self.wanted.planes(pair.group):
            shape = plane.shape(pair.spec.shape)
            planes[plane.name] = torch.empty(shape, dtype=plane.dtype, device="meta")
        if WEIGHT not in planes:
            add_scale(planes, scales_of(pair.unsharded))
            planes = {name: plane.to("meta") for name, plane in planes.items()}
        return _trimmed(pair, planes)

    def _dtype(self, described: Described, tensor: torch.Tensor) -> torch.dtype:
        """The dtype in which a tensor of the rest is exported."""
        if described.is_buffer:
            return tensor.dtype
        return cast_to(tensor.dtype, self.wanted.dtype)

    def _cast(self, described: Described, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a tensor of the rest, as a copy."""
        return dequantized(tensor).detach().to(self._dtype(described, tensor), copy=True)

    def shards(self) -> Iterator[WeightShard]:
        """This rank's shards."""
        self.source.engine.gather.updates.settle()
        for pair in self.source.engine.pairs:
            group = pair.group
            if self._is_chosen(group):
                held = group.shards.held.range(pair.index)
                shape = pair.spec.layout_shape
                rows = held.start // max(1, math.prod(shape[1:]))
                local = group.main.buffer.items(group.shards.held)[pair.index].detach()
                dtype = cast_to(local.dtype, self.wanted.dtype)
                local = local.to(self.device, dtype, copy=True)
                yield from self._blocks(self._described[id(pair)], local, rows, shape)
        for described, tensor in self._rest():
            whole = self._cast(described, tensor)
            if whole.dim() == 0:
                whole = whole.view(-1)
            yield from self._blocks(described, whole, 0, tuple(whole.shape))

    def _blocks(
        self, described: Described, local: torch.Tensor, first: int, shape: Shape
    ) -> Iterator[WeightShard]:
        """The shards of a weight whose part on this tensor-parallel rank has `shape`. local: this
        rank's rows of the part, from row `first` on."""
        whole = _whole_shape(described, shape)
        inner_offsets = [0] * (len(shape) - 1)
        rank = 0
        split = described.split
        if described.parts > 1:
            rank = dist.get_rank(described.tensor)
            if split:
                inner_offsets[split - 1] = rank * shape[split]
        for start, count, whole_start in _row_runs(described, shape[0], rank):
            low = max(start, first)
            high = min(start + count, first + local.shape[0])
            if low < high:
                block = local[low - first : high - first]
                offsets = (whole_start + low - start, *inner_offsets)
                yield WeightShard(described.name, block, offsets, whole)


def _row_runs(described: Described, rows: int, rank: int) -> list[tuple[int, int, int]]:
    """(first row in the part, number of rows, first row in the whole tensor) of each contiguous
    stretch of the part, of `rows` rows, that a tensor-parallel rank has."""
    if described.parts == 1 or described.split != 0:
        return [(0, rows, 0)]
    each = rows // described.halves
    runs = []
    for half in range(described.halves):
        slices_before = half * described.parts + rank
        runs.append((half * each, each, slices_before * each))
    return runs


def _whole_shape(described: Described, shape: Shape) -> Shape:
    # The shape of the whole tensor. shape: of one tensor-parallel rank's part.
    if described.split is None:
        return shape
    whole = list(shape)
    whole[described.split] *= described.parts
    return tuple(whole)


def _quantized_problems(
    described: Described, shape: Shape, format: WeightFormat | None
) -> list[str]:
    """At most one line, if tensor parallelism cuts a weight so that its scales do not join.

    shape: of one tensor-parallel rank's part; format: None if the weight is not quantized."""
    if format is None or described.parts == 1:
        return []
    name = described.name
    if format is PER_TENSOR:
        return [f"quantized=True: {name} has a scale on each tensor-parallel rank"]
    rows, columns = BLOCKS[format.name]
    if described.split:
        rest_of_block = shape[described.split] % columns
    else:
        rest_of_block = shape[0] // described.halves % rows
    if not rest_of_block:
        return []
    return [
        f"quantized=True: the tensor-parallel slice {shape} of {name} is no multiple of "
        f"blocks of {rows} x {columns}"
    ]


def _trimmed(pair: ParamPair, planes: Planes) -> Planes:
    """The planes, whose scales of 128 x 128 blocks lose the padding that they are kept with."""
    if pair.group.key.quantized is BLOCK128 and SCALE in planes:
        rows, columns = pair.spec.shape
        scale = planes[SCALE][: divide_up(rows, 128), : divide_up(columns, 128)]
        planes[SCALE] = scale.contiguous()
    return planes


def _joined(described: Described, tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which each tensor-parallel rank has a part. Collective over these."""
    if described.parts == 1:
        return tensor
    assert described.tensor is not None and described.split is not None
    found = _all_gathered(described.tensor, tensor)
    if described.split:
        return torch.cat(found.unbind(0), dim=described.split)
    if described.halves == 1:
        return found.flatten(0, 1)
    # Each rank has a slice of each half: the halves come first, the ranks second.
    by_half = found.unflatten(1, (described.halves, -1)).transpose(0, 1)
    return by_half.flatten(0, 2)


def _all_gathered(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The ranks' tensors, of one shape, along a new dim 0. Memory alone for one on the meta device,
    where nothing is communicated."""
    found = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    if not tensor.is_meta:
        pair = (found.view(-1), tensor.contiguous().view(-1))
        for work in Communicator(group, tensor.device).all_gather([pair]):
            work.wait()
    return found
