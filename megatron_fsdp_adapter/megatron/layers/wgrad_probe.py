"""Probes what a module with a fused weight gradient does to `main_grad`.

A fused weight-gradient GEMM overwrites `main_grad` or adds to it, depending on the module's class,
the precision and the release of Transformer Engine: 2.11 reads the flag from the *quantized* weight
in some layers, which never has it; 2.20 reads the flag in forward. A bucket that is taken for
overwritten, but was added to, contains wrong sums, without an error. So a small module of each
class runs once per process, in each precision that the model computes in. The contents of its
`main_grad` then show what the GEMM does. A bucket that is not known to be overwritten is zeroed
first.

Modules of a class without a row in `MAKERS` are taken to add, as Megatron's DDP takes them.
"""

from __future__ import annotations

import copy
import functools
import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...core.runtime.rank_warnings import warn
from ..options.capability import recipe_of
from ..options.rules import is_on

SIZE = 128
"""Rows and columns of the weights: one block of every recipe for FP8."""

TOKENS = 2 * SIZE

MARK = 4096.0
"""The value of `main_grad` where adding is looked for; gradients here are around 16 in size."""


@dataclass(frozen=True)
class Observed:
    """The observed behavior of modules of one class. The flag is `overwrite_main_grad`.

    Attributes:
        adds: without the flag they add to `main_grad`.
        overwrites_in_backward: they overwrite if `get_main_grad()` sets the flag in backward, and
            add if it unsets it.
        overwrites_in_forward: they overwrite if the flag was set before the forward. They write
            into the tensor that `get_main_grad()` returned in the forward.
        ignores_flag_under_hooks: in backward they see the flag only if there are no hooks on saved
            tensors: they read it from the saved weight, which hooks leave without attributes.
    """

    adds: bool
    overwrites_in_backward: bool = False
    overwrites_in_forward: bool = False
    ignores_flag_under_hooks: bool = False

    def __and__(self, other: Observed) -> Observed:
        """The behavior that holds in both observations."""
        in_backward = self.overwrites_in_backward and other.overwrites_in_backward
        ignores_flag = self.ignores_flag_under_hooks or other.ignores_flag_under_hooks
        return Observed(
            adds=self.adds and other.adds,
            overwrites_in_backward=in_backward,
            overwrites_in_forward=self.overwrites_in_forward and other.overwrites_in_forward,
            ignores_flag_under_hooks=in_backward and ignores_flag,
        )


UNKNOWN = Observed(adds=True)
"""The behavior that is assumed of a class that cannot be probed: the contract of Megatron's DDP."""


@dataclass(frozen=True)
class ProbedPrecision:
    """A precision that a model computes in.

    name: equal for equal precisions. context: for forwards. made: for making modules, whose weights
    may be quantized.
    """

    name: str
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, compare=False)
    made: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, compare=False)


@dataclass(frozen=True)
class Maker:
    """Makes a small module with fused weight gradients and calls it.

    make: of keyword arguments `dtype` and `device`. call: with the module and an input of shape
    (TOKENS, SIZE); returns the output.
    """

    make: Callable[..., nn.Module]
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda module, x: module(x)


def _te_module(name: str, *sizes: int) -> Callable[..., nn.Module]:
    def make(dtype: torch.dtype, device: torch.device) -> nn.Module:
        import transformer_engine.pytorch as te

        kind = getattr(te, name)
        return kind(
            *sizes, bias=False, params_dtype=dtype, device=device, fuse_wgrad_accumulation=True
        )

    return make


MAKERS: Mapping[str, Maker] = {
    "transformer_engine.Linear": Maker(_te_module("Linear", SIZE, SIZE)),
    "transformer_engine.LayerNormLinear": Maker(_te_module("LayerNormLinear", SIZE, SIZE)),
    "transformer_engine.LayerNormMLP": Maker(_te_module("LayerNormMLP", SIZE, SIZE)),
    # All tokens go to the first of two experts: the other one's gradient is zero, and has to be
    # written as well.
    "transformer_engine.GroupedLinear": Maker(
        _te_module("GroupedLinear", 2, SIZE, SIZE), lambda module, x: module(x, [TOKENS, 0])
    ),
}
"""Class -> maker; a module is that of the first class in its resolution order that has a row.
Megatron's own layers have none: they add."""


def read_by_operations(module: nn.Module) -> frozenset[int]:
    """Ids of the modules below `module` whose weights Transformer Engine's operations read (core's
    `use_te_op_fuser` of a layer spec, and `use_transformer_engine_op_fuser`). Core makes the
    operations in the first forward, out of the parameters that it finds then."""
    found: set[int] = set()
    for child in module.modules():
        if hasattr(child, "_fused_impl") or is_on(child, "_with_fused_impl"):
            found.update(map(id, child.modules()))
    return frozenset(found)


def maker_name(kind: type) -> str | None:
    """The key in `MAKERS` for modules of class `kind`; None if it has none."""
    for base in kind.__mro__:
        path = f"{base.__module__}."
        if not path.startswith("transformer_engine.pytorch.") or ".ops." in path:
            continue
        name = f"transformer_engine.{base.__name__}"
        if name in MAKERS:
            return name
    return None


def observe(
    maker: Maker,
    precision: ProbedPrecision,
    dtype: torch.dtype,
    main_dtype: torch.dtype,
    device: torch.device,
) -> Observed:
    """Runs a module up to six times and looks at what became of `main_grad`. Leaves random states
    and Transformer Engine's histories as they were. No collectives.

    dtype: of the weights; main_dtype: of `main_grad`. Errors of the module are not caught.
    """
    devices = [device] if device.type == "cuda" else []

    def run(fill: float, **flags: bool) -> list[torch.Tensor]:
        with torch.random.fork_rng(devices=devices), _te_histories_kept(), torch.enable_grad():
            torch.manual_seed(1234)
            return _main_grads(maker, precision, dtype, main_dtype, device, fill, **flags)

    def overwrites(**flags: bool) -> bool:
        return _were_overwritten(run(float("nan"), **flags))

    adds = _were_added_to(run(MARK))
    in_backward = overwrites(in_backward=True) and _were_added_to(run(MARK, in_backward=False))
    in_forward = overwrites(in_forward=True)
    with saved_tensors_hooks(_as_it_is, _as_it_is):
        heard = in_backward and overwrites(in_backward=True)
        under_hooks = overwrites(in_forward=True)
    return Observed(
        adds=adds,
        overwrites_in_backward=in_backward,
        overwrites_in_forward=in_forward and under_hooks,
        ignores_flag_under_hooks=in_backward and not heard,
    )


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _main_grads(
    maker: Maker,
    precision: ProbedPrecision,
    dtype: torch.dtype,
    main_dtype: torch.dtype,
    device: torch.device,
    fill: float,
    in_backward: bool | None = None,
    in_forward: bool | None = None,
) -> list[torch.Tensor]:
    """`main_grad` of every matrix after one forward and backward; before, all elements are `fill`.

    in_backward, in_forward: the value of `overwrite_main_grad` at that time; None: it is not set.
    After the forward `in_forward` puts the opposite flag and another tensor in place, so that only
    what the forward has read counts."""
    with precision.made():
        module = maker.make(dtype=dtype, device=device)
    weights: list[Any] = [param for param in module.parameters() if param.ndim == 2]
    grads = [torch.full(one.shape, fill, dtype=main_dtype, device=device) for one in weights]
    for weight, grad in zip(weights, grads, strict=True):
        weight.main_grad = grad
        if in_backward is not None or in_forward is not None:
            weight.__fsdp_param__ = True
            weight.get_main_grad = functools.partial(_hand_out, weight, grad, in_backward)
        if in_forward is not None:
            weight.overwrite_main_grad = in_forward
    x = torch.randn(TOKENS, SIZE, dtype=dtype, device=device, requires_grad=True)
    with precision.context():
        output = maker.call(module, x)
    if in_forward is not None:
        for weight in weights:
            weight.overwrite_main_grad = not in_forward
            weight.get_main_grad = functools.partial(torch.zeros_like, weight.main_grad)
    output.backward(torch.randn_like(output))
    return grads


def _hand_out(weight: Any, grad: torch.Tensor, overwrite: bool | None) -> torch.Tensor:
    """`get_main_grad()` of a weight: sets the flag, unless it is None."""
    if overwrite is not None:
        weight.overwrite_main_grad = overwrite
    return grad


def _were_overwritten(grads: Sequence[torch.Tensor]) -> bool:
    """True if no NaN is left, with which the gradients were filled, and something was written."""
    is_overwritten = all(bool(grad.isfinite().all()) for grad in grads)
    return is_overwritten and _is_any(grads, 0.0)


def _were_added_to(grads: Sequence[torch.Tensor]) -> bool:
    """True if all elements are near `MARK`, which filled them, and something was added."""
    near = all(bool(((grad - MARK).abs() < MARK / 2).all()) for grad in grads)
    return near and _is_any(grads, MARK)


def _is_any(grads: Sequence[torch.Tensor], nothing: float) -> bool:
    """True if any element differs from `nothing`."""
    return any(bool((grad != nothing).any()) for grad in grads)


TABLES = (
    "global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer",
    "autocast_arguments", "fp8_tensors_recompute_buffer",
)  # fmt: skip
"""Tables of Transformer Engine's `FP8GlobalStateManager` that grow with the modules that have
run."""


@contextmanager
def _te_histories_kept() -> Iterator[None]:
    """A context after which Transformer Engine's tables are what they were before.

    TE registers every module that ran under delayed scaling in tables of the process, and updates
    all of them after each forward: a probe's module would stay there."""
    try:
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    except ImportError:
        yield
        return
    holder = getattr(FP8GlobalStateManager, "quantization_state", FP8GlobalStateManager)
    tables = {}
    for name in TABLES:
        table = getattr(holder, name, None)
        if isinstance(table, (dict, list)):
            tables[name] = _copy_of_table(table)
    try:
        yield
    finally:
        for name, table in tables.items():
            setattr(holder, name, table)


def _copy_of_table(table: Any) -> Any:
    """A copy of a table and of the lists in it, which grow. The tensors in the lists are shared."""
    if isinstance(table, list):
        return list(table)
    copied = {}
    for key, value in table.items():
        copied[key] = list(value) if isinstance(value, list) else copy.copy(value)
    return copied


def precisions_of(config: Any) -> tuple[ProbedPrecision, ...]:
    """The precisions that layers of a model with this `TransformerConfig` may compute in, if their
    weights are not quantized. Some stay in the weights' dtype under FP8: the output layer, and the
    first and last ones if asked for."""
    quantized = quantized_precision(config)
    if quantized is None:
        return (ProbedPrecision("weights"),)
    return ProbedPrecision("weights"), ProbedPrecision(
        f"{quantized.name} compute", quantized.context
    )


def quantized_precision(config: Any) -> ProbedPrecision | None:
    """The precision of layers whose weights are quantized: the recipe of the model's config; None
    without a recipe.

    No other precision is possible: Transformer Engine cannot fuse where it dequantizes weights
    first."""
    asked = recipe_of(config)
    if asked is None:
        return None
    option, name = asked
    core = importlib.import_module(f"megatron.core.{option}_utils")
    recipe = without_reductions(getattr(core, f"get_{option}_recipe")(config))
    return ProbedPrecision(
        f"{option.upper()} {getattr(config, option)} {name}",
        functools.partial(te_context, "autocast", recipe),
        functools.partial(te_context, "quantized_model_init", recipe),
    )


def without_reductions(recipe: Any) -> Any:
    """The recipe without the reduction of maxima, the only collective of a forward: ranks need not
    have the same classes of modules.

    The recipe is copied because core's subclasses cannot be made from their own fields."""
    if not hasattr(recipe, "reduce_amax"):
        return recipe
    alone = copy.copy(recipe)
    alone.reduce_amax = False
    return alone


def te_context(name: str, recipe: Any) -> AbstractContextManager[Any]:
    """Transformer Engine's context `name` with a recipe."""
    made = getattr(importlib.import_module("transformer_engine.pytorch"), name)
    context: AbstractContextManager[Any] = made(enabled=True, recipe=recipe)
    return context


@functools.cache
def observed_once(
    name: str,
    precision: ProbedPrecision,
    dtype: torch.dtype,
    main_dtype: torch.dtype,
    device_type: str,
) -> Observed:
    """`observe` for a row of `MAKERS`, once per process. A module that fails is taken to add, with
    a warning."""
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        return observe(MAKERS[name], precision, dtype, main_dtype, device)
    except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        warn(
            f"{name} in {precision.name} ({dtype}) could not be probed ({error}). Assuming that "
            "it adds weight gradients to main_grad, which is zeroed first",
            RuntimeWarning,
            of_host=True,
        )
        return UNKNOWN


def observed(
    owner: nn.Module,
    dtype: torch.dtype,
    is_quantized: bool = False,
    *,
    precisions: tuple[ProbedPrecision, ...],
    main_dtype: torch.dtype,
    device: torch.device,
    quantized: ProbedPrecision | None = None,
    by_operations: frozenset[int] = frozenset(),
    hooks_inside: bool = False,
) -> Observed:
    """The behavior of `owner` that holds in every precision in which it may compute.

    Its weights have the (nominal) `dtype`, and `main_grad` has `main_dtype`. precisions: for
    modules whose weights are not quantized; quantized: for others. by_operations: the result of
    `read_by_operations`; these modules are taken to add. hooks_inside: hooks on saved tensors are
    set inside of units, where the engine does not see them. ValueError if the module cannot write
    gradients of `main_dtype`.
    """
    name = maker_name(type(owner))
    if name is None:
        return UNKNOWN
    if main_dtype not in (torch.float32, dtype):
        raise ValueError(
            f"gradient_accumulation_fusion=True: {type(owner).__name__} has weights in {dtype}, "
            f"and its GEMMs write gradients in float32 or that dtype, not in {main_dtype}, the "
            "dtype on the wire. Leave megatron_fsdp_grad_comm_dtype unset, or set "
            "gradient_accumulation_fusion=False (--no-gradient-accumulation-fusion)"
        )
    if id(owner) in by_operations:
        return UNKNOWN
    if is_quantized:
        if quantized is None:
            return UNKNOWN
        precisions = (quantized,)
    seen = [observed_once(name, one, dtype, main_dtype, device.type) for one in precisions]
    found = functools.reduce(operator.and_, seen)
    if not (hooks_inside and found.ignores_flag_under_hooks):
        return found
    return replace(found, overwrites_in_backward=False, ignores_flag_under_hooks=False)
