"""What a module gets when it is sharded, in Megatron and outside of it: state dicts, microbatches,
and guards against what would detach its parameters from their buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from . import support
from .checkpoint.chunks import LayoutRef, attach_chunks, copy_chunks
from .engine.engine import FsdpEngine
from .engine.guard import unchecked
from .engine.identity import ParamPair


@torch.compiler.disable
def _raise_under_compilation() -> None:
    """An ordinary call from where the compiler broke its graph: raised while it traces, the error
    would only make it fall back to running the module without a graph."""
    raise RuntimeError(
        "torch.compile of a wrapped model: gathering changes storage that a compiled graph does "
        "not see; compile functions inside the layers, or nothing"
    )


def refuse_compilation() -> None:
    """RuntimeError if torch.compile is tracing the caller."""
    if torch.compiler.is_compiling():
        _raise_under_compilation()


class GradSync:
    """Which backward of a step reduces, and who waits for it."""

    engine: FsdpEngine

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Microbatches but the last run inside. ZeRO-0/1 only accumulate there; ZeRO-2/3 reduce
        every microbatch, since they hold no full gradients."""
        self.engine.is_last_microbatch = False
        try:
            yield
        finally:
            self.engine.is_last_microbatch = True

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Whether each backward outside `no_sync` ends a step by itself: reductions are waited for
        and gradients attached when `backward()` returns, as a plain training loop expects. Off,
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


class ShardedStateDict(nn.Module):
    """A module whose state dict is of sharded weights."""

    engine: FsdpEngine

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Optimizer parameters (DTensors that share storage with the main weights and know their
        place in a checkpoint) and persistent buffers. Keys begin with "module."."""
        result = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for key, param in self._params_by_key().items():
            value = result.get(prefix + key)
            if value is not None and value is not param:
                copy_chunks(param, value)  # type: ignore[arg-type]
        return result

    def _params_by_key(self) -> dict[str, nn.Parameter]:
        """State-dict keys and their optimizer parameters. Keys are not parameter names: a
        Float16Module is a level in names and none in keys."""
        self.engine.show_optimizer_params()
        entries = super().state_dict(keep_vars=True)
        return {key: value for key, value in entries.items() if hasattr(value, "fsdp_layout_ref")}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copies values into the main weights and refreshes the compute weights.

        Keys are those of `state_dict()`, or the same one "module." shorter or longer. A value is a
        DTensor sharded like ours, or a plain tensor of the module's own shape, of which this rank
        takes its rows. ValueError lists missing, unexpected (if `strict`) and mis-shaped entries
        before anything is written.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True): weights are views of flat buffers and cannot be "
                "replaced; use assign=False"
            )
        params = self._params_by_key()
        own = set(super().state_dict())
        values = {_own_key(key, own): value for key, value in state_dict.items()}
        found = _load_problems(params, own, values, strict)
        if found:
            raise ValueError("load_state_dict:\n" + "\n".join(f"  - {line}" for line in found))
        with torch.no_grad():
            for name, param in params.items():
                if name in values:
                    _copy_into(param, values[name])
        rest = {key: value for key, value in values.items() if key not in params}
        result = super().load_state_dict(rest, strict=False)
        self.engine.main_weights_changed()
        return result


def mark_shard(pair: ParamPair, offset: tuple[int, ...] | None = None) -> None:
    """Tells on an optimizer parameter, and to torch DCP, which rows of which tensor it is. `offset`
    is where this rank's tensor-parallel part begins in the whole tensor; None at the origin."""
    param, held = pair.optimizer, pair.group.held
    rows = held.layout.shard_range(pair.index, held.rank)
    ref = LayoutRef(held.layout, pair.index, held.rank, offset)
    param.megatron_fsdp_slice = slice(rows.start, rows.stop)  # type: ignore[attr-defined]
    param.fsdp_layout_ref = ref  # type: ignore[attr-defined]
    attach_chunks(param, ref.chunks())  # type: ignore[arg-type]


def check_trained(engine: FsdpEngine) -> None:
    """RuntimeError if `requires_grad` was changed after wrapping. Which gradients are reduced, and
    which buffers exist for them, is decided once; a change would be ignored in silence, or leave
    the optimizer with gradients that are zero."""
    with unchecked():
        changed = [
            pair.managed.fqns[0]
            for pair in engine.pairs
            if {pair.raw.requires_grad, pair.optimizer.requires_grad}
            != {pair.group.key.requires_grad}
        ]
    if changed:
        raise RuntimeError(
            f"requires_grad of {', '.join(changed[:5])} ({len(changed)} parameters in all) is not "
            "what it was when the model was wrapped, and gradients are collected as it was then; "
            "freeze parameters before wrapping, or give them a learning rate of 0 in the optimizer"
        )


def register_state_dict_hooks(
    module: nn.Module, engine: FsdpEngine, refused: Sequence[str] = ()
) -> None:
    """A state dict of any module below shows main weights, and a load into any refreshes the
    compute weights. With `refused` reasons taking one raises."""
    ref = weakref.ref(engine)

    def before_save(*_: Any) -> None:
        support.raise_problems("state_dict", list(refused))
        alive = ref()
        if alive is not None:
            alive.show_optimizer_params()

    def after_load(*_: Any) -> None:
        alive = ref()
        if alive is not None:
            alive.main_weights_changed()

    for child in module.modules():
        child.register_state_dict_pre_hook(before_save)
        child.register_load_state_dict_post_hook(after_load)


def refuse_conversions(module: nn.Module, engine: FsdpEngine) -> None:
    """Makes `to`, `half` and the like raise in `module` and below, unless they change nothing."""
    dtypes = frozenset(pair.raw.dtype for pair in engine.pairs)
    for name, child in module.named_modules():
        where = f"{type(child).__name__} {name}".strip()
        child.__dict__["_apply"] = _apply_guard(child, dtypes, engine.runtime.device, where)


def _apply_guard(
    module: nn.Module, dtypes: frozenset[torch.dtype], device: torch.device, where: str
) -> Any:
    """Stands in for `nn.Module._apply` of a wrapped module: a conversion would detach parameters
    from the flat buffers. One that changes no parameter passes and reaches the buffers."""
    ref = weakref.ref(module)

    def apply(fn: Any, *_: Any, **__: Any) -> nn.Module | None:
        for dtype in dtypes:
            probe = fn(torch.empty(0, dtype=dtype, device=device))
            if probe.dtype != dtype or probe.device != device:
                raise RuntimeError(
                    f"{where}: converting a wrapped module from {dtype} on {device} to "
                    f"{probe.dtype} on {probe.device} would detach its parameters from their "
                    "flat buffers; convert the module before wrapping it"
                )
        alive = ref()
        for child in alive.modules() if alive is not None else ():
            for name, value in child._buffers.items():
                child._buffers[name] = None if value is None else fn(value)
        return alive

    return apply


def _own_key(key: str, own: set[str]) -> str:
    """`key` at the depth of `own` keys: some callers strip or add one "module."."""
    for candidate in (key, f"module.{key}", key.removeprefix("module.")):
        if candidate in own:
            return candidate
    return key


def _load_problems(
    params: Mapping[str, nn.Parameter], own: set[str], values: Mapping[str, Any], strict: bool
) -> list[str]:
    found = []
    if strict:
        found += [f"missing: {key}" for key in sorted(own - set(values))
                  if not key.endswith("_extra_state")]
        found += [f"unexpected: {key}" for key in sorted(set(values) - own)
                  if not key.endswith("_extra_state")]
    for name, param in params.items():
        value = values.get(name)
        if value is not None and tuple(value.shape) != _shape_for(param, value):
            found.append(f"{name}: shape {tuple(value.shape)}, expected {_shape_for(param, value)}")
    return found


def _shape_for(param: nn.Parameter, value: torch.Tensor) -> tuple[int, ...]:
    """The shape that `value` must have: for a DTensor the whole tensor's, for a plain one that of
    the module's parameter, which tensor parallelism may have split."""
    if hasattr(value, "_local_tensor"):
        return tuple(param.shape)
    return param.fsdp_layout_ref.shape  # type: ignore[attr-defined]


def _copy_into(param: nn.Parameter, value: torch.Tensor) -> None:
    """Writes this rank's rows of `value` into the optimizer parameter `param`."""
    local = param._local_tensor  # type: ignore[attr-defined]
    if hasattr(value, "_local_tensor"):
        source = value._local_tensor
    else:
        held = param.megatron_fsdp_slice  # type: ignore[attr-defined]
        source = value.detach().reshape(-1)[held].view(local.shape)
    if source.data_ptr() != local.data_ptr():
        local.copy_(source)
