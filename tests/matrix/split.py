"""What stock DDP has of its parameters, and what its distributed optimizer splits, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.distributed.topologies import TopologyTrainer

Tensors = dict[str, torch.Tensor]


def ddp_params(trainer: TopologyTrainer) -> Iterator[tuple[str, Any]]:
    yield from trainer._named(lambda chunk: chunk)


def optimizers_of(trainer: TopologyTrainer) -> list[Any]:
    return list(getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]))


def main_piece(param: Any, rows: slice) -> torch.Tensor:
    """A float32 parameter is its own main weight."""
    main = getattr(param, "main_param", None)
    return param.detach().view(-1)[rows] if main is None else main


def pieces_of(trainer: TopologyTrainer) -> Mapping[int, slice]:
    """By the id of a parameter, the range of it, flat, that this rank's optimizer steps."""
    pieces = {}
    for optimizer in optimizers_of(trainer):
        for param in getattr(optimizer, "model_param_gbuf_map", ()):
            held = optimizer._get_model_param_range_map(param)["param"]
            pieces[id(param)] = slice(held.start, held.end)
    return pieces


def put_together(
    trainer: TopologyTrainer, piece_of: Callable[[Any, slice], torch.Tensor]
) -> Tensors:
    """What the distributed optimizer splits over data-parallel ranks, whole and float32, of every
    trained parameter: `piece_of` gives this rank's piece, a range of the flat parameter;
    collective."""
    pieces, found = pieces_of(trainer), {}
    for name, param in ddp_params(trainer):
        if not param.requires_grad:
            continue
        whole = torch.zeros(param.numel(), device=param.device)
        rows = pieces.get(id(param))
        if rows is not None:
            whole[rows] = piece_of(param, rows).detach().view(-1).float()
        group = (
            parallel_state.get_data_parallel_group(with_context_parallel=True)
            if getattr(param, "allreduce", True)
            else parallel_state.get_expert_data_parallel_group()
        )
        dist.all_reduce(whole, group=group)
        found[name] = whole.view(param.shape)
    return found
