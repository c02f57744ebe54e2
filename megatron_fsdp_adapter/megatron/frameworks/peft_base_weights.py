"""Loads a checkpoint's weights into a model that is not sharded yet, as a base of adapters (LoRA).

Megatron-Bridge loads base weights before it adds adapters and wraps the model. It fails then: for
`fsdp_dtensor` it asks the plain model for attributes of a sharded one, and for `torch_dist` it
reports that the run has another format. So its function that reads a checkpoint is wrapped. For a
model without shards the wrapped function reads either format, saved under any split of the model,
one weight at a time.

Every rank reads the weights of its own model, from the files that hold them, as Megatron-Bridge
does without a wrapper. Nothing is imported: Megatron-Bridge is used if it is loaded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter.checkpoint.convert.conversion import open_state
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor
from megatron_fsdp_adapter.checkpoint.convert.training_state import common_name
from megatron_fsdp_adapter.checkpoint.coordination import coordination
from megatron_fsdp_adapter.checkpoint.fitting import is_table
from megatron_fsdp_adapter.core.layout.ranges import Box
from megatron_fsdp_adapter.megatron.compat.patches import Original
from megatron_fsdp_adapter.megatron.compat.table import BRIDGE
from megatron_fsdp_adapter.megatron.wrapper.tensor_parallel import DIMS, tensor_parallel_mode
from megatron_fsdp_adapter.quantized.start import values_follow
from megatron_fsdp_adapter.state.names import EXTRA_STATE, GlobalNames, global_names
from megatron_fsdp_adapter.state.sharded_state_dict import ShardedStateDict

FORMAT = "fsdp_dtensor"


def load(original: Original, /, *args: Any, **kwargs: Any) -> Any:
    """Loads base weights in place of Megatron-Bridge's function that reads a checkpoint."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    wanted = given["sharded_state_dict"] or {}
    models = wanted.get("_model", ())
    if not models or any(isinstance(model, ShardedStateDict) for model in models):
        return original(*args, **kwargs)
    step = None
    if not given["ignore_ckpt_step"]:
        step = getattr(given["ckpt_cfg"], "ckpt_step", None)
    groups = given["pg_collection"]
    model_config = getattr(given["cfg"], "model", None)
    folder = load_plain(
        models,
        Path(given["load_dir"]),
        step,
        dense=place_in(groups.tp),
        expert=place_in(getattr(groups, "expt_tp", None)),
        vocab_size=getattr(model_config, "vocab_size", None),
    )
    state = {key: value for key, value in wanted.items() if key != "_model"}
    kind: Any = sys.modules[BRIDGE]
    return state, str(folder), False, kind.CheckpointType.FSDP_DTENSOR


Split = tuple[int, int]
"""This rank's number among the ranks that tensors are split over, and how many these are."""
WHOLE: Split = (0, 1)

_Read = tuple[torch.Tensor, LazyTensor, tuple[Box, ...]]
"""A tensor of a module, or its first rows; the stored tensor; and the blocks to read from it, which
follow each other along dim 0."""


def place_in(group: dist.ProcessGroup | None) -> Split:
    """This rank's split in a process group; `WHOLE` without a group."""
    return WHOLE if group is None else (group.rank(), group.size())


def load_plain(
    models: Sequence[nn.Module],
    path: Path,
    iteration: int | None,
    dense: Split,
    expert: Split,
    vocab_size: int | None = None,
) -> Path:
    """Reads the weights and persistent buffers of `models` (this rank's chunks, without wrappers)
    from an `fsdp_dtensor` or `torch_dist` checkpoint, and returns its folder.

    All ranks call it.

    Args:
        path: a root of checkpoints, or one of its folders.
        iteration: None for the newest.
        dense, expert: how tensors of either kind are split.
        vocab_size: number of tokens without padding; later rows of tables are padding.

    Raises, on every rank:
        FileNotFoundError: there is no checkpoint.
        ValueError: with everything that does not fit; nothing is written then.
    """
    with coordination() as ranks:

        def plan() -> tuple[Path, list[_Read]]:
            opened, state = open_state(path, iteration, weights_only=True, trusted=False)
            reads: list[_Read] = []
            found = _meta_problems(models)
            for model in models:
                for name, item in _plan(model, state.weights, dense, expert, vocab_size):
                    if isinstance(item, str):
                        found.append(f"{name}: {item}")
                    else:
                        reads.append(item)
            if found:
                lines = "\n".join(f"  - {line}" for line in found)
                raise ValueError(f"the model does not fit {opened.folder}:\n{lines}")
            return opened.folder, reads

        (folder, reads), _ = ranks.run("opening the checkpoint of the base weights", plan)

        def read() -> None:
            with torch.no_grad(), values_follow(models):
                for target, stored, boxes in reads:
                    blocks = [stored.block(box) for box in boxes]
                    value = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
                    target.copy_(value.view(target.shape))

        ranks.run("reading the base weights", read)
    return folder


def _meta_problems(models: Sequence[nn.Module]) -> list[str]:
    params = [param for model in models for param in model.parameters()]
    if not any(param.is_meta for param in params):
        return []
    return [
        "its parameters are on the meta device, so weights cannot be loaded. Set "
        "init_model_with_meta_device=False"
    ]


def _plan(
    model: nn.Module,
    weights: Mapping[str, LazyTensor],
    dense: Split,
    expert: Split,
    vocab_size: int | None,
) -> Iterator[tuple[str, _Read | str]]:
    """Names of the model's tensors, each with the read to make, or the problem with it."""
    names = global_names(model)
    owners = dict(model.named_modules())
    for name, value in model.state_dict(keep_vars=True).items():
        if name.endswith(EXTRA_STATE) or not isinstance(value, torch.Tensor):
            continue
        stored = weights.get(common_name(names.of(name)))
        if stored is None:
            yield name, "is not in the checkpoint"
            continue
        owner, _, last = name.rpartition(".")
        dim = DIMS[tensor_parallel_mode(value, owners[owner], last)]  # type: ignore[arg-type]
        split = dense if getattr(value, "allreduce", True) else expert
        gated = len(names.suffixes(name)) > 1
        yield name, _read(names, name, value, stored, dim, split, gated, vocab_size)


def _read(
    names: GlobalNames,
    name: str,
    value: torch.Tensor,
    stored: LazyTensor,
    dim: int | None,
    split: Split,
    gated: bool,
    vocab_size: int | None,
) -> _Read | str:
    """The read of the part of `stored` that this rank has, or the problem with it."""
    if dim is None or split[1] == 1:
        dim = 0
        split = WHOLE
    elif names.is_interleaved(name):
        return "its tensor-parallel slices do not join into one tensor"
    if stored.numel == 1 == value.numel():  # one of the two may be a scalar
        origin = (0,) * len(stored.shape)
        return value, stored, ((origin, stored.shape),)
    own = tuple(value.shape)
    rank, size = split
    whole = (*own[:dim], own[dim] * size, *own[dim + 1 :])
    start = tuple(rank * n if axis == dim else 0 for axis, n in enumerate(own))
    if stored.shape == whole:
        if not gated or size == 1:
            return value, stored, ((start, own),)
        # Gate and linear rows are split one by one.
        half = (own[0] // 2, *own[1:])
        gate = rank * half[0]
        linear = whole[0] // 2 + gate
        return value, stored, (((gate, *start[1:]), half), ((linear, *start[1:]), half))
    rows = min(stored.shape[0], whole[0])
    is_padding = vocab_size is not None and is_table(names.of(name)) and rows >= vocab_size
    if not is_padding or stored.shape[1:] != whole[1:]:
        return f"has shape {whole}, in the checkpoint {stored.shape}"
    rows = max(0, min(own[0], rows - start[0]))
    return value.detach()[:rows], stored, ((start, (rows, *own[1:])),)
