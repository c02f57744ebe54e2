"""Sums of what the ranks sent: in float32, rounded once, whatever the dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.kernels.sums import _kernel
from tests.lib.gpt.exact import DTYPES, is_rounded_once

CHECKS = ("core/kernels/sums.py",)


@given(
    st.integers(1, 9),
    st.integers(0, 33),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from([1.0, 0.5, 1 / 3]),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_a_sum_is_rounded_once(count, numel, sent, kept, scale, accumulate, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, numel, generator=generator).to(sent)
    output = torch.randn(numel, generator=generator).to(kept)
    assert is_rounded_once(rows, output, scale, accumulate)


def test_where_triton_cannot_run_torch_sums_and_a_warning_says_so():
    """Here it is missing, or finds no GPU."""
    with pytest.warns(UserWarning, match="left to torch.*Triton cannot be used here"):
        assert _kernel.__wrapped__(torch.device("cpu")) is None
