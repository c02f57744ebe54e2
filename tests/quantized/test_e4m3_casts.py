"""Casts of the rows of many weights: scales, columns, and the table that kernels read. Bytes are
compared in test_formats.py."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.quantized import e4m3
from megatron_fsdp_adapter.quantized.e4m3 import (
    BlockCast,
    LocalRows,
    TensorCast,
    kernels_for,
    write_scales,
)
from tests.lib.quantized.arithmetic import e8m0, scale_of
from tests.lib.quantized.emulated import emulated_parameter
from tests.lib.quantized.te_weights import KNOWS

CHECKS = ("quantized/e4m3.py", "quantized/tables.py")


def test_exponents_are_of_the_smallest_power_of_two_that_is_not_below() -> None:
    values = torch.rand(3000).clamp_min(2.0**-20) * 2.0 ** torch.randint(-100, 120, (3000,))
    powers = 2.0 ** (e8m0(values).double() - 127)
    assert bool(((powers >= values) & (powers / 2 < values)).all())


def test_columns_of_mxfp8_that_were_left_out_are_made_of_the_value():
    """As Transformer Engine leaves them out where no gradients are recorded."""
    param: Any = emulated_parameter(torch.randn(96, 160).bfloat16(), "mxfp8")
    expected = KNOWS.fields(param)
    value = param._high_precision_init_val
    param._columnwise_data = None
    param._columnwise_scale_inv = None
    param._high_precision_init_val = None
    with pytest.raises(ValueError, match="without columns.*preserve_high_precision_init_val=True"):
        KNOWS.fields(param)
    param._high_precision_init_val = value
    for name, field in KNOWS.fields(param).items():
        assert torch.equal(field, expected[name]), name
    assert param._columnwise_scale_inv.shape == (4, 256), "padded"


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("powers", [False, True])
def test_a_scale_is_one_division_rounded_once(powers, epsilon):
    special = torch.tensor([0.0, math.inf, math.nan, 1e-40, 3e38])
    amaxes = torch.cat([torch.rand(3000) * 10, special])
    scales, inverses = torch.empty(2, len(amaxes)).unbind()
    write_scales(amaxes, scales, inverses, powers, epsilon)
    expected = [1.0 if math.isnan(a) else scale_of(a, powers, epsilon) for a in amaxes.tolist()]
    assert scales.tolist() == expected
    assert torch.equal(inverses, torch.ones_like(scales) / scales)


def test_a_table_is_made_anew_when_memory_has_moved():
    data = torch.zeros(64, dtype=torch.uint8)
    own = LocalRows((4, 16), 0, torch.randn(64), (data,))
    cast = TensorCast([own, LocalRows((4, 16), 0, torch.randn(0), (data[:0],))], torch.bfloat16)
    table = cast.table()
    assert cast.table() is table
    assert table.lines.tolist() == [[0, 64, own.main.data_ptr(), data.data_ptr()]]
    moved = torch.zeros(65, dtype=torch.uint8)[1:]
    data.set_(moved.untyped_storage(), 1, (64,))  # type: ignore[call-overload]
    assert cast.table() is not table
    assert not cast.table().aligned


MAIN = torch.randn(64)
DATA = torch.zeros(64, dtype=torch.uint8)


def _not_rows_of_a_matrix():
    return BlockCast([LocalRows((4, 32), 8, MAIN, (DATA,))], torch.bfloat16).begin(torch.zeros(4))


def _one_dtype_and_device():
    return TensorCast(
        [LocalRows((4, 16), 0, one, (DATA,)) for one in (MAIN, MAIN.bfloat16())], torch.bfloat16
    )


BAD = {
    "not rows of a matrix": _not_rows_of_a_matrix,
    "one dtype and device": _one_dtype_and_device,
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_cast_is_an_error(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_where_triton_cannot_run_torch_casts_and_a_warning_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, e4m3.__name__.replace("e4m3", "triton_e4m3"), raising=False)
    with pytest.warns(UserWarning, match="quantized by torch.*Triton cannot be used here"):
        assert kernels_for.__wrapped__(torch.device("cuda")) is None
    assert kernels_for(torch.device("cpu")) is None
