"""Operators on DTensors of which each rank has rows that torch does not know (`uneven.py`).

torch's rules for operators assume that `Shard(0)` is its own, even split. They hold for elementwise
operators on tensors with the same rows, for sums and norms of all elements, and for views that
leave rows where they are. Other operators (a mean, a maximum, a sum along a dim, a GEMM) would give
wrong values without an error, or fail on a rank without rows while the others wait for it: these
run on whole tensors, which is collective, and what they write goes back into the rows.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


class OperatorKind(enum.Enum):
    """The needs of an operator."""

    LOCAL = "local"  # nothing: torch's rule holds
    NEW = "new"  # nothing; its results are split by torch
    ELEMENTWISE = "elementwise"  # the same rows of all its tensors
    VIEW = "view"  # it gives views: see `view`
    WHOLE = "whole"  # whole tensors


ROWS = "rows of"
"""Begins the cut (`Chunks.cut`) of a tensor that has the rows of a tensor of another shape."""

_LOCAL = {
    "detach", "alias", "lift_fresh", "is_pinned", "_foreach_norm", "_pin_memory", "record_stream",
    "set_", "resize_", "is_same_size", "normal_", "uniform_", "bernoulli_", "random_",
    "exponential_", "geometric_", "cauchy_", "log_normal_",
}  # fmt: skip
_ELEMENTWISE = {
    "zero", "zero_", "fill", "fill_", "copy", "copy_", "clone", "_to_copy", "masked_fill",
    "masked_fill_", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
}  # fmt: skip
_PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")
_NOT_ELEMENTWISE = {"_foreach_max", "_fused_rms_norm", "_fused_dropout"}


def kind_of(func: Any, args: Sequence[Any]) -> OperatorKind:
    """The kind of an operator with these arguments; LOCAL for what is not torch's own."""
    if func is _VECTOR_NORM and len(args) > 2 and args[2] is not None:  # along dims
        return OperatorKind.WHOLE
    return _kind(func)


_VECTOR_NORM = torch.ops.aten.linalg_vector_norm.default


@functools.cache
def _kind(func: Any) -> OperatorKind:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.name.startswith("aten::"):
        return OperatorKind.LOCAL
    name = schema.name.removeprefix("aten::")
    if name in _LOCAL or func in (torch.ops.aten.sum.default, _VECTOR_NORM):
        return OperatorKind.LOCAL
    if name.startswith("new_"):
        return OperatorKind.NEW
    elementwise = torch.Tag.pointwise in func.tags or name.startswith(_PREFIXES)
    if name in _ELEMENTWISE or (elementwise and name not in _NOT_ELEMENTWISE):
        return OperatorKind.ELEMENTWISE
    return OperatorKind.VIEW if func.is_view else OperatorKind.WHOLE


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operator writes."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias and alias.is_write:
            found.append((number, argument.name))
    return tuple(found)


def is_cut(value: Any) -> bool:
    """True if `value` is a DTensor that knows its chunks and is sharded over several ranks."""
    if getattr(value, "chunks", None) is None:
        return False
    for size, placement in zip(value.device_mesh.shape, value._spec.placements, strict=True):
        if size > 1 and not placement.is_replicate():
            return True
    return False


def is_partial(value: Any) -> bool:
    """True for a DTensor whose value is the sum, or another reduction, of what the ranks have."""
    return isinstance(value, DTensor) and any(one.is_partial() for one in value._spec.placements)


def _rows(value: Any) -> tuple[int, int] | None:
    """Start and number of this rank's rows; None if it has other blocks than rows."""
    boxes = value.chunks.boxes
    if not boxes:
        return 0, 0
    if len(boxes) > 1:
        return None
    offsets, sizes = boxes[0]
    if any(offsets[1:]) or tuple(sizes[1:]) != tuple(value.shape[1:]):
        return None
    return offsets[0], sizes[0]


def _like(value: Any, local: torch.Tensor, seen: torch.Tensor) -> Any:
    """A DTensor over `local` with the rows of `value`. Its global shape and strides are those of
    `seen`, which has no values."""
    chunks = value.chunks
    if seen.shape != value.shape:
        boxes = []
        if local.numel():
            start, size = _rows(value) or (0, 0)
            zeros = [0] * (seen.dim() - 1)
            boxes.append(((start, *zeros), (size, *seen.shape[1:])))
        cut = chunks.cut
        if cut is not None and cut[0] != ROWS:
            cut = (ROWS, cut)
        chunks = replace(chunks, boxes=tuple(boxes), cut=cut)
    return type(value).over(
        local, value.device_mesh, value._spec.placements, seen.shape, seen.stride(), chunks
    )


def new_rows(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """The result of an operator `new_...` that is asked for the shape of its DTensor: a tensor with
    the rows of that. Torch's copies for background saves are made so."""
    source, _, *rest = args
    local = source._local_tensor
    made = func(local, local.shape, *rest, **kwargs)
    return _like(source, made, torch.empty_strided(source.shape, source.stride(), device="meta"))


def aligned(func: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, ...] | None:
    """`args` of an elementwise operator, made to have the same rows. None if that is impossible, or
    if an argument that is written would have to change. Collective if any has to change."""
    for one in kwargs.values():  # `out`
        if isinstance(one, DTensor) and (one.dim() or is_partial(one)):
            return None
    written = {number for number, _ in _written(func)}
    lists = lists_of(args)
    if not lists:
        found = _with_rows(args, written)
        return tuple(found) if found is not None and _has_result(found) else None
    written_lists = {place for place, number in enumerate(lists) if number in written}
    rows = []
    for operands in zip(*[args[number] for number in lists], strict=True):
        rows.append(_with_rows(operands, written_lists))
    if None in rows:
        return None
    given = list(args)
    for number, arg in enumerate(args):
        if is_partial(arg) and number not in written:  # one number for all tensors of the lists
            given[number] = replicated(arg)
    for number, column in zip(lists, zip(*rows, strict=True), strict=True):  # type: ignore[arg-type]
        given[number] = list(column)
    return tuple(given)


def lists_of(args: Sequence[Any]) -> list[int]:
    """Positions of arguments that are lists with DTensors."""
    found = []
    for number, arg in enumerate(args):
        if isinstance(arg, (list, tuple)) and any(isinstance(one, DTensor) for one in arg):
            found.append(number)
    return found


def _has_result(operands: Sequence[Any]) -> bool:
    """True if a cut operand has the shape, and so the rows, of the result."""
    shapes = {one.shape: is_cut(one) for one in operands if isinstance(one, DTensor)}
    return len(shapes) == 1 or shapes.get(torch.broadcast_shapes(*shapes), False)


def _with_rows(operands: Sequence[Any], written: set[int]) -> list[Any] | None:
    """`operands` with the rows of the first one that is cut; None if one cannot have them."""
    first = next((one for one in operands if is_cut(one)), None)
    if first is None:
        return list(operands)
    found = []
    for number, one in enumerate(operands):
        if is_partial(one) and one.dim() == 0 and number not in written:
            # torch would leave the product partial, and cut `first` evenly for it.
            one = replicated(one)
        elif isinstance(one, DTensor) and not _fits(first, one):
            rows = _rows(first)
            if number in written or rows is None:
                return None
            if one.dim() != first.dim() or one.shape[0] != first.shape[0]:
                return None
            start, size = rows
            local = one.full_tensor()[start : start + size].contiguous()
            one = _like(first, local, torch.empty(one.shape, device="meta"))
        found.append(one)
    return found


def _fits(first: Any, one: Any) -> bool:
    """True if torch may combine `one` with `first` element by element."""
    if one is first or one.dim() == 0 or first.dim() == 0:
        return True
    if is_cut(one):
        return one.shape == first.shape and same_rows(one.chunks, first.chunks)
    if not all(placement.is_replicate() for placement in one._spec.placements):
        return False
    return one.dim() < first.dim() or (one.shape[0] == 1 and first.shape[0] != 1)


def same_rows(one: Any, other: Any) -> bool:
    """True if chunks of tensors of one shape are alike on all ranks. If the cut of either is
    unknown, as that of loaded optimizer state is, this rank's blocks stand for all."""
    if one is other or one is None or other is None:
        return one is other
    if one.cut is None or other.cut is None:
        return bool(one.boxes == other.boxes)
    return bool(one.cut == other.cut)


def view(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """The result of an operator that gives views of a DTensor, its first argument. These are views
    of its rows if each row of the result lies in the same row of it. Else see `windows`."""
    source = args[0]
    stride = source._spec.tensor_meta.stride
    whole = torch.empty_strided(source.shape, stride, dtype=source.dtype, device="meta")
    seen = func(whole, *args[1:], **kwargs)
    if not _keep_rows(source, tree_leaves(seen)):
        everywhere = replicated(source)
        return windows(type(source), func(everywhere, *args[1:], **kwargs), (source, everywhere))

    local = source._local_tensor

    def of_rows(each: torch.Tensor) -> Any:
        shape = (local.shape[0], *each.shape[1:])
        if local.numel() == 0:
            return _like(source, local.new_empty(shape), each)
        offset = local.storage_offset() + each.storage_offset()
        return _like(source, local.as_strided(shape, each.stride(), offset), each)

    return tree_map_only(torch.Tensor, of_rows, seen)


def _keep_rows(source: Any, views: Sequence[torch.Tensor]) -> bool:
    """True if this rank has rows of `source`, and each row of the views is in the same row."""
    stride = source._spec.tensor_meta.stride
    local = source._local_tensor
    if _rows(source) is None:
        return False
    if local.numel() and local.stride() != tuple(stride):
        return False
    for each in views:
        if each.dim() == 0 or each.shape[0] != source.shape[0] or each.dtype != source.dtype:
            return False
        if each.shape[0] != 1 and each.stride(0) != stride[0]:
            return False
    return True


def replicated(value: Any) -> Any:
    """A DTensor of the whole `value` on every rank. Collective."""
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)


def windows(cls: Any, result: Any, window: tuple[Any, Any]) -> Any:
    """`result` with each DTensor as one of class `cls` that has this `window`.

    A window is a pair: the DTensor that the results stand for views of, and a copy of it on every
    rank, which they really are views of. The copy is made again before they are used (`refresh`),
    and written back after they were written (`write_back`)."""

    def made(value: DTensor) -> Any:
        found = cls(value._local_tensor, value._spec, requires_grad=False)
        found.chunks = None
        found.window = window
        return found

    return tree_map_only(DTensor, made, result)


def refresh(values: Sequence[Any]) -> None:
    """Makes the copy in each window of `values` equal to its source. Collective if there is one."""
    found = {id(value.window): value.window for value in values if value.window}
    for source, copied in found.values():
        copied._local_tensor.copy_(source.full_tensor())


def write_back(func: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Copies to the sources what an operator has written to values with a window."""
    for value in _values_written(func, args, kwargs):
        window = getattr(value, "window", None)
        if window:
            source, copied = window
            source.chunks.take_from(copied._local_tensor, source._local_tensor)


def _values_written(func: Any, args: Sequence[Any], kwargs: Any) -> Iterator[Any]:
    if not hasattr(func, "_schema"):
        return
    for number, name in _written(func):
        given = args[number] if number < len(args) else kwargs.get(name)
        yield from tree_leaves(given)


def by_whole(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """The result of an operator on whole tensors. Its writes go back into the rows. Collective."""
    wholes: dict[int, Any] = {}

    def whole(value: Any) -> Any:
        if not is_cut(value):
            return value
        if id(value) not in wholes:
            wholes[id(value)] = replicated(value)
        return wholes[id(value)]

    whole_args, whole_kwargs = tree_map(whole, (tuple(args), kwargs))
    result = func(*whole_args, **whole_kwargs)
    originals = {}
    for value in _values_written(func, args, kwargs):
        written = wholes.get(id(value))
        if written is not None:
            value.chunks.take_from(written._local_tensor, value._local_tensor)
            originals[id(written)] = value
    return tree_map(lambda value: originals.get(id(value), value), result)


NORMS = frozenset({torch.ops.aten.linalg_vector_norm.default, torch.ops.aten._foreach_norm.Scalar})
"""The operators behind `torch.nn.utils.clip_grad_norm_`, `get_total_norm` and `Tensor.norm`."""


def norm_of_nothing(args: tuple[Any, ...]) -> float | None:
    """The norm that a rank without elements contributes to one of `NORMS`, so that it changes
    nothing. None if torch itself has one: 0, for finite orders from 0 on, and for norms along dims.

    Torch refuses other orders on such a rank, while the others wait for it. (Torch 2.11 asks no
    subclass and goes on refusing. It would ask a `__torch_function__`, but that would be in the way
    of every read of `.grad`.)

    args: of the operator: tensors, the order of the norm (2 if not given), and dims if given.
    """
    along_dims = len(args) > 2 and args[2] is not None
    if along_dims:
        return None
    order = float(args[1]) if len(args) > 1 else 2.0
    if order < 0:
        return math.inf
    return 0.0 if order == math.inf else None
