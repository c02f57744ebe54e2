"""Partitions the parameters of a module tree into units and groups.

A *unit* is what is gathered and reduced together: one transformer layer, the embedding, the output
layer. Every parameter belongs to the unit module nearest above it; what lies outside all unit
modules belongs to the root unit, which is always there and always last in order. A parameter, or
the module that has it, may have several places. If the unit module nearest above each place is the
same, the parameter belongs to that unit, and else to the root.

Within a unit, parameters that share domain, dtype, format and `requires_grad` form a *group*: one
flat buffer, one launch.

    entries = []
    for entry in managed_params(module, units):
        entries.append(replace(entry, domain=..., format=...))
    plans = partition(units, entries)

The caller decides about each parameter in such a loop: what it leaves out is not sharded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.config import TRAINED_DTYPES, MixedPrecisionPolicy, Strategy
from megatron_fsdp_adapter.core.layout.format import WeightFormat, plain
from megatron_fsdp_adapter.core.layout.group import GroupLayout, ParamSpec
from megatron_fsdp_adapter.core.runtime.rank_warnings import warn
from megatron_fsdp_adapter.core.topology import DENSE

from .wgrad import WgradProtocol

ROOT = "root"
TO = " to "

Location = tuple[nn.Module, str]
"""A place in the module tree that holds a parameter: `module._parameters[name]`."""


unchecked = torch._C.DisableTorchFunctionSubclass
"""A context in which resharded parameters are not checked. For loops over `.grad` in every
backward: a check costs microseconds a parameter, although it passes."""


def add_grad(param: nn.Parameter, grad: torch.Tensor) -> None:
    """Adds a gradient that autograd has given another parameter in the place of `param`."""
    with unchecked():
        param.grad = grad if param.grad is None else param.grad + grad


@dataclass(frozen=True)
class GroupKey:
    """The properties that all parameters of a group share.

    dtype: of the compute weights, nominal where they are quantized.
    quantized: the format of quantized compute weights; None for others.
    given: the dtype of the module's parameters, if `dtype` is another one; else None.
    extended: they are gathered by functions of their own (`extensions.py`).
    """

    domain: str
    dtype: torch.dtype
    requires_grad: bool
    quantized: WeightFormat | None = None
    given: torch.dtype | None = None
    extended: bool = False

    @property
    def own_dtype(self) -> torch.dtype:
        """The dtype of the module's parameters."""
        return self.given or self.dtype

    @property
    def may_be_trained(self) -> bool:
        """True if its parameters are trained, or may be later."""
        return self.requires_grad or (self.quantized is None and self.own_dtype in TRAINED_DTYPES)

    @cached_property
    def format(self) -> WeightFormat:
        """The format of the compute weights."""
        return self.quantized or plain(self.dtype)

    @property
    def represented(self) -> str:
        """The representation in words: the dtype, and the format of quantized weights."""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.extended:
            return f"{dtype}, gathered by functions of its own"
        return dtype if self.quantized is None else f"{dtype} as {self.quantized.name}"


@dataclass(eq=False)
class Extension:
    """The parameters beside the managed one, if that is gathered by functions of its own
    (`extensions.py`), or split along another dim than the first."""

    # Name of the class of its values.
    kind: str
    # The sharded parameter, whose local tensor has the functions.
    sharded: nn.Parameter
    # The plain parameter that modules have while it is unsharded, by itself or in a DTensor. Until
    # `is_made` it has no values.
    shown: nn.Parameter
    # The policy of mixed precision, which the functions get.
    policy: Any = None
    # Whether weights were gathered before.
    is_made: bool = False
    # The dim that is split, if it is another one than the first.
    dim: int = 0


@dataclass(frozen=True)
class ManagedParam:
    """One parameter, and what is decided about it before units are partitioned.

    slots: all the places that hold it; fqns: its names there.
    unit: the name of the unit module that is nearest above all of them; ROOT if there is none.
    domain: the name of the ranks that share it.
    split: the dim along which the model itself split the whole tensor over the last axis of its
        mesh; None if it is whole, or if there is no such axis.
    writer: how its gradient is written.
    dtensor: the parameter that modules have, if that is a DTensor over `unsharded`
        (`tensor_parallel.py`); None if modules have that itself.
    sharded: the sharded parameter, if it was made before the engine is. Its local tensor has the
        first main weights, and `param` has no values then, unless it is quantized.
    extension: its other parameters, if it is gathered by functions of its own; else None.
    format: of its compute weights, if they are quantized; None for others.
    compute_dtype: of its compute weights; None for its own dtype, which quantized weights and
        integers have with any value.
    """

    param: nn.Parameter
    fqns: tuple[str, ...]
    slots: tuple[Location, ...]
    unit: str = ROOT
    domain: str = DENSE
    split: int | None = None
    writer: WgradProtocol = WgradProtocol.AUTOGRAD
    format: WeightFormat | None = None
    compute_dtype: torch.dtype | None = None
    dtensor: nn.Parameter | None = None
    sharded: nn.Parameter | None = None
    extension: Extension | None = None

    @property
    def in_module(self) -> nn.Parameter:
        """The parameter that modules have."""
        return self.unsharded if self.dtensor is None else self.dtensor

    @property
    def unsharded(self) -> nn.Parameter:
        """The plain parameter over gathered weights, which modules have or a DTensor over it."""
        return self.param if self.extension is None else self.extension.shown

    def over(self, local: nn.Parameter) -> ManagedParam:
        """This one with `local` in place of the parameter that modules have."""
        return replace(self, param=local, dtensor=self.param)

    @property
    def key(self) -> GroupKey:
        """The key of its group in its unit."""
        own = self.param.dtype
        dtype = own
        if self.format is None and own.is_floating_point:
            dtype = self.compute_dtype or own
        return GroupKey(
            domain=self.domain,
            dtype=dtype,
            requires_grad=self.param.requires_grad,
            quantized=self.format,
            given=None if dtype == own else own,
            extended=self.extension is not None,
        )

    @property
    def has_grads_of_its_dtype(self) -> bool:
        """True if autograd leaves `.grad` in the parameter's dtype. Its `grad_dtype` can ask for
        another one."""
        with unchecked():
            return getattr(self.param, "grad_dtype", self.param.dtype) == self.param.dtype

    def spec(self, index: int, key: GroupKey) -> ParamSpec:
        """The layout planner's description of this parameter, as number `index` of the group of
        `key`. Shards are cut between rows of dim 0, or granules of a quantized format."""
        shape = tuple(self.param.shape)
        by_autograd = self.writer is WgradProtocol.AUTOGRAD
        return ParamSpec(
            index=index,
            fqns=self.fqns,
            shape=shape,
            dtype=key.dtype,
            requires_grad=self.param.requires_grad,
            granularity=key.format.granularity(shape),
            quantized=key.quantized,
            from_autograd=by_autograd and self.has_grads_of_its_dtype,
        )


@dataclass(frozen=True)
class UnitPlan:
    """The parameters of one unit by group, in module order.

    module: None for the root unit.
    more: further modules, which run after `module`, if the unit was joined of several.
    backward_reads_weights: False for units whose backward needs no weights (an embedding look-up).
        Those are not gathered in backward.
    inside: of how many other units, the root aside, its module is a part.
    strategy: the unit's own, if that keeps more than the engine's.
    policy: the unit's own dtypes of gradients; None for the engine's.
    layouts: of its groups, once they are planned (`group.laid_out`).
    """

    name: str
    module: nn.Module | None
    groups: dict[GroupKey, list[ManagedParam]] = field(default_factory=dict)
    backward_reads_weights: bool = True
    inside: int = 0
    strategy: Strategy | None = None
    policy: MixedPrecisionPolicy | None = None
    more: tuple[nn.Module, ...] = ()
    layouts: Mapping[GroupKey, GroupLayout] = field(default_factory=dict)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules in the order in which they run."""
        return () if self.module is None else (self.module, *self.more)

    @property
    def numel(self) -> int:
        """Elements of its parameters."""
        total = 0
        for managed in self.groups.values():
            total += sum(one.param.numel() for one in managed)
        return total


def managed_params(
    module: nn.Module, units: Mapping[str, nn.Module] = MappingProxyType({})
) -> list[ManagedParam]:
    """All parameters below `module` in module order, each once with all of its places, and with
    its unit of `units`, which are name and module of each."""
    places: dict[nn.Parameter, list[tuple[str, Location]]] = {}
    for module_name, owner in module.named_modules():
        for name, param in owner._parameters.items():
            if param is not None:
                fqn = f"{module_name}.{name}" if module_name else name
                places.setdefault(param, []).append((fqn, (owner, name)))
    around = _units_around(module, units)
    found = []
    for param, own in places.items():
        fqns, slots = zip(*own, strict=True)
        found.append(ManagedParam(param, fqns, slots, unit=_owner(slots, around)))
    return found


def unit_modules(module: nn.Module, is_unit: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """The modules below `module` that `is_unit` accepts, by name, in module order."""
    return {name: child for name, child in module.named_modules() if name and is_unit(child)}


def only_looks_up(unit: nn.Module, classes: Collection[type[nn.Module]]) -> bool:
    """True if backward reads no weight of `unit`.

    So it is if the unit and all modules in it are of exactly these `classes`, which look rows up in
    a `weight`, and nothing was added to them. A subclass, a parametrization or a hook may compute
    with the weight."""
    for child in unit.modules():
        if type(child) not in classes or set(child._parameters) - {"weight"}:
            return False
        hooks = child._forward_hooks or child._forward_pre_hooks
        if hooks or "forward" in vars(child):
            return False
    return True


def units_that_look_up(
    units: Mapping[str, nn.Module], classes: Collection[type[nn.Module]]
) -> list[str]:
    """The names of the units whose backward reads no weights (`only_looks_up`)."""
    return [name for name, unit in units.items() if only_looks_up(unit, classes)]


def _units_around(module: nn.Module, units: Mapping[str, nn.Module]) -> dict[int, set[str]]:
    """The innermost units around each module's places, by its id; ROOT for a place in no unit."""
    names = {id(unit): name for name, unit in units.items()}
    found: dict[int, set[str]] = defaultdict(set)
    pending = [(module, ROOT)]
    while pending:
        child, around = pending.pop()
        own = names.get(id(child), around)
        if own not in found[id(child)]:
            found[id(child)].add(own)
            pending += [(inner, own) for inner in child.children()]
    return found


def _owner(slots: Iterable[Location], around: Mapping[int, set[str]]) -> str:
    """The name of the unit that is innermost around all the places; ROOT if those differ. around:
    of `_units_around`."""
    owners: set[str] = set()
    for holder, _ in slots:
        owners |= around[id(holder)]
    return owners.pop() if len(owners) == 1 else ROOT


def partition(
    units: Mapping[str, nn.Module],
    entries: Iterable[ManagedParam],
    forward_only: Collection[str] = (),
) -> list[UnitPlan]:
    """Plans for all units that hold parameters, in module order, then the root unit.

    Args:
        units: name and module of each unit, as from `unit_modules`.
        entries: the parameters to shard, of `managed_params` with the same units.
        forward_only: names of units whose backward reads no weights, as from `units_that_look_up`.

    Raises:
        ValueError: a parameter cannot be represented in its format.
    """
    plans = {}
    for name, child in units.items():
        outside = [other for other in units if name.startswith(f"{other}.")]
        reads = name not in forward_only
        plans[name] = UnitPlan(name, child, backward_reads_weights=reads, inside=len(outside))
    plans[ROOT] = UnitPlan(ROOT, None)
    for entry in entries:
        if entry.format is not None:
            _check_format(entry.format, entry)
        plans[entry.unit].groups.setdefault(entry.key, []).append(entry)
    return [plan for plan in plans.values() if plan.groups or plan.name == ROOT]


def _check_format(format: WeightFormat, managed: ManagedParam) -> None:
    """Raises ValueError if the parameter cannot be represented in `format`. Warns if it can, but
    cannot be sharded."""
    name = managed.fqns[0]
    shape = tuple(managed.param.shape)
    try:
        format.granularity(shape)
    except ValueError as error:
        raise ValueError(
            f"parameter {name} in format {format.name}: {error}. Use dimensions that those divide, "
            "or keep this module's weights in the compute dtype"
        ) from error
    if not format.cuts(shape):
        warn(
            f"parameter {name}: {shape[0]} rows are no multiple of {format.rows}, the rows of a "
            f"granule in format {format.name}, so it is not sharded, but on one rank of each "
            "shard group"
        )
