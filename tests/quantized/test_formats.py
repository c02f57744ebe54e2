"""Formats: what they refuse; and shards quantized by themselves are whole weights quantized."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.partition import managed_params, partition
from megatron_fsdp_adapter.core.layout import (
    BLOCK128,
    MXFP8,
    PER_TENSOR,
    ParamSpec,
    Plane,
    WeightFormat,
    plain,
    plan_group,
)
from megatron_fsdp_adapter.quantized import format_of
from tests.lib.quantized.emulated import TE_RECIPES, emulated_parameter, make, quantizer_of
from tests.lib.quantized.te_checks import shards_are_the_whole
from tests.lib.quantized.te_extension import FOLDERS, WITHOUT, standing_in
from tests.lib.quantized.te_weights import NASTY, RECIPES, TINY

CHECKS = ("quantized/params.py", "quantized/quantizers.py", "core/layout/format.py")

BYTES = torch.uint8
VALUES = (*NASTY, TINY)


@pytest.mark.parametrize("nasty", VALUES)
@pytest.mark.parametrize("recipe", [*RECIPES, "current, delayed"])
def test_shards_quantized_by_themselves_are_the_whole_weight_quantized(recipe, nasty):
    shards_are_the_whole(0, 1, recipe, nasty, 10)


@pytest.mark.skipif(not FOLDERS, reason=WITHOUT)
@pytest.mark.parametrize("recipe", [*TE_RECIPES, "te current, te delayed"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_shards_quantized_by_themselves_are_what_te_makes_of_the_whole(
    alone: None, folder: Path, recipe: str
) -> None:
    with standing_in(folder):
        for nasty in VALUES:
            shards_are_the_whole(0, 1, recipe, nasty, 2)


# What cannot be cut.


def test_the_granule_is_the_strip_of_rows_that_a_kernel_stores_as_a_whole():
    """Of 16 rows, in 128 x 128 blocks: no store of a rank is outside of its shard."""
    spec = ParamSpec(0, ("w",), (64, 32), torch.bfloat16, True, 16 * 32, BLOCK128)
    assert BLOCK128.rows == 16
    assert plan_group([spec], 2).segments[0].granularity == 16 * 32


def test_what_lies_whole_on_one_shard_is_said():
    module = nn.Linear(32, 40)
    module.weight = emulated_parameter(module.weight.detach(), "block128")
    entries = [replace(one, format=format_of(one)) for one in managed_params(module)]
    with pytest.warns(UserWarning, match="parameter weight: 40 rows are no multiple of 16"):
        plans = partition({}, entries)
    keys = list(plans[-1].groups)
    assert [key.quantized for key in keys] == [BLOCK128, None]
    assert [key.format for key in keys] == [BLOCK128, plain(torch.float32)]


@pytest.mark.parametrize("shape", [(48, 64), (64, 48)])
def test_a_weight_without_whole_blocks_is_refused_by_name(shape):
    module = nn.Module()
    module.weight = nn.Parameter(make(shape, torch.bfloat16, quantizer_of("mxfp8"), {}))
    entries = [replace(one, format=format_of(one)) for one in managed_params(module)]
    with pytest.raises(ValueError, match="parameter weight in format mxfp8.*no whole blocks"):
        partition({}, entries)


def mine(**changes: Any) -> WeightFormat:
    return WeightFormat("mine", **{"planes": (Plane("a", BYTES),), **changes})


def spec_in(format: WeightFormat, index: int = 0, granularity: int = 1024) -> ParamSpec:
    return ParamSpec(index, ("w",), (64, 32), torch.bfloat16, True, granularity, format)


BLOCKS = Plane("a", BYTES, (1, 32))


def _no_planes():
    return mine(planes=())


def _two_of_a_name():
    return mine(planes=(Plane("a", BYTES), Plane("a", BYTES)))


def _no_rows():
    return mine(rows=0)


def _cut():
    return mine(planes=(Plane("a", BYTES, (32, 1)),), rows=16, align=512)


def _unaligned():
    return mine(align=8)


def _blocks_across_shards():
    return mine(planes=(BLOCKS,))


def _no_plane():
    return Plane("a", BYTES, (0, 1))


def _elements_that_cut_blocks():
    return BLOCKS.numel(33)


def _a_shape_that_cuts_blocks():
    return BLOCKS.shape((4, 5, 32))


def _a_layout_of_two_formats():
    return plan_group([spec_in(MXFP8), spec_in(BLOCK128, 1)], 2)


def _a_layout_of_another_alignment():
    return plan_group([spec_in(MXFP8)], 2, align=16)


def _a_granule_that_is_cut():
    return spec_in(MXFP8, granularity=32)


WRONG = {
    "no planes": (_no_planes, "not a format"),
    "two of a name": (_two_of_a_name, "not a format"),
    "no rows": (_no_rows, "not a format"),
    "cut": (_cut, "cut block"),
    "unaligned": (_unaligned, "not aligned to 16 bytes"),
    "blocks across shards": (_blocks_across_shards, "not aligned"),
    "no plane": (_no_plane, "not a plane"),
    "elements that cut blocks": (_elements_that_cut_blocks, "33 elements are no whole blocks"),
    "a shape that cuts blocks": (_a_shape_that_cuts_blocks, "no whole blocks of 1 x 32"),
    "a layout of two formats": (
        _a_layout_of_two_formats,
        "one format",
    ),
    "a layout of another alignment": (
        _a_layout_of_another_alignment,
        "aligned to 16 elements, not as mxfp8",
    ),
    "a granule that is cut": (
        _a_granule_that_is_cut,
        "cuts granules of format mxfp8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_formats_planes_and_layouts_that_contradict_themselves_are_refused(name):
    make, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("format", "numbers", "kept"),
    [(plain(torch.bfloat16), 2.0, (False, False)), (plain(torch.float32), 4.0, (False, False)),
     (PER_TENSOR, 1.0, (False, True)), (BLOCK128, 1.0, (False, True)),
     (MXFP8, 2.0625, (True, True))],
)  # fmt: skip
def test_bytes_an_element_and_whether_shards_are_kept(format, numbers, kept):
    """Of weights that are trained, and of frozen ones: what those stand for is their main weight,
    which rounds to other scales than they have."""
    assert format.nbytes(1024) == numbers * 1024
    assert (format.keeps_shards(True), format.keeps_shards(False)) == kept
