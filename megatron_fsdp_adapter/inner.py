"""The inner wrapper: the state dict of sharded weights, and loading into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import nn

from .checkpoint.chunks import copy_chunks
from .engine.engine import FsdpEngine


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


class ShardedModule(MegatronModule):
    """The inner wrapper: state dicts of sharded weights, and the entry of every forward pass."""

    def __init__(self, config: Any, module: nn.Module, engine: FsdpEngine) -> None:
        super().__init__(config=config)
        self.module = module
        self._engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; its hooks gather and reshard. RuntimeError under torch.compile."""
        refuse_compilation()
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Optimizer parameters (DTensors that share storage with the main weights and know their
        place in a checkpoint) and persistent buffers. Keys begin with "module."."""
        result = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for key, param in self._params_by_key().items():
            value = result.get(prefix + key)
            if value is not None and value is not param:
                copy_chunks(param, value)  # type: ignore[arg-type]
        return result

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter of that name, or of the same one without a leading "module.".

        Core's SwiGLU split counts on a Float16Module between this wrapper and the model, and asks
        for a name that is a level too long where an fp32 model has none. AttributeError if there
        is neither.
        """
        try:
            return super().get_parameter(target)
        except AttributeError:
            if not target.startswith("module.module."):
                raise
            return super().get_parameter(target.removeprefix("module."))

    def _params_by_key(self) -> dict[str, nn.Parameter]:
        """State-dict keys and their optimizer parameters. Keys are not parameter names: a
        Float16Module is a level in names and none in keys."""
        self._engine.show_optimizer_params()
        entries = super().state_dict(keep_vars=True)
        return {key: value for key, value in entries.items() if isinstance(value, nn.Parameter)}

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
        self._engine.main_weights_changed()
        return result

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Only for `torch_dist`, which cannot describe these shards."""
        raise RuntimeError(
            "sharded_state_dict: the torch_dist format cannot describe row-wise flat shards; "
            "save with ckpt_format='fsdp_dtensor'"
        )

    def install_optimized_model_weights(self) -> None:
        """Main weights were written from outside: compute weights follow."""
        self._engine.main_weights_changed()


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
