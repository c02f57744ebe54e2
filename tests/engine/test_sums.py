"""Sums of what the ranks sent: in float32, rounded once, whatever the dtypes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.comm.all_to_all_sum import (
    SumsOfReceived,
    _kernel,
    sum_rows,
)

DTYPES = (torch.float32, torch.bfloat16)


def _half_ulp(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def is_rounded_once(
    rows: torch.Tensor, output: torch.Tensor, scale: float, accumulate: bool
) -> bool:
    """Sums `rows` into `output`, and compares with the sum in float64."""
    expected, size = rows.double().sum(0) * scale, rows.double().abs().sum(0) * abs(scale)
    if accumulate:
        expected, size = expected + output.double(), size + output.double().abs()
    kept = output.dtype
    sum_rows(rows, output, scale, accumulate)
    in_float32 = (len(rows) + 2) * _half_ulp(torch.float32) * size
    bound = in_float32 + _half_ulp(kept) * expected.abs() * 1.01
    return output.dtype == kept and bool(((output.double() - expected).abs() <= bound).all())


@given(
    st.integers(1, 9), st.integers(0, 33), st.sampled_from(DTYPES), st.sampled_from(DTYPES),
    st.sampled_from([1.0, 0.5, 1 / 3]), st.booleans(), st.integers(0, 1 << 30),
)  # fmt: skip
def test_a_sum_is_rounded_once(count, numel, sent, kept, scale, accumulate, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, numel, generator=generator).to(sent)
    output = torch.randn(numel, generator=generator).to(kept)
    assert is_rounded_once(rows, output, scale, accumulate)


def test_it_happens_when_the_exchange_is_waited_for():
    rows, output = torch.zeros(3, 4), torch.ones(4)
    exchange: Any = SimpleNamespace(wait=lambda: rows.fill_(2.0))
    sums: Any = SumsOfReceived([exchange], partial(sum_rows, rows, output, 0.5, True))
    assert not rows.any() and torch.equal(output, torch.ones(4))
    sums.wait()
    assert torch.equal(output, torch.full((4,), 4.0))


@pytest.mark.parametrize("accumulate", [False, True])
def test_without_scale_a_sum_of_one_row_is_that_row(accumulate):
    row, output = torch.randn(1, 7), torch.zeros(7)
    sum_rows(row, output, accumulate=accumulate)
    assert torch.equal(output, row[0])


def test_where_triton_cannot_run_torch_sums_and_a_warning_says_so():
    """Here it is missing, or finds no GPU."""
    with pytest.warns(UserWarning, match="left to torch.*Triton cannot be used here"):
        assert _kernel.__wrapped__(torch.device("cpu")) is None
