"""Show 3: bf16 on the wire, float32 in the sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.runtime import comm
from megatron_fsdp_adapter.core.runtime.comm import Communicator
from tests.distributed.launch import run_ranks

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


def _errors(rank: int, world: int) -> dict[str, Any]:
    """Root-mean-square error of this rank's shard, and bytes sent, of both ways."""
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
        _run(communicator.reduce_scatter_by_exchange([(high, grads)]))
    average = torch.empty(NUMEL)
    _run(communicator.reduce_scatter_by_exchange([(average, grads)], scale=1 / world))
    everyone = [torch.empty_like(grads) for _ in range(world)]
    dist.all_gather(everyone, grads)
    received = torch.stack([other.view(world, -1)[rank] for other in everyone])
    expected = torch.sum(received, dim=0, dtype=torch.float32)
    return {
        "bf16": (low.double() - own).square().mean().sqrt().item(),
        "fp32 sums": (high.double() - own).square().mean().sqrt().item(),
        "sent": sent,
        "bits": torch.equal(high, expected),
        "mean": torch.allclose(average, expected / world, rtol=2.0**-23, atol=0.0),
        "within": bool(((high.double() - own).abs() <= world * 2.0**-24 * received.double().abs()
                        .sum(0)).all()),
    }  # fmt: skip


@pytest.mark.parametrize("world", (2, 8))
def test_error_and_traffic_of_one_reduction(world: int) -> None:
    """At most a quarter of the error of a reduction in bf16, for as many bytes. What comes out is
    the float32 sum of the rows in the order of the ranks, bit for bit."""
    for found in run_ranks(_errors, world):
        assert found["bits"] and found["mean"] and found["within"]
        if world == 8:
            print(found)
            assert found["fp32 sums"] <= found["bf16"] / 4 and found["bf16"] > 0, found
        sent = found["sent"]
        assert sent["all_to_all"] == sent["reduce_scatter"] == 2 * NUMEL * (world - 1)


def _one_rank(rank: int, world: int) -> None:
    communicator = Communicator(dist.group.WORLD, torch.device("cpu"))
    grads, output = torch.randn(64).bfloat16(), torch.empty(64)
    with bytes_on_the_wire() as sent:
        assert communicator.reduce_scatter_by_exchange([(output, grads)]) == []
    assert torch.equal(output, grads.float()) and not any(sent.values())


def test_a_group_of_one_rank_sends_nothing() -> None:
    run_ranks(_one_rank, 1)
