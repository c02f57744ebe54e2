"""Lazy tensors: every operation moves the elements that the same one moves in memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_adapter.checkpoint.convert import lazy


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


X, Y = numbered(5, 3), -numbered(2, 3)
CASES = {
    "narrow": (lazy.narrow(lazy.from_tensor(X), 1, 3), X[1:4]),
    "concat": (lazy.concat([lazy.from_tensor(X), lazy.from_tensor(Y)]), torch.cat([X, Y])),
    "select": (lazy.select(lazy.from_tensor(numbered(4, 5, 3)), 2), numbered(4, 5, 3)[2]),
    "stack": (lazy.stack([lazy.from_tensor(X), lazy.from_tensor(-X)]), torch.stack([X, -X])),
    "cast": (lazy.cast(lazy.from_tensor(X / 3), torch.bfloat16), (X / 3).bfloat16()),
    "nested": (
        lazy.stack(
            [lazy.concat([lazy.narrow(lazy.from_tensor(X), 3, 2), lazy.from_tensor(Y)])] * 2
        ),
        torch.stack([torch.cat([X[3:], Y])] * 2),
    ),
    "rounded on the way": (
        lazy.cast(lazy.cast(lazy.from_tensor(X / 3), torch.bfloat16), torch.float32),
        (X / 3).bfloat16().float(),
    ),
    "scalar": (lazy.from_tensor(torch.tensor(3.0)), torch.tensor(3.0)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("limit", [1, 8, 20, 24, 10**6])
def test_blocks_of_an_operation_are_those_of_its_result(name: str, limit: int) -> None:
    tensor, expected = CASES[name]
    assert tensor.shape == tuple(expected.shape) and tensor.dtype == expected.dtype
    assert torch.equal(tensor.whole(), expected)
    found = torch.full_like(expected, 77)
    for offsets, sizes in lazy.blocks(tensor.shape, tensor.dtype.itemsize, limit):
        at = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        found[at] = tensor.block((offsets, sizes))
    assert torch.equal(found, expected)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    itemsize=st.sampled_from([1, 2, 4]),
    limit=st.integers(1, 200),
)
@settings(max_examples=100, deadline=None)
def test_blocks_cover_a_shape_once_in_order_and_keep_the_limit(
    shape: tuple[int, ...], itemsize: int, limit: int
) -> None:
    order = numbered(*shape)
    seen = []
    for offsets, sizes in lazy.blocks(shape, itemsize, limit):
        numel = math.prod(sizes)
        assert numel == 1 or numel * itemsize <= limit
        at = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        seen += order[at].reshape(-1).tolist()
    assert seen == order.reshape(-1).tolist()


BAD = {
    "widths differ": lambda: lazy.concat([lazy.from_tensor(X), lazy.from_tensor(numbered(2, 4))]),
    "dtypes differ": lambda: lazy.concat([lazy.from_tensor(X), lazy.from_tensor(Y.double())]),
    "shapes differ": lambda: lazy.stack([lazy.from_tensor(X), lazy.from_tensor(Y)]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_an_error_before_anything_is_read(name: str) -> None:
    with pytest.raises(ValueError):
        BAD[name]()
