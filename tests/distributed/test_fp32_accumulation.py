"""Show 3: bf16 on the wire, float32 in the sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.comm.all_to_all_sum import reduce_scatter
from megatron_fsdp_adapter.core.runtime import comm
from megatron_fsdp_adapter.core.runtime.comm import Communicator
from tests.distributed.shared_ranks import on_ranks

NUMEL = 1 << 12
"""Elements of a shard."""


@contextmanager
def bytes_on_the_wire() -> Iterator[dict[str, int]]:
    """Counts what each rank sends to the others: of the full input all but its own slice, which is
    what a ring reduce-scatter passes on and what an all-to-all sends. Only data is counted, in the
    dtype in which it is handed over."""
    sent = {"reduce_scatter": 0, "all_to_all": 0}

    def counting(name: str, original: Any, position: int) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            full, size = args[position], dist.get_world_size(kwargs["group"])
            sent[name] += full.numel() * full.element_size() * (size - 1) // size
            return original(*args, **kwargs)

        return collective

    with (
        mock.patch.object(
            comm, "_reduce_scatter", counting("reduce_scatter", comm._reduce_scatter, 1)
        ),
        mock.patch.object(
            dist, "all_to_all_single", counting("all_to_all", dist.all_to_all_single, 1)
        ),
    ):
        yield sent


def _run(works: list[Any]) -> None:
    for work in works:
        work.wait()


@pytest.mark.parametrize("world", (2, 4))
@on_ranks()
def test_error_and_traffic_of_one_reduction(rank: int, world: int) -> None:
    """At most a quarter of the error of a reduction in bf16 (root mean square of this rank's
    shard), for as many bytes. What comes out is the float32 sum of the rows in the order of the
    ranks, bit for bit."""
    communicator = Communicator(dist.group.WORLD, torch.device("cpu"))
    torch.manual_seed(rank)
    grads = torch.randn(NUMEL * world).bfloat16()
    exact = grads.double()
    dist.all_reduce(exact)
    own = exact.view(world, -1)[rank]
    with bytes_on_the_wire() as sent:
        in_bf16 = grads.clone()
        low = in_bf16.view(world, -1)[rank]
        _run(communicator.reduce_scatter([(low, in_bf16)]))
        high = torch.empty(NUMEL)
        _run(reduce_scatter(communicator, [(high, grads)]))
    average = torch.empty(NUMEL)
    _run(reduce_scatter(communicator, [(average, grads)], scale=1 / world))
    everyone = [torch.empty_like(grads) for _ in range(world)]
    dist.all_gather(everyone, grads)
    received = torch.stack([other.view(world, -1)[rank] for other in everyone])
    expected = torch.sum(received, dim=0, dtype=torch.float32)
    assert torch.equal(high, expected)
    assert torch.allclose(average, expected / world, rtol=2.0**-23, atol=0.0)
    bound = world * 2.0**-24 * received.double().abs().sum(0)
    assert bool(((high.double() - own).abs() <= bound).all())
    errors = [(value.double() - own).square().mean().sqrt().item() for value in (low, high)]
    assert world == 2 or 0 < errors[0] >= 4 * errors[1], errors
    assert sent["all_to_all"] == sent["reduce_scatter"] == 2 * NUMEL * (world - 1)


@on_ranks(1)
def test_a_group_of_one_rank_sends_nothing() -> None:
    communicator = Communicator(dist.group.WORLD, torch.device("cpu"))
    grads, output = torch.randn(64).bfloat16(), torch.empty(64)
    with bytes_on_the_wire() as sent:
        assert reduce_scatter(communicator, [(output, grads)]) == []
    assert torch.equal(output, grads.float()) and not any(sent.values())

