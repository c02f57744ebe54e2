"""Mistakes to put into a trainer, to show that the checks of the topologies see them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from unittest import mock

from megatron.core import parallel_state as ps
from torch import nn

from megatron_fsdp_adapter.core.topology import EXPERT
from megatron_fsdp_adapter.megatron import optimizer as optimizer_seam
from megatron_fsdp_adapter.megatron.compat.core_api import NORM_GRADIENTS
from megatron_fsdp_adapter.megatron.domains import SHARED_EMBEDDING

from .topologies import TopologyTrainer


def double_expert_gradients(trainer: TopologyTrainer) -> None:
    """As if the gradient of a group of one rank were added to itself (trap G8)."""
    for chunk in trainer.chunks:
        domains = chunk.engine.reduce.domains
        domains[EXPERT] = dataclasses.replace(domains[EXPERT], scale=2 * domains[EXPERT].scale)


def keep_tensor_parallel_gradients_apart(trainer: TopologyTrainer) -> None:
    """Norm weights seem to core not to be replicated over the sequence (trap T7)."""
    for chunk in trainer.chunks:
        for pair in chunk.engine.pairs:
            pair.sharded.sequence_parallel = False


def drop_embedding_gradient_of_last_stage(trainer: TopologyTrainer) -> None:
    """The output layer's part of a tied gradient does not reach the first stage."""
    if not ps.is_pipeline_last_stage():
        return
    chunk = trainer.chunks[-1]
    original = chunk.finish_grad_sync

    def finish(*args: object, **kwargs: object) -> None:
        original(*args, **kwargs)
        for pair in chunk.engine.pairs:
            if pair.group.key.domain == SHARED_EMBEDDING:
                pair.sharded.main_grad._local_tensor.zero_()

    chunk.finish_grad_sync = finish


def count_shared_embedding_twice(trainer: TopologyTrainer) -> None:
    for chunk in trainer.chunks:
        for pair in chunk.engine.pairs:
            pair.sharded.shared = False


def count_replicas(trainer: TopologyTrainer) -> None:
    """Every rank counts the gradients that it holds without sharding (traps G4, H7)."""
    inner = trainer.optimizer
    original = getattr(inner, NORM_GRADIENTS)

    def counted(*group: str) -> list[nn.Parameter]:
        with mock.patch.object(optimizer_seam, "_replicas", lambda chunks: set()):
            return original(*group)

    setattr(inner, NORM_GRADIENTS, functools.partial(counted))


@dataclass(frozen=True)
class Fault:
    """`inject` into a trainer of `topology` with any of `strategies`."""

    topology: str
    strategies: tuple[str, ...]
    inject: Callable[[TopologyTrainer], None]


_TWO = ("no_shard", "optim_grads_params")

FAULTS: Mapping[str, Fault] = {
    "expert gradients doubled": Fault("ep4", _TWO, double_expert_gradients),
    "replicated gradients not summed": Fault("tp2-sp", _TWO, keep_tensor_parallel_gradients_apart),
    "tied gradient dropped": Fault("pp2", _TWO, drop_embedding_gradient_of_last_stage),
    "tied gradient counted twice": Fault("pp2", _TWO, count_shared_embedding_twice),
    "replicas counted": Fault("ep4", ("no_shard",), count_replicas),
}
