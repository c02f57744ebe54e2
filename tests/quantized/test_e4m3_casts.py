"""Casts of the rows of many weights: every element against arithmetic one by one."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_adapter.quantized import e4m3
from megatron_fsdp_adapter.quantized.columns import mx_columns, padded
from megatron_fsdp_adapter.quantized.e4m3 import (
    BlockCast,
    OwnRows,
    TensorCast,
    kernels_for,
    write_scales,
)
from tests.quantized import float64
from tests.quantized.arithmetic import scale_of
from tests.quantized.emulated import quantizer_of, whole_fields
from tests.quantized.te_checks import SCALE, Shard, quantize
from tests.quantized.te_extension import Extension
from tests.quantized.te_weights import NASTY, Case, random_case

PLANES = ("rowwise", "columnwise", "rowwise_scales", "columnwise_scales")


def whole(case: Case, index: int) -> list[torch.Tensor]:
    """Bytes, and inverses of scales, of a weight that nobody has cut."""
    recipe = {"blockwise": "block128"}.get(case.recipe, case.recipe)
    quantizer = quantizer_of(recipe, scale=torch.tensor([SCALE]))
    return list(whole_fields(case.mains[index], quantizer, torch.bfloat16).values())


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["current", "delayed", "blockwise"]), st.integers(0, 1 << 20),
    st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from(list(NASTY)),
)  # fmt: skip
def test_bytes_of_shards_are_those_of_whole_weights(recipe, seed, dtype, nasty):
    case = random_case(recipe, seed, dtype, nasty, "cpu")
    shards = [Shard(case, number, 64) for number in range(case.shards)]
    inverses = quantize(recipe, shards)["inverses"]
    expected = [whole(case, index) for index in range(len(case.mains))]
    assert torch.equal(inverses, torch.cat([scale.view(-1) for _, scale in expected]))
    for shard in shards:
        shard.check_untouched()
        for own, (start, stop), (data, _) in zip(shard.rows, shard.ranges, expected, strict=True):
            assert torch.equal(own.planes[0], data.view(-1)[start:stop])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from(list(NASTY)))
def test_mxfp8_of_shards_is_that_of_whole_weights_in_float64(seed, nasty):
    """And so is what the extension's stand-in computes."""
    case = random_case("mxfp8", seed, torch.float32, nasty, "cpu")
    shards = [Shard(case, number, 64) for number in range(case.shards)]
    quantize("mxfp8", shards)
    for shard in shards:
        shard.check_untouched()
    for index, main in enumerate(case.mains):
        planes = float64.mxfp8(main.bfloat16())
        expected = [planes[name].view(-1) for name in PLANES]
        m, k = main.shape
        values = main.bfloat16().view(-1)
        amaxes = torch.zeros(m, k // 32), torch.zeros(m // 32, k)
        Extension.mxfp8_scaling_compute_partial_amax(values, *amaxes, m, k, 0)
        scales = [torch.zeros(amax.shape, dtype=torch.uint8) for amax in amaxes]
        Extension.multi_tensor_compute_scale_inv_e8m0(0, None, [amaxes, scales])
        data = [torch.zeros(m * k, dtype=torch.uint8) for _ in scales]
        Extension.mxfp8_scaling_partial_cast(values, *data, *scales, m, k, 0)
        for found, plane in zip([*data, *scales], expected, strict=True):
            assert torch.equal(found.view(-1), plane)
        for number, plane in enumerate(expected, 1):
            parts = [shard.rows[index].tensors[number] for shard in shards]
            assert torch.equal(torch.cat(parts), plane)


def test_columns_of_mxfp8_that_were_left_out_are_made_of_the_value():
    value = torch.randn(64, 96).bfloat16()
    data, scales = mx_columns(value, torch.empty(0, dtype=torch.uint8))
    expected = float64.mxfp8(value)
    assert torch.equal(data, expected["columnwise"])
    assert torch.equal(scales, expected["columnwise_scales"])


def test_scales_are_filled_up_with_zeros():
    scales = torch.ones(3, 5, dtype=torch.uint8)
    found = padded(scales, (4, 8))
    assert found.shape == (4, 8) and torch.equal(found[:3, :5], scales) and found.sum() == 15


@pytest.mark.parametrize("powers", [False, True])
def test_a_scale_is_one_division_rounded_once(powers):
    special = torch.tensor([0.0, math.inf, math.nan, 1e-40, 3e38])
    amaxes = torch.cat([torch.rand(3000) * 10, special])
    scales, inverses = torch.empty(2, len(amaxes)).unbind()
    write_scales(amaxes, scales, inverses, powers, epsilon=1e-3)
    expected = [1.0 if math.isnan(a) else scale_of(a, powers, 1e-3) for a in amaxes.tolist()]
    assert scales.tolist() == expected
    assert torch.equal(inverses, torch.ones_like(scales) / scales)


def test_a_table_is_made_anew_when_memory_has_moved():
    data = torch.zeros(64, dtype=torch.uint8)
    own = OwnRows((4, 16), 0, torch.randn(64), (data,))
    cast = TensorCast([own, OwnRows((4, 16), 0, torch.randn(0), (data[:0],))], torch.bfloat16)
    table = cast.table()
    assert cast.table() is table and table.lines.tolist() == [
        [0, 64, own.main.data_ptr(), data.data_ptr()]
    ]
    moved = torch.zeros(65, dtype=torch.uint8)[1:]
    data.set_(moved.untyped_storage(), 1, (64,))  # type: ignore[call-overload]
    assert cast.table() is not table and not cast.table().aligned


MAIN, DATA = torch.randn(64), torch.zeros(64, dtype=torch.uint8)
BAD = {
    "not rows of a matrix": lambda: BlockCast(
        [OwnRows((4, 32), 8, MAIN, (DATA,))], torch.bfloat16
    ).begin(torch.zeros(4)),
    "one dtype and device": lambda: TensorCast(
        [OwnRows((4, 16), 0, one, (DATA,)) for one in (MAIN, MAIN.bfloat16())], torch.bfloat16
    ),
}  # fmt: skip


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
