"""Methods of a sharded module, in Megatron and outside of it: state dicts, microbatches, and guards
against what would detach its parameters from their buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.dtensor.chunks import LayoutRef
from ..core.dtensor.uneven import Chunks, whole_tensor
from ..core.engine.engine import FsdpEngine
from ..core.engine.params import ParamPair
from ..core.engine.partition import unchecked
from ..core.problems import raise_problems
from ..quantized import attributes_of_class, dequantized
from ..quantized.scaling import Scaling, scaling_of, scalings_of
from .model_state import (
    checkpoint_form,
    chosen_form,
    copy_values,
    incompatible_keys,
    load_own,
    load_problems,
    module_form,
    tree_names,
    values_of,
)
from .names import EXTRA_STATE, FP8_SCALING, GlobalNames, global_names

ASSIGN = (
    "load_state_dict(assign=True): weights are views of flat buffers and cannot be replaced. Use "
    "assign=False"
)


@torch.compiler.disable
def _raise_under_compilation() -> None:
    """Raises outside of a trace, as the compiler breaks its graph here. Raised while it traces, the
    error would only make it run the module without a graph."""
    raise RuntimeError(
        "torch.compile of a wrapped model: gathers change storage, which a compiled graph does "
        "not track. Compile layers of a model for fully_shard_model, or functions of Megatron's "
        "layers."
    )


def refuse_compilation() -> None:
    """RuntimeError if torch.compile is tracing the caller."""
    if torch.compiler.is_compiling():
        _raise_under_compilation()


class NotCopyable:
    """Refuses copies and pickles, which could not share flat buffers and process groups."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(self._why_not("copy.deepcopy (as by AveragedModel of torch.optim)"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(self._why_not("pickle (as by torch.save of the module)"))

    def _why_not(self, what: str) -> str:
        return (
            f"{what} of a {type(self).__name__}: its weights are views of flat buffers of process "
            "groups and cannot be copied. Copy or save model.state_dict(), and load it into "
            "another wrapped module for a second model"
        )


class GradSync(NotCopyable):
    """Chooses the backward of a step that reduces, and the place that waits for it."""

    engine: FsdpEngine

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Microbatches but the last run inside, at any depth of such contexts. ZeRO-0/1 only
        accumulate there; ZeRO-2/3 reduce every microbatch, since they hold no full gradients."""
        before = self.engine.is_last_microbatch
        self.engine.is_last_microbatch = False
        try:
            yield
        finally:
            self.engine.is_last_microbatch = self.engine.after_no_sync if before is None else before

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Sets whether each backward outside `no_sync` ends a step by itself: reductions are waited
        for and gradients attached when `backward()` returns, as a plain training loop expects. Off,
        that is what `finish_grad_sync` does, which Megatron calls."""
        self.engine.auto_sync = sync_model

    @contextmanager
    def sync(self) -> Iterator[None]:
        """`set_model_auto_sync` inside, and what it was before after."""
        before = self.engine.auto_sync
        self.set_model_auto_sync(True)
        try:
            yield
        finally:
            self.set_model_auto_sync(before)


class ShardedStateDict(NotCopyable, nn.Module):
    """A module whose state dict is of sharded weights."""

    engine: FsdpEngine

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Sharded parameters (DTensors that share storage with the main weights and know their
        place in a checkpoint) and persistent buffers. Keys are the module's own names, which begin
        with "module."; see `checkpoint_state_dict` for those of the whole model."""
        return super().state_dict(*args, **kwargs)

    @torch.no_grad()
    def full_state_dict(self, cpu_offload: bool = False) -> dict[str, Any]:
        """Whole main weights and persistent buffers on every rank, under the names of the module
        that was wrapped, which can load them. Tensors are copies, in the main weights' dtype.
        Collective: every rank calls it.

        Args:
            cpu_offload: each goes to the CPU as it is gathered; otherwise the device has to hold
                the whole model.
        """
        params = self._params_by_key()
        found = {}
        for key, value in super().state_dict().items():
            if key in params:
                ref = params[key].fsdp_layout_ref  # type: ignore[attr-defined]
                value = whole_tensor(params[key])  # type: ignore[arg-type]
                value = value if ref.layout.specs[ref.index].shape else value.view(())
            elif isinstance(value, torch.Tensor):
                value = dequantized(value).clone()
            if cpu_offload and isinstance(value, torch.Tensor):
                value = value.cpu()
            found[key.removeprefix("module.")] = value
        return found

    def checkpoint_state_dict(self, keep_vars: bool = False) -> dict[str, Any]:
        """The full state under the names, and in the pieces, that a checkpoint has on every rank
        (`checkpoint.names`). Pieces are views of the main weights. Quantized parameters that were
        left alone are what they stand for.

        Raises ValueError naming the parameters that tensor parallelism splits in a way that a
        checkpoint cannot describe.
        """
        params = self._params_by_key()
        plain = super().state_dict(keep_vars=keep_vars)
        quantized = self.engine.quantization
        for key, scaling in self._scalings(params).items():
            is_stale = quantized is not None and quantized.is_pending(scaling.trained)
            plain[key] = scaling.record(is_stale)
        form = checkpoint_form(plain, self._checkpoint_names(params))
        state = values_of(form, params, plain)
        return state if keep_vars else {key: dequantized(value) for key, value in state.items()}

    def checkpoint_keys(self) -> frozenset[str]:
        """The keys of `checkpoint_state_dict`."""
        params = self._params_by_key()
        own = [*super().state_dict(), *self._scalings(params)]
        return frozenset(checkpoint_form(own, self._checkpoint_names(params)))

    def _checkpoint_names(self, params: Mapping[str, nn.Parameter]) -> GlobalNames:
        names = global_names(self)
        mixed = [
            f"{name}: its tensor-parallel slices do not join into one tensor. Use "
            "tensor_model_parallel_size=1 for checkpoints of this kind of layer"
            for name, param in params.items()
            if names.is_interleaved(name) and param.fsdp_layout_ref.tp_offset is not None  # type: ignore[attr-defined]
        ]
        raise_problems("A checkpoint of this model", mixed)
        return names

    def _params_by_key(self) -> dict[str, nn.Parameter]:
        """State-dict keys and their sharded parameters. Keys are not parameter names: a
        Float16Module is a level in names and none in keys."""
        self.engine.to_sharded()
        entries = super().state_dict(keep_vars=True)
        return {key: value for key, value in entries.items() if hasattr(value, "fsdp_layout_ref")}

    def _scalings(self, params: Mapping[str, nn.Parameter]) -> dict[str, Scaling]:
        """Key of a record beside the weight's -> the state of delayed scaling."""
        pairs = {id(pair.sharded): pair for pair in self.engine.pairs}
        found = {key: scaling_of(pairs[id(param)]) for key, param in params.items()}
        return {key + FP8_SCALING: scaling for key, scaling in found.items() if scaling}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copies values into the main weights and refreshes the compute weights.

        Keys are those of `state_dict()` or of `checkpoint_state_dict()`, or the same one "module."
        shorter or longer. A value is a plain tensor of the module's own shape, of which this rank
        takes its rows, or a DTensor of the whole tensor's. One that is not cut like the parameter
        (of FSDP2, of `distribute_tensor`, of a model with other units) is gathered temporarily,
        which is collective. Returns what torch would for the module: missing and unexpected keys.

        Raises:
            ValueError: missing, unexpected (if `strict`) and mis-shaped entries, and DTensors of
                unknown rows; before anything is written on any rank.
        """
        if assign:
            raise ValueError(ASSIGN)
        params = self._params_by_key()
        scalings = self._scalings(params)
        own = [*super().state_dict(), *scalings]
        forms = (module_form(own), checkpoint_form(own, global_names(self)))
        form, keys = chosen_form(forms, state_dict)
        values = {keys[key]: value for key, value in state_dict.items()}
        found = load_problems(form, params, values, strict)
        records = {
            place.name: values.pop(key) for key, place in form.items()
            if place.name in scalings and key in values
        }
        for name, record in records.items():
            found += scalings[name].problems(name, record)
        if found:
            raise ValueError("load_state_dict:\n" + "\n".join(f"  - {line}" for line in found))
        rest = copy_values(form, params, values)
        tree = tree_names(self, own)
        result = super().load_state_dict(
            {tree.get(key, key): value for key, value in rest.items()}, strict=False
        )
        keys_of = {name: key for key, name in tree.items()}
        result = result._replace(**{
            field: [keys_of.get(name, name) for name in names]
            for field, names in result._asdict().items()
        })
        take_scaling(scalings, records)
        self.engine.main_weights_changed(loaded=True)
        return incompatible_keys(form, keys, result)


OF_RAW = (
    "__fsdp_param__", "get_main_grad", "grad_added_to_main_grad", "main_grad", "overwrite_main_grad"
)  # fmt: skip
"""Attributes that modules that write gradients by themselves read, on the parameter that they
compute with."""


def engines_behind(params: Iterable[Any]) -> list[Any]:
    """The engines that any of `params` belong to, each once."""
    refs = [getattr(param, "_fsdp_engine", None) for param in params]
    found = {id(engine): engine for ref in refs if ref is not None and (engine := ref())}
    return list(found.values())


def mark_shard(pair: ParamPair, offset: tuple[int, ...] | None = None) -> None:
    """Copies the attributes of the module's own parameter to the sharded one, and marks, for torch
    DCP too, which rows of which tensor it is. `offset` is where this rank's tensor-parallel part
    begins in the whole tensor; None at the origin."""
    param, held = pair.sharded, pair.group.held
    _copy_attributes(pair.unsharded, param)
    rows = held.range(pair.index)
    ref = LayoutRef(held.layout, pair.index, held.rank, offset)
    param.megatron_fsdp_slice = slice(rows.start, rows.stop)  # type: ignore[attr-defined]
    param.fsdp_layout_ref = ref  # type: ignore[attr-defined]
    for value in (param, pair.grad):
        if value is not None:
            value.chunks = Chunks(ref.chunks(), (ref.layout, ref.index))  # type: ignore[union-attr]


def _copy_attributes(raw: nn.Parameter, optimizer: nn.Parameter) -> None:
    """Code that groups, clips, reduces or names parameters may go by any attribute: all are copied,
    but those of the engine and those by which a class of quantized tensors keeps its values. What
    `optimizer` has already stays."""
    left_out = {*OF_RAW, *attributes_of_class(raw), *vars(optimizer)}
    for name, value in vars(raw).items():
        if name not in left_out and not name.startswith("_fsdp_"):
            setattr(optimizer, name, value)


def check_trained(engine: FsdpEngine) -> None:
    """RuntimeError if `requires_grad` was changed after wrapping, or a sharded parameter has a
    gradient hook. Which gradients are reduced, and which buffers exist for them, is decided once; a
    change would be ignored in silence, or leave the optimizer with gradients that are zero. No
    backward accumulates the gradient of a sharded parameter, so its hooks would never run."""
    hooked = [
        pair.managed.fqns[0]
        for pair in engine.trained
        if pair.sharded._backward_hooks or pair.sharded._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    ]
    if hooked:
        raise RuntimeError(
            f"gradient hooks on {', '.join(hooked[:5])} ({len(hooked)} parameters in all) were "
            "registered after the model was wrapped, on sharded parameters, to which autograd "
            "gives no gradient: they would never run. Register them before wrapping"
        )
    with unchecked():
        changed = [
            pair.managed.fqns[0]
            for pair in engine.pairs
            if {pair.unsharded.requires_grad, pair.sharded.requires_grad}
            != {pair.group.key.requires_grad}
        ]
    if changed:
        raise RuntimeError(
            f"requires_grad of {', '.join(changed[:5])} ({len(changed)} parameters in all) has "
            "changed since the model was wrapped, which has no effect on gradient collection. "
            "Freeze parameters before wrapping, or give them a learning rate of 0 in the "
            "optimizer"
        )


def take_scaling(
    scalings: Mapping[str, Scaling], records: Mapping[str, torch.Tensor]
) -> None:
    """Takes over the records that a load had. Prints, on one rank, for how many weights it did not
    describe how they are scaled."""
    for name, record in records.items():
        scalings[name].load(record)
    unknown = [name for name, scaling in scalings.items() if scaling.is_unknown]
    if unknown and dist.get_rank() == 0:
        print(
            f"load_state_dict: no delayed scaling state for {len(unknown)} FP8 weights "
            f"({unknown[0].removesuffix(FP8_SCALING)}, ...). Their scales are set from the amax "
            "of the loaded main weights",
            flush=True,
        )


def forget_scaling(
    pairs: Iterable[ParamPair], child: nn.Module, state: Mapping[str, Any], prefix: str
) -> None:
    """A load into `child` writes weights, of `pairs`, and may have nothing about their scales:
    TE's module takes its own state, if there is any."""
    extra = state.get(prefix + EXTRA_STATE)
    if isinstance(extra, torch.Tensor) and extra.numel():
        return
    for scaling in scalings_of(
        pair for pair in pairs
        if any(owner is child and prefix + name in state for owner, name in pair.managed.slots)
    ):  # fmt: skip
        scaling.forget()


def register_state_dict_hooks(module: nn.Module, engine: FsdpEngine) -> None:
    """A state dict of any module below shows main weights. A load into any takes what the wrapper's
    takes, and refreshes the compute weights."""
    ref = weakref.ref(engine)
    owned: dict[int, list[int]] = {}  # numbers of pairs: a hook holds nothing of the engine
    for number, pair in enumerate(engine.pairs):
        for owner, _ in pair.managed.slots:
            owned.setdefault(id(owner), []).append(number)

    def pairs_of(alive: FsdpEngine, child: nn.Module) -> list[ParamPair]:
        return [alive.pairs[number] for number in owned.get(id(child), ())]

    def before_save(*_: Any) -> None:
        alive = ref()
        if alive is not None:
            alive.to_sharded()

    def before_load(
        child: nn.Module, state_dict: Any, prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        alive = ref()
        if alive is not None:
            if metadata.get("assign_to_params_buffers", False):
                raise ValueError(ASSIGN)
            alive.to_sharded()
            forget_scaling(pairs_of(alive, child), child, state_dict, prefix)
            errors += load_own(child, state_dict, prefix)

    def after_load(child: nn.Module, *_: Any) -> None:
        alive = ref()
        if alive is not None:
            for scaling in scalings_of(pairs_of(alive, child)):
                scaling.follow()
            alive.main_weights_changed(loaded=True)

    for child in module.modules():
        child.register_state_dict_pre_hook(before_save)
        child.register_load_state_dict_pre_hook(before_load)
        child.register_load_state_dict_post_hook(after_load)


def refuse_conversions(module: nn.Module, engine: FsdpEngine) -> None:
    """Makes `to`, `half` and the like raise in `module` and below, unless they change nothing."""
    dtypes = frozenset(pair.unsharded.dtype for pair in engine.pairs)
    for name, child in module.named_modules():
        where = f"{type(child).__name__} {name}".strip()
        child.__dict__["_apply"] = _apply_guard(child, dtypes, engine.runtime.device, where)


def _apply_guard(
    module: nn.Module, dtypes: frozenset[torch.dtype], device: torch.device, where: str
) -> Any:
    """Stands in for `nn.Module._apply` of a wrapped module: a conversion would detach parameters
    from the flat buffers. One that leaves every parameter where it is passes and reaches the
    module's buffers."""
    ref = weakref.ref(module)

    def apply(fn: Any, *_: Any, **__: Any) -> nn.Module | None:
        for dtype in dtypes:
            given = torch.zeros(1, dtype=dtype, device=device)
            probe = fn(given)
            if probe.dtype != dtype or probe.device != device:
                raise RuntimeError(
                    f"{where}: converting a wrapped module from {dtype} on {device} to "
                    f"{probe.dtype} on {probe.device} would detach its parameters from their "
                    "flat buffers. Convert the module before wrapping it"
                )
            if probe.data_ptr() != given.data_ptr():
                raise RuntimeError(
                    f"{where}: new memory for the parameters of a wrapped module (to_empty, a "
                    "copy) would detach them from their flat buffers. Convert the module before "
                    "wrapping it, and write values in place after"
                )
        alive = ref()
        for child in alive.modules() if alive is not None else ():
            for name, value in child._buffers.items():
                child._buffers[name] = None if value is None else fn(value)
        return alive

    return apply
