"""Casts to NVFP4 and MXFP8 of shards, against whole weights in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_adapter.quantised.columns import fp4_columns, mx_columns, padded
from megatron_fsdp_adapter.quantised.e2m1 import HALFWAY, TileCast, TileRows, _e2m1
from megatron_fsdp_adapter.quantised.e4m3 import MxRows
from tests.quantised import arithmetic, float64
from tests.quantised.fp4_checks import WIDTHS, check
from tests.quantised.te_weights import NASTY, cut, random_case


@pytest.mark.parametrize("recipe", WIDTHS)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 20), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    nasty=st.sampled_from(list(NASTY)),
)  # fmt: skip
def test_planes_of_shards_are_those_of_whole_weights_in_float64(recipe, seed, dtype, nasty):
    check(random_case(recipe, seed, dtype, nasty, "cpu", across=WIDTHS[recipe]))


@pytest.mark.parametrize("shards", range(1, 9))
@pytest.mark.parametrize("recipe", WIDTHS)
def test_one_to_eight_shards(recipe, shards):
    case = random_case(recipe, shards, torch.float32, "", "cpu", across=WIDTHS[recipe])
    check(dataclasses.replace(case, shards=shards, ranges=cut(recipe, case.shapes, shards)))


@pytest.mark.parametrize("nasty", [name for name in NASTY if name != "NaN"])
@pytest.mark.parametrize("recipe", WIDTHS)
def test_the_emulated_library_computes_the_same(recipe, nasty):
    for seed in range(5):
        for main in random_case(recipe, seed, torch.float32, nasty, "cpu").mains:
            expected = getattr(float64, recipe)(main.bfloat16())
            values = main.bfloat16().float()
            amax = expected.pop("amax", None)
            found = arithmetic.mxfp8(values) if amax is None else arithmetic.nvfp4(values, amax)
            for name, plane in expected.items():
                assert torch.equal(found[name], plane), name


def test_every_element_is_at_most_half_a_step_away():
    """Steps of E2M1 below the largest element of a tile, which E4M3 scales may cut off: a sixth of
    it, and a seventeenth."""
    main = torch.randn(64, 96) * torch.rand(64, 1) * 3
    planes = float64.nvfp4(main)
    values = main.double().numpy()
    far = np.abs(values - float64.nvfp4_values(planes))
    most = np.abs(values).reshape(4, 16, 6, 16).max((1, 3))
    bound = np.repeat(np.repeat(most * (1 / 6 + 1 / 16), 16, 0), 16, 1)
    assert (far <= bound).all() and far.max() > 0


def test_elements_half_way_between_two_numbers_go_to_the_even_one():
    ties = torch.tensor([*HALFWAY, 6.0, 7.0, torch.inf, 0.0])
    assert _e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 0]
    assert _e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14, 15, 15, 15, 8]
    assert _e2m1(torch.tensor([torch.nan, -torch.nan])).tolist() == [7, 7]


def test_columns_are_the_rows_of_the_transpose():
    main = torch.randn(48, 80)
    planes, turned = float64.nvfp4(main), float64.nvfp4(main.t())
    data, scales = fp4_columns(planes["rowwise"], planes["rowwise_scales"])
    assert torch.equal(data, turned["rowwise"]) and torch.equal(scales, turned["rowwise_scales"])


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


def test_rows_that_cut_tiles_are_an_error():
    main, data = torch.randn(64), torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="NVFP4 needs rows and columns in multiples of 16"):
        TileRows((8, 16), 0, main, data[:32], data[:4])
    with pytest.raises(ValueError, match=r"must be \(n,\) and \(n / 2,\)"):
        TileRows((8, 16), 0, main, data, data[:4])
    main = torch.randn(512)
    with pytest.raises(ValueError, match=r"not \(32,\) uint8"):
        TileRows((16, 32), 0, main, torch.zeros(256, dtype=torch.uint8), data)
    with pytest.raises(ValueError, match=r"Size\(\[16\]\).*not \(32,\) uint8"):
        planes = [torch.zeros(size, dtype=torch.uint8) for size in (1024, 1024, 32, 16)]
        MxRows((32, 32), 0, torch.randn(1024), *planes[:2], planes[3], planes[3])


def test_a_rank_without_rows_takes_part():
    empty = torch.zeros(0)
    none = torch.zeros(0, dtype=torch.uint8)
    cast = TileCast([TileRows((16, 16), 0, empty, none, none)], torch.bfloat16)
    amaxes = torch.zeros(1)
    cast.begin(amaxes)
    cast.finish(amaxes)
    assert cast.amax_numel == 1 and amaxes.item() == 0
