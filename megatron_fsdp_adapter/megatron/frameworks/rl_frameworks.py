"""Replacements for functions of verl and NeMo-RL, for models that are sharded here.

With some, both move a model's memory to the host while another engine generates. Their own code
knows only the buffers of Megatron's DDP and moves everything else tensor by tensor: flat buffers
would stay where they are, and parameters would be detached from them. With the others verl exports
changed weights; here each rank exports its own rows.

`compat/table.py` lists the functions that these replace. Models that are not ours go to the
original.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ...core.engine.buffer import BUFFER_KINDS, GRADIENTS, MAIN_WEIGHTS
from ...rollout.release import release_memory, return_memory
from ...state.module_weights import ModuleWeight, module_weights
from ..compat.patches import Original
from ..inner_module import our_chunks, ours_among
from .bridge_weights import engines_of, ordinary_parameters


def offload_model(original: Original, models: Sequence[Any]) -> None:
    """Releases the memory of model chunks (`release_memory`). Gradients are lost, as with DDP."""
    ours, others = _apart(models)
    if ours:
        release_memory(ours)
    if others:
        original(others)


def load_model(
    original: Original, models: Sequence[Any], load_grad: bool = True, **options: Any
) -> None:
    """Takes the memory of model chunks back (`return_memory`). load_grad: that of gradients too."""
    ours, others = _apart(models)
    if ours:
        kinds = [kind for kind in BUFFER_KINDS if load_grad or kind != GRADIENTS]
        return_memory(ours, only=kinds)
    if others:
        original(others, load_grad=load_grad, **options)


def device_of_model(original: Original, models: Sequence[Any]) -> str:
    """The device of a model: "cpu" while the memory of main weights is released."""
    if any(MAIN_WEIGHTS in chunk.engine.away for chunk in ours_among(models)):
        return "cpu"
    return original(models)


def offload_optimizer(original: Original, optimizer: Any) -> None:
    """Moves the optimizer's state to the host."""
    _of_ours("offload_to_cpu", original, optimizer)


def load_optimizer(original: Original, optimizer: Any) -> None:
    """Moves the optimizer's state back to the device."""
    _of_ours("restore_from_cpu", original, optimizer)


def move_optimizer(original: Original, worker: Any, device: str) -> None:
    """Moves the optimizer's state to "cpu" or "cuda". NeMo-RL has one function for both."""
    move = offload_optimizer if device == "cpu" else load_optimizer
    move(lambda _: original(worker, device), worker.optimizer)


def _apart(models: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The chunks that are ours, and the others."""
    ours = ours_among(models)
    return ours, [model for model in models if not any(model is one for one in ours)]


def _of_ours(method: str, original: Original, optimizer: Any) -> None:
    """Calls the method `method` of each of core's optimizers whose model chunks are ours; calls
    `original` if there is none."""
    each = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    ours = [one for one in each if our_chunks(one)]
    for one in ours:
        getattr(one, method)()
    if not ours:
        original(optimizer)


class RowsOfRank:
    """This rank's rows of a weight. It replaces a parameter that verl exports.

    `shape` and `device` are those of the module's own parameter. `data` has the present rows.
    """

    def __init__(self, weight: ModuleWeight) -> None:
        self.weight = weight
        self.shape = weight.shape
        self.device = weight.device

    @property
    def data(self) -> torch.Tensor:
        return self.weight.local.to(self.device, torch.bfloat16)

    def is_first_copy(self, is_expert: bool) -> bool:
        """True if no lower rank has the same rows."""
        pair = self.weight.pair
        group = pair.group
        domain = group.domain
        if not group.shards.splits_axis and domain.axis.rank != 0:
            return False
        if domain.outer is not None and not group.shards.splits_outer and domain.outer.rank != 0:
            return False
        if is_expert or getattr(pair.unsharded, "tensor_model_parallel", False):
            return True
        return parallel_state.get_tensor_model_parallel_rank() == 0


def export_index(original: Original, worker: Any) -> list[Any]:
    """verl's records of what to export, with this rank's rows in place of whole parameters. verl
    merges the entries of all ranks; each row comes from the first rank that has it."""
    engines = engines_of(worker.module)
    if not engines or getattr(worker, "_delta_export_index", None) is not None:
        return original(worker)
    with ordinary_parameters(engines):
        records: list[Any] = original(worker)
    weights = module_weights(engines)
    for record in records:
        if record.param is None:  # of another pipeline stage
            continue
        rows = RowsOfRank(weights[id(record.param)])
        record.param = rows
        record.spec = dataclasses.replace(
            record.spec,
            place=0,
            gather_group=dist.group.WORLD,
            contributes=rows.is_first_copy(record.probe.is_expert),
        )
    return records


def export_changes(original: Original, worker: Any, **options: Any) -> Any:
    """verl's entries for what has changed since the last export, and None. While the entries are
    made, modules hold their ordinary parameters."""
    entries, more = original(worker, **options)
    engines = engines_of(worker.module)
    if not engines:
        return entries, more

    def shown() -> Iterator[Any]:
        with ordinary_parameters(engines):
            yield from entries

    return shown(), more


def export_entry(
    original: Original,
    worker: Any,
    name: str,
    spec: Any,
    place: Any,
    indices: torch.Tensor,
    values: torch.Tensor,
) -> Any:
    """verl's entry for changed elements. `indices` count from the start of this rank's rows, and
    are passed on as indices into the whole weight."""
    param = worker._delta_export_by_name[name].param
    start = param.weight.rows.start if isinstance(param, RowsOfRank) else 0
    return original(worker, name, spec, place, indices + start, values)
