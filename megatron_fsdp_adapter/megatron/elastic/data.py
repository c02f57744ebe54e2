"""The samples of a replica. Replicas of a step take consecutive samples, as data-parallel ranks of
one job do, so that no sample is lost or taken twice when they come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class StepStart(NamedTuple):
    """The place at which the batches of a step begin."""

    # Samples that all replicas have taken before.
    consumed: int
    # The number of this replica, and how many there are.
    replica: int
    replicas: int


class MovableLoader:
    """The batches of one of Megatron-LM's data loaders, which can go on elsewhere.

    Megatron-LM makes its sampler once, for the ranks of one job. Here the sampler's ranks are those
    of all replicas of a step. A move drops what the loader's workers have prefetched."""

    def __init__(self, loader: Any) -> None:
        sampler = loader.batch_sampler
        self._loader = loader  # of torch
        self._sampler = sampler  # Megatron-LM's, whose fields say where it begins
        # Of this rank among those of one replica.
        self._rank = sampler.data_parallel_rank
        self._ranks = sampler.micro_batch_times_data_parallel_size // sampler.micro_batch_size
        # Begun at once, as Megatron-LM's are: workers prefetch while it goes on starting.
        self._batches = iter(loader)

    def move(self, place: StepStart) -> None:
        """Makes the next batch the first one of a place."""
        sampler = self._sampler
        sampler.consumed_samples = place.consumed
        sampler.data_parallel_rank = place.replica * self._ranks + self._rank
        sampler.micro_batch_times_data_parallel_size = (
            sampler.micro_batch_size * self._ranks * place.replicas
        )
        # torch draws a seed for workers. Replicas move their loaders unequally often, but must draw
        # alike.
        drawn = torch.get_rng_state()
        self._batches = iter(self._loader)
        torch.set_rng_state(drawn)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._loader)


def movable(loader: Any) -> Any:
    """The loader as one that can be moved; None where this rank loads no data."""
    return None if loader is None else MovableLoader(loader)
