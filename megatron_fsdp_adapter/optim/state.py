"""State of inner optimizers: made before their first step, shown to programs, and loaded.

A program sees DTensors over the local tensors' storages. torch leaves it to programs to change
`optimizer.state`: to drop it, or to put other tensors there. So what was shown is remembered, and
compared with what is there before it is read again.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..core.dtensor.chunks import dtensor_like
from ..core.dtensor.uneven import chunks_of
from ..state.model_state import Piece, Place, piece_of, write_pieces

COUNT = "step"
"""The option in which fused optimizers count the steps of a group."""
ADAM = ("exp_avg", "exp_avg_sq")
SGD = ("momentum_buffer",)
FUSED = {"FusedAdam": ADAM, "FusedSGD": SGD}
"""Names of the classes of fused optimizers, as Transformer Engine and apex have them."""

GroupOptions = dict[str, Any]
"""Options of a parameter group: all of it, or all but its parameters."""


def _init_torch_state(optimizer: Any, group: GroupOptions) -> None:
    """Makes a group's state by torch's own `_init_group`, which a step begins with. That skips
    parameters without a gradient, so each parameter is its own gradient for the moment. It also
    fills lists, which are not needed here."""
    found: list[list[Any]] = [[] for _ in range(_count_lists(type(optimizer)))]
    params = group["params"]
    before = [local.grad for local in params]
    for local in params:
        local.grad = local.detach()
    try:
        optimizer._init_group(group, *found)
    finally:
        for local, grad in zip(params, before, strict=True):
            local.grad = grad


def _count_lists(kind: type) -> int:
    """Number of lists that `_init_group` fills. A subclass may take them as `*args` and pass them
    on: its base class names them then."""
    for base in kind.__mro__:
        init = vars(base).get("_init_group")
        if init is None:
            continue
        parameters = inspect.signature(init).parameters.values()
        if not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            return len(parameters) - len(("self", "group"))
    raise AssertionError(f"{kind} has no _init_group that names its arguments")


def _init_fused_state(optimizer: Any, group: GroupOptions) -> None:
    """Makes the state of TE's and apex's FusedAdam: two moments of each parameter, and the count of
    steps of the group. Before the first step the group has no count, and a load, which asks for
    what is there, would leave it out."""
    group.setdefault(COUNT, 0)
    for local in group["params"]:
        state = optimizer.state[local]
        if state:
            continue
        if hasattr(optimizer, "initialize_state"):
            remainders = getattr(optimizer, "store_param_remainders", False)
            optimizer.initialize_state(local, remainders)
        else:
            for name in ADAM:
                state[name] = torch.zeros_like(local, dtype=torch.float32)


def moments_of(optimizer: Any) -> tuple[str, ...]:
    """Names of the state that an Adam or SGD keeps in a parameter's shape, be it torch's or the
    fused one of Transformer Engine or apex. () for any other optimizer."""
    if isinstance(optimizer, torch.optim.Adam):
        return ADAM
    if isinstance(optimizer, torch.optim.SGD):
        return SGD
    for base in type(optimizer).__mro__:
        if base.__name__ in FUSED:
            return FUSED[base.__name__]
    return ()


def is_known(optimizer: Any) -> bool:
    """True if `make_state` makes the state that the optimizer's first step would make."""
    if moments_of(optimizer) == SGD and any(map(_is_dampened, optimizer.param_groups)):
        return False
    return is_torch_optimizer(optimizer) or bool(moments_of(optimizer))


def _is_dampened(group: GroupOptions) -> bool:
    """True if a group of SGD has momentum that no zeros can stand for before the first step. It
    begins as the whole first gradient, and `dampening` reduces later gradients only."""
    return group["momentum"] != 0 and group.get("dampening", 0) != 0


def _init_momentum(optimizer: Any, group: GroupOptions) -> None:
    """Makes momentum of zeros. torch's begins as the first gradient, which a step without dampening
    makes of zeros; with dampening none is made. With momentum=0 torch's keeps nothing; the fused
    one keeps a buffer."""
    if _is_dampened(group) or (group["momentum"] == 0 and is_torch_optimizer(optimizer)):
        return
    for local in group["params"]:
        state = optimizer.state[local]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(local)


def is_torch_optimizer(optimizer: Any) -> bool:
    """True if its class is one of torch's own optimizers, or derived from one."""
    for base in type(optimizer).__mro__:
        if base is not torch.optim.Optimizer and base.__module__.startswith("torch.optim."):
            return True
    return False


@torch.no_grad()
def make_state(
    optimizer: Any, leaves_out: Callable[[GroupOptions], Any] = lambda group: False
) -> None:
    """Makes state for the parameters that `optimizer` has now, without taking a step. Groups of
    which `leaves_out` is true get none."""
    if moments_of(optimizer) == SGD:
        init = _init_momentum
    elif is_torch_optimizer(optimizer):
        init = _init_torch_state
    else:
        init = _init_fused_state
    for group in optimizer.param_groups:
        if not leaves_out(group):
            init(optimizer, group)


StateEntry = dict[str, Any]
"""State of one parameter."""


Shown = tuple[StateEntry, StateEntry, StateEntry]
"""The shown state of a parameter: the dict in `optimizer.state`, what was in it, and what the inner
optimizer had at that time."""


def is_same(entry: StateEntry, other: StateEntry) -> bool:
    """True if both have the same objects under the same names."""
    if entry.keys() != other.keys():
        return False
    in_this_order = all(map(operator.is_, entry.values(), other.values()))
    return in_this_order or not changed(entry, other)


def is_unchanged(entry: StateEntry, known: Shown | None) -> bool:
    """True if a program has put nothing into a parameter's state since it was shown, and taken
    nothing out. known: what was shown; None if nothing was."""
    if known is None:
        return not entry
    own, before, _ = known
    return entry is own and is_same(entry, before)


def changed(entry: StateEntry, before: StateEntry) -> StateEntry:
    """The part of `entry` that is new, or another object than in `before`."""
    return {n: v for n, v in entry.items() if n not in before or before[n] is not v}


def are_same(params: Sequence[Any], others: Sequence[Any]) -> bool:
    """True if both have the same objects in the same order."""
    return len(params) == len(others) and all(map(operator.is_, params, others))


def is_like(value: Any, local: torch.Tensor) -> bool:
    """True if a value of a parameter's state has the shape of its local tensor."""
    return isinstance(value, torch.Tensor) and value.shape == local.shape and value.dim() > 0


def shown(param: Any, local: torch.Tensor, state: StateEntry) -> StateEntry:
    """State of a parameter as programs see it: a value with the parameter's shape is a DTensor."""
    return {n: dtensor_like(param, v) if is_like(v, local) else v for n, v in state.items()}


def taken_over(param: Any, local: torch.Tensor, name: str, value: Any) -> Any:
    """A `value` that a program has put into `optimizer.state`, as the inner optimizer keeps it: the
    local tensor of a DTensor, anything else as it is.

    Raises:
        RuntimeError: it has the parameter's shape, but other rows than this rank.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    own = getattr(value, "_local_tensor", value)
    if value.shape != param.shape:
        return own
    has_other_rows = isinstance(value, DTensor) and _boxes(value) not in (None, _boxes(param))
    if has_other_rows or own.shape != local.shape:
        raise RuntimeError(
            f"optimizer.state[param][{name!r}] of a parameter of shape {tuple(param.shape)}: a "
            f"{type(value).__name__} has other rows than this rank. Put torch.zeros_like(param) "
            "there, or a tensor computed from the one that was there"
        )
    return own


def _boxes(value: DTensor) -> Any:
    """The boxes of a DTensor's rows; None if they are not known."""
    found = chunks_of(value)
    return None if found is None else found.boxes


def load_values(optimizer: Any, groups: list[GroupOptions], state: dict[Any, StateEntry]) -> None:
    """Replaces the state of an optimizer on local shards by `state`. What is not in `state` is
    dropped. ValueError as of `_sort_values` and `write_pieces`.

    groups: their `params` are the keys of `state`, in the order of the optimizer's parameters."""
    shards = optimizer._fsdp_shards
    keyed: list[tuple[Any, Any]] = []
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        keyed += zip(group["params"], saved["params"], strict=True)
    like, others = _sort_values(optimizer, keyed, state)
    pieces = {label: moment.piece for label, moment in like.items()}
    write_pieces(pieces, {label: moment.value for label, moment in like.items()})
    for param, name, piece, _ in like.values():
        if piece.target is not optimizer.state[param].get(name):
            shards.put(param, name, piece.target._local_tensor)
    for param, name, value in others:
        target = optimizer.state[param].get(name)
        if isinstance(target, torch.Tensor):
            _fill(target, value)
        else:
            shards.put(param, name, copy.deepcopy(getattr(value, "_local_tensor", value)))
    for param, key in keyed:
        loaded = state.get(key, {})
        gone = [name for name in optimizer.state.get(param, {}) if name not in loaded]
        if gone:
            shards.drop(param, gone)
    shards.show_state(optimizer)


class Moment(NamedTuple):
    """A value of a state dict that has the rows of its parameter."""

    param: Any
    name: str
    # The tensor that it is written to.
    piece: Piece
    # A DTensor, or a plain whole tensor.
    value: torch.Tensor


def _sort_values(
    optimizer: Any, keyed: Sequence[tuple[Any, Any]], state: dict[Any, StateEntry]
) -> tuple[dict[str, Moment], list[tuple[Any, str, Any]]]:
    """Sorts the values of `state`, and writes nothing. Returns those that have a parameter's rows,
    by a label for messages; and parameter, name and value of the others. ValueError if some have a
    wrong shape, with the labels of the first ones.

    keyed: each parameter, and its key in `state`."""
    like: dict[str, Moment] = {}
    others = []
    wrong = []
    for param, key in keyed:
        for name, value in state.get(key, {}).items():
            present = optimizer.state[param].get(name)
            is_new = present is None and isinstance(value, torch.Tensor) and value.dim() > 0
            if not is_new and not isinstance(present, DTensor):
                others.append((param, name, value))
                continue
            label = f"{name} of parameter {key}"
            fitting = _fitting(param, value)
            if fitting is None:
                given = tuple(getattr(value, "shape", ())) or type(value).__name__
                wrong.append(f"{label}: {given} for {tuple(param.shape)}")
                continue
            piece = piece_of(_target(param, present, value.dtype), param, Place(label))
            like[label] = Moment(param, name, piece, fitting)
    if wrong:
        raise ValueError(
            f"optimizer state does not have the shapes of the parameters: {', '.join(wrong[:5])} "
            f"({len(wrong)} in all). Give DTensors or whole tensors, of the same model"
        )
    return like, others


def _fitting(param: Any, value: Any) -> torch.Tensor | None:
    """`value` as `write_pieces` takes it: a DTensor of the parameter's shape, or a tensor with as
    many elements as the whole parameter. Of this rank's rows a DTensor is made. Else None."""
    if not isinstance(value, torch.Tensor):
        return None
    if isinstance(value, DTensor):
        return value if value.shape == param.shape else None
    local = param._local_tensor
    if value.numel() == math.prod(param.fsdp_layout_ref.shape):
        return value
    if value.numel() != local.numel():
        return None
    return dtensor_like(param, value.detach().view(local.shape).to(local.device))


def _target(param: Any, present: DTensor | None, dtype: torch.dtype) -> DTensor:
    """The tensor that a moment of `param` is written into: `present`, which the optimizer has, if
    its rows are known."""
    if present is not None and chunks_of(present) is not None:
        return present
    local = param._local_tensor
    # An optimizer that made its state before it was adopted made DTensors that know no rows.
    own = torch.empty_like(local, dtype=dtype) if present is None else present._local_tensor
    return dtensor_like(param, own)


def load_options(group: GroupOptions, saved: GroupOptions) -> None:
    """Gives a group the saved options, those that are tensors in place. If nothing was counted when
    they were saved, the count of steps becomes 0."""
    if COUNT in group and COUNT not in saved:
        saved = {COUNT: 0, **saved}
    for name, value in saved.items():
        if name == "params":
            continue
        before = group.get(name)
        if isinstance(before, torch.Tensor):
            _fill(before, value)
        else:
            group[name] = value


def _fill(target: torch.Tensor, value: Any) -> None:
    """Writes a tensor or a number into `target`, of as many elements."""
    target.copy_(torch.as_tensor(value).view(target.shape))
