"""Parameters that are gathered by functions of their own: the gather extensions of torch's FSDP2.

A tensor, usually of a subclass, says by two functions what is gathered of its rows, and what
modules get of that:

    sharded parameter       DTensor; its local tensor has this rank's rows, in memory of its own
    fsdp_pre_all_gather     makes the tensors that this rank sends, of any dtype
    buffers                 the tensors of all ranks, gathered in the unit's launch
    fsdp_post_all_gather    makes the unsharded parameter of them once, and then writes into it

The engine manages a plain parameter without memory in place of the module's. Modules have it too
until the first gather. A hook hands the unsharded parameter's gradient to it, so that gradients go
through the buffers of the group.

Tensors are gathered as bytes: not every process group carries 8-bit floats.

A parameter that is split along another dim than the first is gathered in the same way, by functions
of this module. The managed one has the parts along that dim one below the other, so that each rank
has rows of it, which are the local tensor of the sharded parameter:

    unsharded parameter, dim 1 split        a b c d
                                            e f g h
    managed parameter                       a b
                                            e f
                                            c d
                                            g h
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_fsdp_adapter.core.comm.communicator import Pair
from megatron_fsdp_adapter.core.layout.ranges import divide_up
from megatron_fsdp_adapter.core.runtime.device import Runtime

from .buffer import FlatBuffer, Slot, mark_owned
from .partition import Extension, ManagedParam, UnitPlan, add_grad, unchecked
from .tensor_parallel import show_over

BEFORE = "fsdp_pre_all_gather"
AFTER = "fsdp_post_all_gather"

REMEDY = "Give its class both functions, pass it in ignored_params, or use plain weights"


def missing(tensor: Any) -> list[str]:
    """The names of the functions that a tensor has not."""
    return [name for name in (BEFORE, AFTER) if not hasattr(tensor, name)]


def with_extension(entry: ManagedParam, device: torch.device) -> ManagedParam:
    """`entry`, whose parameter is a sharded one, with a plain parameter without memory, which is on
    `device`."""
    sharded: Any = entry.param
    memory = _without_memory(sharded.shape, sharded.dtype, device)
    shown = nn.Parameter(memory, sharded.requires_grad)
    extension = Extension(type(sharded._local_tensor).__name__, sharded, shown)
    return replace(entry, param=shown, extension=extension, sharded=sharded)


def split_along(entry: ManagedParam, dim: int, size: int) -> ManagedParam:
    """`entry`, whose parameter has no values yet, split into `size` parts along `dim`, which is not
    the first one."""
    shown = entry.param
    rows, *others = shown.shape
    others[dim - 1] //= size
    shape = (rows * size, *others)
    memory = _without_memory(shape, shown.dtype, shown.device)
    managed = nn.Parameter(memory, shown.requires_grad)
    sharded: Any = entry.sharded
    extension = Extension(type(sharded._local_tensor).__name__, sharded, shown, dim=dim)
    return replace(entry, param=managed, extension=extension)


def parts_as_rows(whole: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The `size` parts of `whole` along `dim`, one below the other."""
    return torch.cat(whole.chunk(size, dim)) if dim else whole


def _without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A plain tensor without elements in memory."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made


def take_compute_dtype(plan: UnitPlan) -> None:
    """Gives managed parameters in place of those with extensions the dtype of compute weights."""
    for key, entries in plan.groups.items():
        for entry in entries:
            if entry.extension is not None:
                _convert(entry.param, key.dtype)


def _convert(managed: nn.Parameter, dtype: torch.dtype) -> None:
    marks = dict(vars(managed))
    empty = _without_memory(managed.shape, dtype, managed.device)
    torch.utils.swap_tensors(managed, nn.Parameter(empty, managed.requires_grad))
    vars(managed).update(marks)


def inner_names(tensor: torch.Tensor) -> list[str]:
    """The attributes with the tensors that a tensor of a subclass is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    return list(tensor.__tensor_flatten__()[0])


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor of a subclass is made of; itself, if it is plain."""
    names = inner_names(tensor)
    parts = [part for name in names for part in plain_parts(getattr(tensor, name))]
    return parts or [tensor]


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as a plain one."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


@torch.no_grad()
def rows_of_rank(given: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rows of rank number `rank` of `size`, as `torch.chunk` splits them, in new memory. There
    is memory for as many rows as the first rank has, so that ranks have equally much.

    Operators of the subclass do this, as under torch's FSDP2."""
    chunks = torch.chunk(given, size, dim=0)
    padded = given.new_zeros(chunks[0].size())
    rows = chunks[rank].size(0) if rank < len(chunks) else 0
    if rows:
        padded.narrow(0, 0, rows).copy_(chunks[rank])
    return padded.narrow(0, 0, rows)


def dtensor_of_rows(
    rows: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """A DTensor of global `shape` over the local tensor `rows`, which it has as it is: a view would
    need an operator that its class may lack."""
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, rows.dtype)
    return DTensor(rows, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


class ExtendedParam:
    """The weights of one parameter with extensions.

    Args:
        entry: the parameter.
        mesh: of the shard axis.
        size: ranks on that axis.
        dtype: in which modules compute.
    """

    def __init__(
        self,
        entry: ManagedParam,
        mesh: DeviceMesh,
        size: int,
        dtype: torch.dtype,
        runtime: Runtime,
    ) -> None:
        assert entry.extension is not None
        self.extension = entry.extension  # its parameters
        self.entry = entry  # names and places
        self._mesh = mesh  # of the shard axis
        self._size = size  # ranks on it
        self._dtype = dtype  # in which modules compute
        self._runtime = runtime  # takes and gives storage
        self._shape = torch.Size(entry.unsharded.shape)  # of the whole parameter
        # Of the managed one on the rank that has the most rows.
        self._most = torch.Size((divide_up(entry.param.shape[0], size), *entry.param.shape[1:]))
        # What is gathered into, one buffer for each tensor.
        self._buffers: list[FlatBuffer] = []
        # Memory that `fsdp_post_all_gather` has made beside these, as bytes.
        self._made: list[torch.Tensor] = []
        # The tensors that this rank sends, from when they are made until they are gathered.
        self._sent: list[torch.Tensor] = []
        # The metadata for `fsdp_post_all_gather`, if that is still to be called.
        self._metadata: tuple[Any] | None = None
        sharded: Any = self.extension.sharded
        self.rows = sharded._local_tensor  # of this rank

    def _named(self) -> str:
        return f"parameter {self.entry.fqns[0]} (class {self.extension.kind})"

    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The functions of the local tensor. RuntimeError if it lacks one: each rank would go on
        with values that no function has made."""
        if self.extension.dim:
            return self._compute_rows, self._joined
        sharded: Any = self.extension.sharded
        local = sharded._local_tensor
        absent = missing(local)
        if absent:
            raise RuntimeError(
                f"{self._named()} cannot be gathered: its class computes by itself, and has no "
                f"{' and no '.join(absent)}. {REMEDY}"
            )
        return getattr(local, BEFORE), getattr(local, AFTER)

    def _compute_rows(self, mesh: DeviceMesh) -> Any:
        """This rank's part along a dim, as `fsdp_pre_all_gather` gives what is sent."""
        sharded: Any = self.extension.sharded
        device = self.entry.unsharded.device
        return (sharded._local_tensor.to(device, self._dtype, non_blocking=True),), None

    def _joined(
        self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype, out: Any = None
    ) -> Any:
        """The parts of all ranks joined along their dim, as `fsdp_post_all_gather` does it."""
        (rows,) = outputs
        parts = rows.chunk(self._size)
        if out is None:
            joined = torch.cat(parts, self.extension.dim)
            return joined, (joined,)
        # Autograd may have saved the parameter, and its values are those again.
        with torch.autograd._unsafe_preserve_version_counter(out):
            torch.cat(parts, self.extension.dim, out=out)
        return None

    def ask(self) -> None:
        """Has `fsdp_pre_all_gather` make what this rank sends, and gives memory to buffers."""
        before, _ = self._functions()
        arguments: tuple[Any, ...] = (self._mesh,)
        if _takes_all(getattr(before, "__func__", before)):
            stride = torch.empty(self._shape, device="meta").stride()
            owner, _ = self.entry.slots[0]
            arguments = (self._mesh, self._shape, stride, owner, self.extension.policy)
        with torch.inference_mode(False), torch.no_grad():
            given, metadata = before(*arguments)
            self._check_sizes([tensor.size() for tensor in given])
            self._sent = [as_plain(tensor).contiguous() for tensor in given]
            if not self._buffers:
                self._buffers = [self._buffer_for(tensor) for tensor in self._sent]
        self._metadata = (metadata,)
        needed = [self._size * tensor.nbytes for tensor in self._sent]
        if needed != [buffer.nbytes for buffer in self._buffers]:
            raise RuntimeError(
                f"{self._named()}: {BEFORE} returned tensors of {needed} bytes in all ranks, and "
                f"before {[buffer.nbytes for buffer in self._buffers]}. Return equal sizes"
            )
        for buffer in self._buffers:
            buffer.allocate()

    def _check_sizes(self, sizes: Sequence[torch.Size]) -> None:
        """ValueError if this rank has fewer rows than others, and sends less."""
        sharded: Any = self.extension.sharded
        local = sharded._local_tensor
        padded = self._most
        if local.size() != padded and any(size != padded for size in sizes):
            raise ValueError(
                f"{self._named()}: its {self._shape[0]} rows are split unevenly over {self._size} "
                f"ranks, and {BEFORE} returned tensors of {[tuple(size) for size in sizes]}. "
                f"Return tensors of {tuple(padded)}, with padding behind this rank's rows"
            )

    def _buffer_for(self, tensor: torch.Tensor) -> FlatBuffer:
        made = FlatBuffer(self._size * tensor.nbytes, torch.uint8, self._runtime)
        made.label = f"the gathered weights of {self._named()}"
        return made

    def pairs(self) -> list[Pair]:
        """Output and input of each gather, as bytes; none if nothing was asked for."""
        outputs = [buffer.tensor for buffer in self._buffers]
        sent = [tensor.view(-1).view(torch.uint8) for tensor in self._sent]
        return list(zip(outputs, sent, strict=True)) if sent else []

    def finish(self) -> bool:
        """Has `fsdp_post_all_gather` make the unsharded parameter of what was gathered, or write
        into it. Returns whether it was made."""
        if self._metadata is None:
            return False
        (metadata,) = self._metadata
        _, after = self._functions()
        extension = self.extension
        with torch.inference_mode(False), torch.no_grad():
            outputs = tuple(self._outputs())
            self._sent = []
            self._metadata = None
            if extension.is_made:
                for memory in self._made:
                    self._runtime.allocate(memory)
                after(outputs, metadata, self._dtype, out=extension.shown)
                return False
            made, freed = after(outputs, metadata, self._dtype)
            self._keep(freed)
            stride = torch.empty(self._shape, device="meta").stride()
            self._show(torch.as_strided(made, self._shape, stride, storage_offset=0))
        return True

    def _outputs(self) -> Iterator[torch.Tensor]:
        """The gathered tensors, in the dtypes and with the rows of those that were sent."""
        for buffer, sent in zip(self._buffers, self._sent, strict=True):
            # `data` has a count of writes of its own: each gather writes into the buffer.
            yield buffer.tensor.data.view(sent.dtype).view(-1, *sent.shape[1:])

    def _keep(self, freed: Sequence[torch.Tensor]) -> None:
        """Takes over the memory of `freed` that is not that of buffers."""
        known = {buffer.tensor.untyped_storage()._cdata for buffer in self._buffers}
        for tensor in freed:
            for part in plain_parts(tensor):
                storage = part.untyped_storage()
                if storage._cdata not in known:
                    known.add(storage._cdata)
                    whole = torch.empty(0, dtype=torch.uint8, device=part.device)
                    self._made.append(whole.set_(storage))  # type: ignore[call-overload]
                    mark_owned(part)

    def _show(self, unsharded: torch.Tensor) -> None:
        """Gives modules `unsharded` as their parameter. Its gradient is handed over."""
        extension = self.extension
        managed = self.entry.param
        # One that is frozen may be trained later. Integers are never.
        may_be_trained = unsharded.is_floating_point()
        shown = nn.Parameter(unsharded, may_be_trained)
        if may_be_trained and self.entry.dtensor is None:
            shown.register_post_accumulate_grad_hook(self._handing_over())
        shown.requires_grad = managed.requires_grad
        for name, value in vars(managed).items():
            if name.startswith("_fsdp_"):
                setattr(shown, name, value)
        if self.entry.dtensor is not None:
            show_over(self.entry.dtensor, shown, self._taking_grad())
        for owner, name in self.entry.slots:
            if owner._parameters.get(name) is extension.shown:
                owner._parameters[name] = shown
        extension.shown = shown
        extension.is_made = True

    def _taking_grad(self) -> Callable[[torch.Tensor], None]:
        """A function that adds a gradient of the unsharded parameter to the managed one's."""
        managed = self.entry.param
        dim = self.extension.dim
        size = self._size

        def take(grad: torch.Tensor) -> None:
            grad = as_plain(grad)
            with unchecked():
                wanted = managed.grad_dtype  # type: ignore[attr-defined]
            if wanted is not None:
                grad = grad.to(wanted)
            add_grad(managed, parts_as_rows(grad, dim, size))

        return take

    def _handing_over(self) -> Callable[[Any], None]:
        """A hook that moves the gradient of the unsharded parameter to the managed one."""
        take_grad = self._taking_grad()

        def hand_over(shown: Any) -> None:
            grad = shown.grad
            shown.grad = None
            take_grad(grad)

        return hand_over

    def release_gathered(self) -> None:
        """Gives back the memory of buffers."""
        for buffer in self._buffers:
            buffer.release()

    def release(self) -> None:
        """Gives back the memory of gathered weights."""
        self._sent = []
        self._metadata = None
        self.release_gathered()
        for memory in self._made:
            self._runtime.release(memory)


@functools.lru_cache(maxsize=256)
def _takes_all(function: Callable[..., Any]) -> bool:
    """True if `fsdp_pre_all_gather` takes mesh, size, stride, module and policy; False if it takes
    the mesh alone. TypeError if it takes anything else."""
    names = [*inspect.signature(function).parameters]
    is_method = names[:1] == ["self"]
    count = len(names) - is_method
    if count not in (1, 5):
        raise TypeError(
            f"{BEFORE}{inspect.signature(function)}: it is called with (mesh), or with (mesh, "
            "outer_size, outer_stride, module, mp_policy). Give it one of these signatures"
        )
    return count == 5


class ExtendedWeights:
    """The compute weights of a group whose parameters have extensions; see `WeightBuffers`."""

    def __init__(
        self, params: Sequence[ExtendedParam], nbytes: int, slot: Slot, is_kept: bool
    ) -> None:
        self.params = params  # in layout order
        # Whether any is a copy of what was gathered.
        self.are_joined = any(param.extension.dim for param in params)
        self.nbytes = nbytes  # of unsharded weights in the compute dtype: about what they take
        self.slot = slot  # of the unit, of which nothing is taken
        self.is_kept = is_kept  # whether they stay while the unit does not compute
        self.keeps_shards = False  # of compute weights
        self.keeps_own = is_kept  # whether they need not be gathered again while they are current
        # There are no flat buffers.
        self.unsharded: list[Any] = []
        self.sharded: list[Any] = []  # likewise
        self.gather_pairs: list[Pair] = []  # which do not change
        self.outer_pairs: list[Pair] = []  # likewise
        self.held_segments: list[torch.Tensor] = []  # that main weights are cast to
        self.write_planes = None  # of quantized weights

    def allocate(self) -> None:
        """Nothing: buffers get memory when it is known what is gathered."""

    def asked_pairs(self) -> list[Pair]:
        """Output and input of each gather that was asked for."""
        return [pair for param in self.params for pair in param.pairs()]

    def finish(self) -> bool:
        """Makes unsharded parameters of what was gathered. Returns whether any is a new object."""
        made = [param.finish() for param in self.params]
        return any(made)

    def release_joined(self) -> None:
        """Gives back the memory of what was gathered and is copied, on the current stream."""
        for param in self.params:
            if param.extension.dim:
                param.release_gathered()

    def release(self) -> None:
        """Gives the memory of unsharded weights back, on the current stream."""
        for param in self.params:
            param.release()


class ExtendedMainWeights:
    """The main weights of such a group: the local tensors of the sharded parameters, which no flat
    buffer has; see `MainWeights`."""

    def __init__(self, params: Sequence[ExtendedParam], dtype: torch.dtype) -> None:
        self.is_compute_weight = False  # whether they are a slice of compute weights
        self.is_on_host = False  # whether they are in host memory
        self.dtype = dtype  # nominal
        self._params = params  # in layout order

    def rows(self, index: int) -> torch.Tensor:
        """The local tensor of the sharded parameter at `index`."""
        return self._params[index].rows

    @property
    def buffer(self) -> Any:
        """RuntimeError: there is none."""
        raise RuntimeError(
            f"parameter {self._params[0].entry.fqns[0]} is gathered by functions of its own "
            f"({BEFORE}), so no buffer has its main weights. Read its local tensor, or use plain "
            "weights for this"
        )

    @property
    def device_buffer(self) -> Any:
        """RuntimeError, as of `buffer`."""
        return self.buffer

    def changed(self) -> None:
        """Nothing: each gather asks for the present values."""

    def write_weights(self) -> None:
        """Has each parameter make what is gathered."""
        for param in self._params:
            param.ask()

    def write_weights_from_device(self) -> None:
        """Nothing: they are not in host memory."""
