"""DTensors whose shards are cut wherever a flat buffer is cut, and which know their place.

torch takes `Shard(0)` for an even split. Ours is uneven, so a DTensor over our rows states a place
that is not true, and whatever goes by that (`full_tensor`, `redistribute`, full state dicts, torch
DCP) fails or mixes rows up. `UnevenDTensor` carries its `Chunks`, the blocks of the whole tensor
that this rank has, and answers by them.

The other design was a placement of our own in torch's sharding specification, whose collectives
torch's `redistribute` would call. It was turned down: every operator's sharding rule writes plain
`Shard`s into its outputs, so that the first `detach()` loses the place, and the methods that such a
placement has to override are private and differ from one torch to the next. A placement that is
only *reported* (`OwnRows`) does without them: operators never see it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..layout.ranges import Box
from .blocks import Chunks
from .operators import (
    NORMS,
    OperatorKind,
    aligned,
    by_whole,
    is_cut,
    is_partial,
    kind_of,
    lists_of,
    new_rows,
    norm_of_nothing,
    refresh,
    replicated,
    same_rows,
    view,
    windows,
    write_back,
)


def dtensor_over(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """A DTensor of global `shape` and `stride` over this rank's `local`, whose storage it uses, in
    host memory too. No collective."""
    # A tensor on another device than the mesh's would be moved there: its spec is that of one on
    # meta.
    elsewhere = local.device.type != mesh.device_type
    made = DTensor.from_local(
        local.to("meta") if elsewhere else local,
        mesh,
        list(placements),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
    return DTensor(local, made._spec, requires_grad=False) if elsewhere else made


class OwnRows(Shard):
    """The placement that an `UnevenDTensor` reports for an axis that cuts rows: a `Shard` of which
    this rank's extent, `size` rows from `start` of the whole, is known and others' is not. Equal to
    the `Shard` of its dim. `compute_local_shape_and_global_offset` of torch asks it."""

    def __new__(cls, dim: int, size: int, start: int) -> OwnRows:
        return super().__new__(cls, dim)  # type: ignore[call-arg]

    def __init__(self, dim: int, size: int, start: int) -> None:
        super().__init__(dim)
        self.size = size
        self.start = start

    def _local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, int]:
        return self.size, self.start


class UnevenDTensor(DTensor):
    """A DTensor that knows its chunks. `chunks` is None until it is set.

    `detach()` and `clone()` hand them on. So do operators that work element by element, if torch
    asks a subclass of DTensor for the results of operators (2.13 does, 2.11 does not). Whole
    tensors (`full_tensor`, `redistribute`) carry no gradient back.
    """

    chunks: Chunks | None
    window: Any = None
    """For a view that has no rows of its own: its source, and a copy (`operators.windows`)."""
    is_fixed: bool = False
    """True if the local tensor is part of a flat buffer, which cannot be exchanged."""
    given: tuple[weakref.ref[UnevenDTensor], ...] = ()
    """Results of reads of `data`, if it is fixed."""

    @staticmethod
    def over(
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        stride: Sequence[int],
        chunks: Chunks | None = None,
    ) -> UnevenDTensor:
        """A tensor of global `shape` and `stride` over this rank's `local`, whose storage it uses,
        in host memory too. No collective. ValueError if the chunks do not fit."""
        if chunks is not None:
            chunks.check(tuple(shape), local)
        plain = dtensor_over(local, mesh, placements, shape, stride)
        return with_chunks(plain, chunks)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _ITEM and is_partial(args[0]):
            return func(replicated(args[0]))
        kind = kind_of(func, args)
        kwargs = kwargs or {}
        if kind is OperatorKind.NEW and is_cut(args[0]) and tuple(args[1]) == args[0].shape:
            return new_rows(func, args, kwargs)
        own = [one for one in tree_leaves((args, kwargs)) if isinstance(one, UnevenDTensor)]
        if func not in _OF_THE_OBJECT:
            for one in own:
                _check_present(one)
            refresh(own)
        if kind not in (OperatorKind.LOCAL, OperatorKind.NEW) and any(map(is_cut, own)):
            if kind is OperatorKind.VIEW:
                return view(func, args, kwargs)
            same = aligned(func, args, kwargs) if kind is OperatorKind.ELEMENTWISE else None
            if same is None:
                return by_whole(func, args, kwargs)
            args = same
        originals: dict[int, UnevenDTensor] = {}
        kept: list[DTensor] = []
        of_nothing = norm_of_nothing(args) if func in NORMS else None

        def plain(value: UnevenDTensor) -> DTensor:
            local = value._local_tensor
            if of_nothing is not None and local.numel() == 0:
                local = local.new_full((1,) * local.dim(), of_nothing)
            made = DTensor(local, value._spec, requires_grad=value.requires_grad)
            originals[id(made)] = value
            kept.append(made)
            return made

        plain_args, plain_kwargs = tree_map_only(UnevenDTensor, plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        write_back(func, args, kwargs)
        if (kind is OperatorKind.VIEW or func in _OF_THE_OBJECT) and own[0].window:
            return windows(cls, result, own[0].window)

        def uneven(value: Any, sources: Iterable[Any]) -> Any:
            if id(value) in originals:
                return originals[id(value)]
            if type(value) is not DTensor or kind is OperatorKind.NEW:
                return value
            if is_partial(value):  # `item` of it is to be that of the whole
                return with_chunks(value, None)
            like = [one for one in sources if _same_geometry(one, value)]
            if not like or not all(same_rows(one.chunks, like[0].chunks) for one in like):
                return value
            return with_chunks(value, like[0].chunks)

        lists = lists_of(args)
        if kind is OperatorKind.ELEMENTWISE and lists and isinstance(result, (list, tuple)):
            columns = zip(*[args[n] for n in lists], strict=True)
            return [uneven(value, at) for value, at in zip(result, columns, strict=True)]
        return tree_map(lambda value: uneven(value, originals.values()), result)

    @property  # type: ignore[override]
    def data(self) -> UnevenDTensor:
        """Torch's `data`. An assignment to that of a parameter or a gradient copies the values into
        this rank's rows; what `data` has returned before keeps its own."""
        shown: UnevenDTensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        if self.is_fixed:
            alive = [ref for ref in self.given if ref() is not None]
            self.given = (*alive, weakref.ref(shown))
        return shown

    @data.setter
    def data(self, value: Any) -> None:
        if not self.is_fixed:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            if isinstance(value, DTensor):
                self._local_tensor = value._local_tensor
                self._spec = value._spec
            self.chunks = getattr(value, "chunks", None)
            return
        refuse_data(self, value)
        for ref in self.given:
            earlier = ref()
            if earlier is not None and earlier is not value:
                earlier._local_tensor = earlier._local_tensor.clone()
        with torch.no_grad():
            self.copy_(value)

    def data_ptr(self) -> int:
        """0, as of any DTensor whose local tensor begins its storage: the address is that of the
        local tensor. Torch takes another address for a storage of the wrapper's own."""
        return 0

    def detach(self) -> UnevenDTensor:
        """Torch's `detach`, for `nn.Parameter` and `state_dict`."""
        local = self._local_tensor
        if local.device == self.device:
            detached: Any = super().detach()
        else:
            # Main weights in host memory, of a parameter that reports the GPU. Torch 2.11 refuses
            # to give its result another device than that.
            detached = DTensor(local.detach(), self._spec, requires_grad=False)
        made = with_chunks(detached, self.chunks)
        made.window = self.window
        return made

    def clone(self, *args: Any, **kwargs: Any) -> DTensor:  # type: ignore[override]
        """Torch's `clone`; a DTensor of torch's class if a gradient flows through it."""
        cloned: Any = super().clone(*args, **kwargs)
        if cloned.requires_grad:
            return cloned
        return with_chunks(cloned, self.chunks)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Torch's placements, but `OwnRows` for axes that cut rows. The last of those has this
        rank's rows; the others have all, so that torch's arithmetic cuts nothing there."""
        placements = list(self._spec.placements)
        chunks = self.chunks
        if chunks is None or len(chunks.boxes) > 1:
            return tuple(placements)
        last = None
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard) and placement.dim == 0:
                placements[axis] = OwnRows(0, self.shape[0], 0)
                last = axis
        if last is not None:
            offsets, sizes = chunks.boxes[0] if chunks.boxes else ((0,), (0,))
            placements[last] = OwnRows(0, sizes[0], offsets[0])
        return tuple(placements)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, on every rank. Collective over the mesh, whose ranks must all call
        it."""
        if is_partial(self):
            return super().full_tensor(grad_placements=grad_placements)
        return whole_tensor(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """A DTensor over the same mesh with torch's own, even `placements`. Collective. Every rank
        has the whole tensor meanwhile.

        Raises ValueError for another mesh, or without placements.
        """
        if is_partial(self):
            return super().redistribute(
                device_mesh,
                placements,
                async_op=async_op,
                forward_dtype=forward_dtype,
                backward_dtype=backward_dtype,
            )
        mesh = self.device_mesh
        if device_mesh is not None and device_mesh != mesh:
            raise ValueError(
                f"redistribute from {mesh} to {device_mesh}: rows move within their "
                "own mesh only. Use distribute_tensor(tensor.full_tensor(), mesh, placements)"
            )
        if placements is None:
            raise ValueError("redistribute: placements is missing. Give one for each mesh axis")
        whole = whole_tensor(self).to(forward_dtype or self.dtype)
        if all(placement.is_replicate() for placement in placements):
            return DTensor.from_local(whole, mesh, list(placements), run_check=False)
        # Every rank has the whole already, so none is asked for it.
        return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return known_chunks(self).listed()

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return known_chunks(self).write_items(fqn, self._local_tensor, self.size())

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return known_chunks(self).block(self._local_tensor, index)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnevenDTensor:
        self._raise_if_parameter("copy.deepcopy")
        plain = DTensor(self._local_tensor.detach().clone(), self._spec, requires_grad=False)
        copied = with_chunks(plain, self.chunks)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._raise_if_parameter("pickle")
        # A clone: the storage of the local tensor is a flat buffer's, of many parameters.
        local = self._local_tensor.detach().clone()
        boxes = None if self.chunks is None else self.chunks.boxes
        return _rebuilt, (local, self._spec, boxes)

    def _raise_if_parameter(self, what: str) -> None:
        if getattr(self, "_is_param", False):
            raise RuntimeError(
                f"{what} of a parameter of a sharded model, shape {tuple(self.shape)}: it is a "
                "view of flat buffers, and a copy would be none. Use model.state_dict(), or load "
                "that into another sharded model"
            )


_ITEM = torch.ops.aten._local_scalar_dense.default
"""The operator behind `item`, `float` and `bool`."""

_OF_THE_OBJECT = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""Operators that read no values."""


def _check_present(dtensor: DTensor) -> None:
    """RuntimeError if the storage of the local tensor was given back."""
    local = dtensor._local_tensor
    if local.numel() and not local.is_meta and local.untyped_storage().nbytes() == 0:
        raise RuntimeError(
            f"reading a tensor of shape {tuple(dtensor.shape)} of a sharded model whose memory was "
            "released. Call return_memory(model, optimizer) first; of a gradient that was taken "
            "off its parameter (grad = None), and is gone with the next forward, keep grad.clone()"
        )


def refuse_data(dtensor: UnevenDTensor, value: Any) -> None:
    """RuntimeError if `value` cannot be assigned to `data` of a parameter or a gradient."""
    devices = (dtensor.device, dtensor._local_tensor.device)
    fits = isinstance(value, DTensor) and value.device in devices
    if not fits or value.shape != dtensor.shape or value.dtype != dtensor.dtype:
        raise RuntimeError(
            f"data of a sharded tensor of shape {tuple(dtensor.shape)}, {dtensor.dtype}, was set "
            f"to a {type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}, but it is "
            "a view of a flat buffer, which keeps shape, dtype and device. Assign a DTensor like "
            "it (distribute_tensor makes one of a whole tensor)"
        )


def with_chunks(plain: DTensor, chunks: Chunks | None) -> UnevenDTensor:
    made = UnevenDTensor(plain._local_tensor, plain._spec, requires_grad=False)
    made.chunks = chunks
    return made


def _rebuilt(local: torch.Tensor, spec: Any, boxes: tuple[Box, ...] | None) -> UnevenDTensor:
    """The tensor that pickle restores. It has no cut: that was of layouts of another process."""
    plain = DTensor(local, spec, requires_grad=False)
    if boxes is None:
        return with_chunks(plain, None)
    return with_chunks(plain, Chunks(boxes))


torch.serialization.add_safe_globals([_rebuilt])
"""`torch.load` knows what `torch.save(model.state_dict())` wrote, as it knows torch's DTensors."""


def _same_geometry(source: Any, value: DTensor) -> bool:
    if not isinstance(source, UnevenDTensor) or source.shape != value.shape:
        return False
    return (
        source._local_tensor.shape == value._local_tensor.shape
        and source._spec.placements == value._spec.placements
        and source.device_mesh == value.device_mesh
    )


def is_replicated(dtensor: DTensor) -> bool:
    """True if every rank holds the whole tensor, so that its place in it is known."""
    return all(placement.is_replicate() for placement in dtensor._spec.placements)


def even_chunks(dtensor: DTensor) -> Chunks | None:
    """The chunks of a DTensor that torch split into blocks; None if this rank's part is not what
    torch's even split gives it, so that its rows are unknown."""
    if any(type(placement) not in (Shard, Replicate) for placement in dtensor._spec.placements):
        return None
    (chunk,) = DTensor.__create_chunk_list__(dtensor)
    sizes = tuple(chunk.sizes)
    if sizes != tuple(dtensor._local_tensor.shape):
        return None
    if math.prod(sizes) == 0:
        return Chunks(())
    box = (tuple(chunk.offsets), sizes)
    return Chunks((box,))


def placed_chunks(dtensor: DTensor) -> Chunks | None:
    """`chunks_of` a DTensor, or the even ones of a DTensor of torch's; None without."""
    found = chunks_of(dtensor)
    return even_chunks(dtensor) if found is None and type(dtensor) is DTensor else found


def own_chunks(dtensor: DTensor) -> Chunks:
    """`placed_chunks` of a DTensor; ValueError if it has none."""
    found = placed_chunks(dtensor)
    if found is None:
        raise ValueError(
            f"a DTensor of shape {tuple(dtensor.shape)} carries no chunks. Take it from a sharded "
            "model's parameters, or make it with dtensor_like"
        )
    return found


def known_chunks(dtensor: DTensor) -> Chunks:
    """`chunks_of` a DTensor, or its `even_chunks`; ValueError if its place is unknown."""
    chunks = chunks_of(dtensor) or even_chunks(dtensor)
    if chunks is None:
        raise ValueError(
            f"a DTensor of shape {tuple(dtensor.shape)} is split unevenly (here "
            f"{tuple(dtensor._local_tensor.shape)}) and carries no chunks"
        )
    return chunks


def whole_tensor(dtensor: DTensor) -> torch.Tensor:
    """The whole of an `UnevenDTensor`, or of a DTensor that torch split, on every rank of its mesh,
    without a gradient. Collective.

    Each rank writes its blocks into a tensor of zeros, whose bytes are then added up over each
    mesh axis along which the tensor is sharded. Blocks are disjoint, so no byte changes, and one
    collective per axis replaces an exchange of shapes and a gather of unequal sizes. Costs one
    full tensor of memory, on the mesh's device. ValueError for a shard whose place in the whole is
    unknown.
    """
    _check_present(dtensor)
    mesh = dtensor.device_mesh
    local = dtensor._local_tensor.detach()
    if local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    if is_replicated(dtensor):
        return local.clone()
    full = torch.zeros(tuple(dtensor.shape), dtype=local.dtype, device=local.device)
    known_chunks(dtensor).put_into(full, local.contiguous())
    raw = full.view(-1).view(torch.uint8)
    for axis, placement in enumerate(dtensor._spec.placements):
        if not placement.is_replicate():
            dist.all_reduce(raw, group=mesh.get_group(axis))
    return full


_CHUNK_LIST = "__create_chunk_list__"


def chunks_of(dtensor: DTensor) -> Chunks | None:
    """The chunks that a DTensor carries: its own, or what another engine hung on its local tensor,
    where torch DCP looks too."""
    if isinstance(dtensor, UnevenDTensor) and dtensor.chunks is not None:
        return dtensor.chunks
    listed = getattr(dtensor._local_tensor, _CHUNK_LIST, None)
    if listed is None:
        return None
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in listed()]
    return Chunks(tuple(boxes))
