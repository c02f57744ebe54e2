"""Copies of many tensors: the same whatever kernel does them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.engine import buffer
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.lib.gpt.exact import DTYPES

CHECKS = ("core/engine/buffer.py",)


@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(1, 10),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
)
def test_small_and_large_tensors_are_cast_alike(sizes, large, given_dtype, wanted):
    """With the border between the two anywhere."""
    inputs = [torch.randn(size).to(given_dtype) for size in sizes]
    outputs = [torch.full((size,), torch.nan, dtype=wanted) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer, "LARGE", large)
        buffer.copy_each(outputs, inputs)
    for output, source in zip(outputs, inputs, strict=True):
        assert output.dtype == wanted
        assert torch.equal(output, source.to(wanted))


def test_as_many_outputs_as_inputs():
    with pytest.raises(ValueError, match="1 outputs and 0 inputs"):
        buffer.copy_each([torch.zeros(2)], [])


def test_memory_that_a_buffer_was_given_is_there_as_long_as_the_buffer():
    """The tensor itself, not only its bytes: with it goes the lock on its pages. A view in another
    dtype does not hold it."""
    memory = torch.zeros(64, dtype=torch.uint8)
    alive = weakref.ref(memory)
    held = buffer.FlatBuffer(16, torch.float32, HostRuntime(), memory)
    del memory
    gc.collect()
    assert alive() is not None
    del held
    gc.collect()
    assert alive() is None
