"""The two `Parameter` objects of a weight, and which of them the module tree shows.

Inside forward and backward a module's slot holds the unsharded parameter, a plain tensor over the
gathered weights. Outside it holds the sharded parameter, a DTensor over this rank's rows of the
main weights. Both objects are made once: optimizer groups, name caches and state dicts go by
object identity.

An unsharded parameter raises when it is read while its weights are not there. Without this a read
of released storage is a segmentation fault on the CPU and an illegal memory access on CUDA; where
the weights are kept but stale, it silently gives the last step's values. If gathered weights are
dropped later, writes to them are counted, so that a lost write is an error.

For this the class of the parameter object is swapped, and no flag is checked at every use. A swap
takes about 0.1 us. While the weights are present no function of Python's stands between the
parameter and an operation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves

from megatron_fsdp_adapter.core.dtensor.chunks import dtensor_like
from megatron_fsdp_adapter.core.dtensor.uneven import UnevenDTensor, dtensor_over
from megatron_fsdp_adapter.core.layout.group import ParamSpec

from .group import ParamGroup
from .partition import ManagedParam


def as_dtensor(local: torch.Tensor, group: ParamGroup, index: int) -> DTensor:
    """A DTensor of item `index`'s global shape over this rank's rows `local`. It is torch's own
    where rows are split as torch splits them (`EngineConfig.even_rows`), else an `UnevenDTensor`.

    If the mesh ends in an axis over which the model itself splits tensors, the global shape is that
    of the whole tensor. The group's layout has one part of it. Rows are split unevenly and without
    communication: shape and stride are stated, so torch neither checks nor infers them. The result
    aliases `local`; its `chunks`, which say which rows these are, are set later.
    """
    shape = group.layout.specs[index].layout_shape
    placements: list[Placement] = []
    if group.domain.outer is not None:
        placements.append(Shard(0) if group.shards.splits_outer else Replicate())
    placements.append(Shard(0) if group.shards.splits_axis else Replicate())
    if group.domain.mesh.ndim > len(placements):
        split = group.managed[index].split
        placements.append(Replicate() if split is None else Shard(split))
        if split is not None:
            parts = group.domain.mesh.size(-1)
            shape = (*shape[:split], shape[split] * parts, *shape[split + 1 :])
    stride = torch.empty(shape, device="meta").stride()
    if group.config.even_rows and is_split_as_by_torch(group):
        return dtensor_over(local, group.domain.mesh, placements, shape, stride)
    return UnevenDTensor.over(local, group.domain.mesh, placements, shape, stride)


def is_split_as_by_torch(group: ParamGroup) -> bool:
    """True if torch's placements tell this rank's rows of each parameter of `group`. With replicas
    that are sharded too, torch would split over these first."""
    return group.shards.held.layout.has_even_rows and not group.shards.splits_outer


def mark_as_part_of_buffer(dtensor: DTensor) -> None:
    """Notes that the local tensor is part of a flat buffer."""
    if isinstance(dtensor, UnevenDTensor):
        dtensor.is_fixed = True
        return
    begins_its_storage(dtensor)
    dtensor._fsdp_storage = dtensor.untyped_storage()._cdata  # type: ignore[attr-defined]


def begins_its_storage(dtensor: DTensor) -> None:
    """Has `data_ptr` return 0, as if the local tensor began its storage. Torch takes another
    address for a storage of the wrapper's own, and `deepcopy` and background saves fail."""
    dtensor.data_ptr = _zero  # type: ignore[method-assign]


def _zero() -> int:
    return 0


def refuse_assigned_data(pairs: Iterable[ParamPair]) -> None:
    """RuntimeError if a program has assigned to `data` of a parameter or a gradient: a DTensor of
    torch's keeps its local tensor then, so that the values would be lost without an error."""
    for pair in pairs:
        refuse_assigned(pair.sharded, f"data of parameter {pair.managed.fqns[0]}")
        refuse_assigned(pair.grad, f"grad.data of parameter {pair.managed.fqns[0]}")


def refuse_assigned(value: Any, name: str) -> None:
    """RuntimeError if `data` of a DTensor was assigned. name: of the data."""
    storage = getattr(value, "_fsdp_storage", None)
    if storage is not None and value.untyped_storage()._cdata != storage:
        raise RuntimeError(
            f"{name} was assigned, but a DTensor keeps its local tensor, so the values would be "
            "lost. Write them in place: parameter.copy_(values)"
        )


@dataclass(eq=False)
class ParamPair:
    """Both identities of one parameter, and its gradient as the optimizer sees it.

    `grad` aliases this rank's rows of the main gradients; None for a parameter that was never
    trained.
    """

    managed: ManagedParam
    group: ParamGroup
    index: int
    sharded: nn.Parameter
    grad: DTensor | None = None

    @property
    def unsharded(self) -> nn.Parameter:
        """The parameter that modules show while its unit is unsharded."""
        return self.managed.in_module

    @property
    def spec(self) -> ParamSpec:
        """The parameter in its group's layout."""
        return self.group.layout.specs[self.index]

    def make_grad(self) -> None:
        """Makes `grad` of the group's gradients, whose buffers may be released."""
        group = self.group
        made: Any
        if self.managed.sharded is None:
            made = as_dtensor(
                group.grads.main.items(group.shards.held)[self.index], group, self.index
            )
        else:
            spec = self.sharded._spec  # type: ignore[attr-defined]
            own = group.grads.host or group.grads.main
            place = (spec.mesh, spec.placements, spec.shape, spec.stride)
            made = dtensor_over(own.items(group.shards.held)[self.index], *place)
        mark_as_part_of_buffer(made)
        if made.dtype != self.sharded.dtype:
            self.sharded.grad_dtype = made.dtype  # type: ignore[attr-defined]
        self.grad = made

    def attach_grad(self) -> None:
        """Sets the gradient under both names that optimizers look at. Adds to it a gradient that
        the sharded parameter has already: a loss may have read that parameter."""
        given: Any = self.sharded.grad
        if given is not None and given is not self.grad:
            self.grad._local_tensor.add_(self.local_of(given))  # type: ignore[union-attr]
        self.sharded.grad = self.grad  # type: ignore[assignment]
        self.sharded.decoupled_grad = self.grad  # type: ignore[attr-defined]

    def local_of(self, given: Any) -> torch.Tensor:
        """This rank's rows of a gradient that the engine did not make."""
        if getattr(given, "placements", None) != self.grad.placements:  # type: ignore[union-attr]
            raise RuntimeError(
                f"grad of parameter {self.managed.fqns[0]} was set to a {type(given).__name__} "
                f"that is not sharded like the parameter ({self.grad.placements}). Make it from "  # type: ignore[union-attr]
                "the .grad that is there, by operations that keep its placement"
            )
        return given._local_tensor

    def drop_grad(self) -> None:
        """Takes the gradient off the parameter. Its memory is that of the next gradients, so a
        program that has kept a DTensor of torch's gets its values. An `UnevenDTensor` raises when
        it is read."""
        self.sharded.grad = None
        self.sharded.decoupled_grad = None  # type: ignore[attr-defined]
        kept: Any = self.grad
        if type(kept) is DTensor and sys.getrefcount(kept) > ONLY_HERE:
            self.grad = dtensor_like(kept, kept._local_tensor)
            mark_as_part_of_buffer(self.grad)
            kept._local_tensor = kept._local_tensor.clone()


ONLY_HERE = 3
"""References to a pair's gradient that no program has, as `sys.getrefcount` counts them in
`drop_grad`: the pair's, the local name's, and that of the call."""


def make_pairs(groups: Sequence[ParamGroup]) -> list[ParamPair]:
    """A pair for each parameter of `groups`, in order."""
    pairs = []
    for group in groups:
        trainable = group.key.requires_grad
        held = group.shards.held
        for index, managed in enumerate(group.managed):
            rows = group.main.rows(index)
            sharded: Any = managed.sharded
            if sharded is None:
                made = as_dtensor(rows, group, index)
                sharded = nn.Parameter(made, requires_grad=trainable)
            else:
                if sharded.device.type != rows.device.type:
                    _report_device_of(sharded, rows)
                sharded._local_tensor = rows
            if group.main.is_on_host:
                # The DTensor was made over device memory, and goes on reporting that device: torch
                # refuses a gradient on another device than its parameter's.
                sharded._local_tensor = group.main.buffer.items(held)[index]
            mark_as_part_of_buffer(sharded)
            pair = ParamPair(managed, group, index, sharded)
            if trainable:
                pair.make_grad()
            pairs.append(pair)
    return pairs


def _report_device_of(sharded: Any, rows: torch.Tensor) -> None:
    """Makes a sharded parameter report the device of `rows`."""
    spec = sharded._spec
    made = dtensor_over(rows, spec.mesh, spec.placements, spec.shape, spec.stride)
    marks = dict(vars(sharded))
    torch.utils.swap_tensors(sharded, nn.Parameter(made, sharded.requires_grad))
    vars(sharded).update(marks)


ParamPlace = tuple[Any, str, nn.Parameter, nn.Parameter, str]
"""A place in a module: its dict and its key there, the sharded and the unsharded parameter, and its
full name."""


class UnitSlots:
    """The places in modules that hold the parameters of one unit, tied ones included.

    by_itself: they hold unsharded parameters only while the unit is unsharded.
    """

    def __init__(self, pairs: Sequence[ParamPair], by_itself: bool) -> None:
        self.by_itself = by_itself  # else the units of the model are shown together
        self.shows_unsharded = True  # what the places hold
        self._pairs = pairs  # in order
        # Whether gather extensions may make other unsharded parameters.
        self._changes = any(pair.managed.extension is not None for pair in pairs)
        self._known = self._places()  # as they are, if they do not change

    def _places(self) -> list[ParamPlace]:
        found = []
        for pair in self._pairs:
            managed = pair.managed
            for (module, name), fqn in zip(managed.slots, managed.fqns, strict=True):
                found.append((module._parameters, name, pair.sharded, pair.unsharded, fqn))
        return found

    def _current(self) -> list[ParamPlace]:
        return self._places() if self._changes else self._known

    def replaced(self) -> str | None:
        """The name of a parameter that is not the one that was put in its place; None without."""
        for params, name, sharded, unsharded, fqn in self._current():
            if params.get(name) is not (unsharded if self.shows_unsharded else sharded):
                return fqn
        return None

    def show(self, unsharded: bool) -> None:
        """Puts unsharded or sharded parameters in the place of the others. A place where a program
        has put something else for a while, such as `functional_call`, keeps that."""
        if unsharded is self.shows_unsharded:
            return
        self.shows_unsharded = unsharded
        for params, name, one, other, _ in self._current():
            before, after = (one, other) if unsharded else (other, one)
            if params.get(name) is before:
                params[name] = after


class ParameterSwitch:
    """Puts unsharded or sharded parameters into all slots of the module tree, or lets each unit do
    that for its own ones."""

    def __init__(self, units: Sequence[UnitSlots]) -> None:
        # Whether forwards and backwards may read gathered weights. All modules have unsharded
        # parameters then, or those of the units that are unsharded.
        self.shows_unsharded = True
        self._units = units  # in order

    def show(self, unsharded: bool, before: Callable[[], None] = lambda: None) -> None:
        """Shows unsharded or sharded parameters. Runs `before` first, if that is a change.

        Raises:
            RuntimeError: a slot does not hold what was put there. A weight that was tied or rebuilt
                after sharding would be undone here in silence. Nothing is changed then.
        """
        if unsharded is self.shows_unsharded:
            return
        for slots in self._units:
            name = slots.replaced()
            if name is not None:
                raise RuntimeError(_replaced(name))
        before()
        for slots in self._units:
            if not (unsharded and slots.by_itself):
                slots.show(unsharded)
        self.shows_unsharded = unsharded


def _replaced(fqn: str) -> str:
    return (
        f"parameter {fqn} was replaced or removed after the model was sharded (by an assignment, "
        "tie_weights(), a parametrization, functional_call), so the flat buffers have neither "
        "its values nor its attributes. Do that before sharding the model, and change values by "
        "load_state_dict"
    )


_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "_grad", "grad_fn",
    "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized", "itemsize",
    "nbytes", "names", "_base", "output_nr", "retains_grad", "_backward_hooks", "_version",
    "_post_accumulate_grad_hooks", "is_mkldnn", "is_xpu", "is_mps", "is_sparse_csr",
)  # fmt: skip
_METHODS = (
    "size", "numel", "nelement", "dim", "ndimension", "stride", "storage_offset", "element_size",
    "is_contiguous", "is_floating_point", "is_complex", "requires_grad_", "untyped_storage",
    "register_hook", "register_post_accumulate_grad_hook", "type", "__hash__", "__len__",
    "get_device", "is_inference",
)  # fmt: skip


def _metadata_functions() -> frozenset[Any]:
    # Not every property exists in every torch that is supported ("names" left in 2.13).
    present = [name for name in _PROPERTIES if hasattr(torch.Tensor, name)]
    getters = [getattr(torch.Tensor, name).__get__ for name in present]
    setters = [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
    methods = [getattr(torch.Tensor, name) for name in _METHODS]
    functions = torch.is_floating_point, torch.numel, torch.is_tensor
    return frozenset([*functions, *getters, *setters, *methods])


METADATA_FUNCTIONS = _metadata_functions()


class ReshardedParameter(nn.Parameter):
    """Class of an unsharded parameter while its unit's weights are resharded or stale.

    Metadata (shape, dtype, `.grad`, ...) can be read. Anything that would read data raises a
    RuntimeError with the parameter's label.
    """

    _fsdp_resharded = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        param = next((value for value in given if hasattr(type(value), "_fsdp_resharded")), None)
        if func is torch.Tensor.__repr__:
            return _represent(param)
        raise _not_gathered(getattr(func, "__name__", func), param)


def _read_of_dtensor(name: str) -> Callable[..., Any]:
    """The method `name` of a resharded DTensor, which torch calls without `__torch_function__`."""

    def method(param: Any, *args: Any, **kwargs: Any) -> Any:
        raise _not_gathered(name, param)

    return method


class ReshardedDTensor(DTensor):
    """Class of a module's DTensor while its unit's weights are resharded or stale; see
    `ReshardedParameter`."""

    __slots__ = ()
    _fsdp_resharded = True
    __torch_function__ = ReshardedParameter.__dict__["__torch_function__"]
    to_local = _read_of_dtensor("to_local")
    full_tensor = _read_of_dtensor("full_tensor")
    redistribute = _read_of_dtensor("redistribute")


def _assign_data(param: Any, value: torch.Tensor) -> None:
    # A copy of the parameter has no label, and is free. Megatron's router assigns the same memory.
    if hasattr(param, "_fsdp_label") and value.data_ptr() != param.data_ptr():
        raise RuntimeError(
            f"{_label(param)}.data was assigned, but the parameter is a view of a flat buffer, "
            "which keeps the old values. Write it in place (copy_) between steps"
        )
    torch.Tensor.data.__set__(param, value)  # type: ignore[attr-defined]


class PresentParameter(nn.Parameter):
    """Class of an unsharded parameter while its weights are there, and are main weights.

    An assignment of other memory to `data` raises RuntimeError."""

    data = property(torch.Tensor.data.__get__, _assign_data)  # type: ignore[attr-defined,assignment]


class GatheredParameter(nn.Parameter):
    """Class of an unsharded parameter while its weights are there, if what is written to them will
    be lost: they are dropped, or cast from main weights again.

    `_version` counts the writes. The tensor that torch gives as `data` has a count of its own, so
    that `weight.data.clamp_()` would not be seen. The tensor given here shares the parameter's.
    """

    data = property(torch.Tensor.detach, _assign_data)  # type: ignore[assignment]


def refuse_writes(labels: Sequence[str]) -> None:
    """Raises RuntimeError if there are `labels`, of parameters whose gathered weights were
    written."""
    if labels:
        raise RuntimeError(
            f"{', '.join(labels)}: gathered weights were written in a forward, or between a "
            "forward and its backward, and the next cast from main weights overwrites them. Keep "
            "such values in a buffer (register_buffer), write parameters between steps after "
            "zero_grad(), or run a forward without a backward under torch.no_grad()"
        )


def _label(param: Any) -> str:
    return getattr(param, "_fsdp_label", "a parameter")


def _not_gathered(action: Any, param: Any) -> RuntimeError:
    return RuntimeError(
        f"{action} reads {_label(param)}, whose weights are not gathered (phase SHARDED). Call "
        "the module that owns it (a unit, or the whole model), or read the sharded parameter "
        "from named_parameters() of the wrapped model, between a complete backward and the next "
        "forward"
    )


_OF_THE_OBJECT = ("shape", "size", "dtype", "device", "is_cuda", "is_cpu")
"""Properties that a class of quantized tensors would look up in its fields: here torch's own."""


@functools.cache
def resharded_class(original: type, fields: tuple[str, ...]) -> type:
    """The class of a parameter of class `original` while the values in its attributes `fields` are
    not there. Reading a field raises, and so do operations. Assigning a field works.

    Each original class needs its own: classes are swapped only if objects have the same layout in
    memory. The fields stay in the object's dictionary, where properties of this class hide them.
    """
    members: dict[str, Any] = {name: getattr(torch.Tensor, name) for name in _OF_THE_OBJECT}
    for name in fields:
        members[name] = _refused(name)
    members["__torch_function__"] = ReshardedParameter.__dict__["__torch_function__"]
    members["_fsdp_resharded"] = True
    members["__repr__"] = _represent
    return type(f"Resharded{original.__name__}", (original,), members)


def _represent(param: Any) -> str:
    return f"<resharded {_label(param)}>"


def _refused(name: str) -> property:
    def read(param: Any) -> Any:
        raise _not_gathered(name, param)

    def write(param: Any, value: Any) -> None:
        param.__dict__[name] = value

    return property(read, write)
