"""State dicts of a sharded module, in Megatron and outside of it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..core.dtensor.uneven import whole_tensor
from ..core.engine.engine import FsdpEngine
from ..core.engine.params import ParamPair, begins_its_storage
from ..core.problems import raise_problems
from ..quantized import dequantized
from ..quantized.scaling import Scaling, scaling_of, scalings_of
from .model_state import (
    ModuleParams,
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
from .names import FP8_SCALING, GlobalNames, global_names
from .not_copyable import NotCopyable
from .scaling_records import forget_scaling, take_scaling

ASSIGN = (
    "load_state_dict(assign=True): weights are views of flat buffers and cannot be replaced. Use "
    "assign=False"
)


class ShardedStateDict(NotCopyable, nn.Module):
    """A module whose state dict has sharded weights."""

    engine: FsdpEngine

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns sharded parameters and persistent buffers by name. Parameters are DTensors, which
        share memory with the main weights. Names are the wrapper's, which begin with "module."."""
        return super().state_dict(*args, **kwargs)

    @torch.no_grad()
    def full_state_dict(self, cpu_offload: bool = False) -> dict[str, Any]:
        """Returns copies of full main weights and of persistent buffers, on every rank. Names are
        those of the module that was wrapped, which can load them. Collective.

        Args:
            cpu_offload: True moves each tensor to the CPU after it is gathered. With False the
                device must hold the whole model.
        """
        params = self._params_by_key()
        found = {}
        for key, value in super().state_dict().items():
            if key in params:
                ref = params[key].fsdp_layout_ref  # type: ignore[attr-defined]
                value = whole_tensor(params[key])  # type: ignore[arg-type]
                if not ref.layout.specs[ref.index].shape:
                    value = value.view(())
            elif isinstance(value, torch.Tensor):
                value = dequantized(value).clone()
            if cpu_offload and isinstance(value, torch.Tensor):
                value = value.cpu()
            found[key.removeprefix("module.")] = value
        return found

    def checkpoint_state_dict(self, keep_vars: bool = False) -> dict[str, Any]:
        """The full state under the names, and in the pieces, that a checkpoint has on every rank
        (`names.py`). Pieces are views of the main weights. Quantized parameters that were left
        alone come as the values that they stand for, unless `keep_vars`.

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
        if keep_vars:
            return state
        return {key: dequantized(value) for key, value in state.items()}

    def checkpoint_keys(self) -> frozenset[str]:
        """The keys of `checkpoint_state_dict`."""
        params = self._params_by_key()
        own = [*super().state_dict(), *self._scalings(params)]
        return frozenset(checkpoint_form(own, self._checkpoint_names(params)))

    def _checkpoint_names(self, params: ModuleParams) -> GlobalNames:
        # The global names. Raises ValueError as `checkpoint_state_dict` does.
        names = global_names(self)
        mixed = []
        for name, param in params.items():
            is_split = param.fsdp_layout_ref.tp_offset is not None  # type: ignore[attr-defined]
            if is_split and names.is_interleaved(name):
                mixed.append(
                    f"{name}: its tensor-parallel slices do not join into one tensor. Use "
                    "tensor_model_parallel_size=1 for checkpoints of this kind of layer"
                )
        raise_problems("A checkpoint of this model", mixed)
        return names

    def _params_by_key(self) -> dict[str, nn.Parameter]:
        """The sharded parameters by state-dict key. Makes the module show sharded parameters. Keys
        are not parameter names: a Float16Module is a level in names but not in keys."""
        self.engine.to_sharded()
        entries = super().state_dict(keep_vars=True)
        return {key: value for key, value in entries.items() if hasattr(value, "fsdp_layout_ref")}

    def _scalings(self, params: ModuleParams) -> dict[str, Scaling]:
        """Key of a scaling record (the weight's key with `FP8_SCALING`) -> the weight's state of
        delayed scaling."""
        pairs = {id(pair.sharded): pair for pair in self.engine.pairs}
        found = {}
        for key, param in params.items():
            scaling = scaling_of(pairs[id(param)])
            if scaling:
                found[key + FP8_SCALING] = scaling
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copies values into the main weights, and updates the compute weights.

        Keys may have one "module." more or less than those of `state_dict`. A value is a full
        tensor, of which each rank takes its rows, or a DTensor of the full shape. A DTensor with
        other rows (of FSDP2, or of a model with other units) is gathered first: this is collective.

        Returns:
            Missing and unexpected keys, as torch's `load_state_dict`.

        Raises:
            ValueError: missing or unexpected keys (with `strict`), values of other shapes, DTensors
                whose rows are unknown, or `assign=True`. Nothing is written.
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
        records = {}
        for key, place in form.items():
            if place.name in scalings and key in values:
                records[place.name] = values.pop(key)
        for name, record in records.items():
            found += scalings[name].problems(name, record)
        if found:
            raise ValueError("load_state_dict:\n" + "\n".join(f"  - {line}" for line in found))
        rest = copy_values(form, params, values)
        tree = tree_names(self, own)
        by_tree = {tree.get(key, key): value for key, value in rest.items()}
        result = super().load_state_dict(by_tree, strict=False)
        keys_of = {name: key for key, name in tree.items()}
        result = result._replace(
            missing_keys=[keys_of.get(name, name) for name in result.missing_keys],
            unexpected_keys=[keys_of.get(name, name) for name in result.unexpected_keys],
        )
        take_scaling(scalings, records)
        self.engine.main_weights_changed(loaded=True)
        return incompatible_keys(form, keys, result)


def register_state_dict_hooks(module: nn.Module, engine: FsdpEngine) -> None:
    """Makes the state dict of `module` and of each module below it one of main weights. A load into
    any of them takes the values that a load into the wrapper takes, and refreshes the compute
    weights."""
    ref = weakref.ref(engine)
    # By a module's id, numbers of its pairs: a hook holds nothing of the engine.
    owned: dict[int, list[int]] = {}
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
        child: nn.Module,
        state_dict: Any,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
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

    def after_save(child: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
        alive = ref()
        if alive is None:
            return
        for pair in pairs_of(alive, child):
            for owner, name in pair.managed.slots:
                value = state_dict.get(prefix + name) if owner is child else None
                if type(value) is DTensor:
                    begins_its_storage(value)

    for child in module.modules():
        child.register_state_dict_pre_hook(before_save)
        child.register_state_dict_post_hook(after_save)
        child.register_load_state_dict_pre_hook(before_load)
        child.register_load_state_dict_post_hook(after_load)
