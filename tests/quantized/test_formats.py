"""Formats: what they refuse; and shards quantized by themselves are whole weights quantized."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.buffer import ShardedBuffer
from megatron_fsdp_adapter.core.engine.partition import partition
from megatron_fsdp_adapter.core.layout import (
    BLOCK128,
    MXFP8,
    PER_TENSOR,
    GroupLayout,
    ParamSpec,
    Plane,
    WeightFormat,
    plain,
    plan_group,
)
from megatron_fsdp_adapter.core.layout.group import ShardSpec
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from megatron_fsdp_adapter.quantized import TransformerEngineParams, format_of
from megatron_fsdp_adapter.quantized.weights import QuantizedWeight
from tests.quantized.emulated import (
    RECIPES,
    emulated_parameter,
    field_of,
    make,
    quantizer_of,
    whole_fields,
)

Shape = tuple[int, int]
BYTES = torch.uint8


def planned(shapes: Sequence[Shape], format: WeightFormat, shards: int) -> GroupLayout:
    specs = [
        ParamSpec(i, (f"w{i}",), shape, torch.bfloat16, True, format.granularity(shape), format)
        for i, shape in enumerate(shapes)
    ]
    return plan_group(specs, shards)


class Shards:
    """Every rank's part of the weights of one group, each quantized by itself. Scales that all
    ranks have are each rank's own."""

    def __init__(self, values: Sequence[torch.Tensor], recipe: str, shards: int) -> None:
        self.values, self.format, runtime = values, RECIPES[recipe], HostRuntime()
        shapes = [(value.shape[0], value.shape[1]) for value in values]
        self.layout = planned(shapes, self.format, shards)
        self.buffers, self.params, self.quantizers = [], [], []  # type: ignore[var-annotated]
        for rank in range(shards):
            held = ShardSpec(self.layout, rank)
            buffers = {
                plane.name: ShardedBuffer(held, [held], runtime, plane=plane)
                for plane in self.format.planes
            }
            planes = {name: buffer.items(held) for name, buffer in buffers.items()}
            params = [emulated_parameter(value.to(torch.bfloat16), recipe) for value in values]
            weights = [
                self._weight(rank, index, param, {n: each[index] for n, each in planes.items()})
                for index, param in enumerate(params)
            ]
            self.buffers.append(buffers)
            self.params.append(params)
            self.quantizers.append(TransformerEngineParams().quantizers(weights)[0][0])

    def _weight(
        self, rank: int, index: int, param: nn.Parameter, planes: dict[str, torch.Tensor]
    ) -> QuantizedWeight:
        rows = self.layout.shard_range(index, rank)
        main = self.values[index].reshape(-1)[rows.start : rows.stop]
        main = main.view(self.layout.local_shape(index, rank))
        return QuantizedWeight(param, f"w{index}", self.format, rows.start, main, True, planes)

    def quantize(self) -> None:
        vectors = [torch.full((q.amax_numel,), torch.nan) for q in self.quantizers]
        for quantizer, vector in zip(self.quantizers, vectors, strict=True):
            if vector.numel():
                quantizer.bind(vector)
            quantizer.begin()
        largest = torch.stack(vectors).amax(0)
        for quantizer, vector in zip(self.quantizers, vectors, strict=True):
            vector.copy_(largest)
            quantizer.finish()

    def gathered(self, plane: Plane) -> list[torch.Tensor]:
        """The plane of each weight, as a gather of every rank's shard makes it."""
        everything = ShardSpec(self.layout.with_shards(1), 0)
        specs = [everything, *(buffers[plane.name].stored for buffers in self.buffers)]
        full = ShardedBuffer(everything, specs, HostRuntime(), plane=plane)
        for buffers in self.buffers:
            shard = buffers[plane.name]
            for output, source in zip(
                full.segments(shard.stored), shard.segments(shard.stored), strict=True
            ):
                output.copy_(source)
        return full.items(everything)


def check(values: Sequence[torch.Tensor], recipe: str, shards: int) -> Shards:
    """Gathered planes, and scales on every rank, are those of the whole weights."""
    made = Shards(values, recipe, shards)
    made.quantize()
    gathered = {plane.name: made.gathered(plane) for plane in made.format.planes}
    for index, value in enumerate(values):
        quantizer = quantizer_of(recipe, scale=made.params[0][index]._quantizer.scale)
        expected = whole_fields(value, quantizer, torch.bfloat16)
        for name, planes in gathered.items():
            shape = next(p for p in made.format.planes if p.name == name).shape(tuple(value.shape))
            whole = expected.pop(field_of(recipe, name))
            assert torch.equal(planes[index].view(shape), whole), name
        for field, scale in expected.items():
            for params in made.params:
                assert torch.equal(params[index].__dict__[field], scale), field
    return made


def some_weights(seed: int, sizes: int = 5) -> list[torch.Tensor]:
    """Of shapes that all formats have whole blocks of, with rows and elements of unlike sizes."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    values = []
    for _ in range(choose.randint(1, 4)):
        shape = 32 * choose.randint(1, sizes), 32 * choose.randint(1, sizes)
        value = torch.randn(shape, generator=generator) * 10.0 ** choose.uniform(-3, 1)
        value.view(-1)[::97] *= 50
        value[: shape[0] // 3] *= 1e-4
        values.append(value)
    return values


@pytest.mark.parametrize("shards", range(1, 9))
@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_quantized_by_themselves_are_the_whole_weight_quantized(recipe, shards):
    """Over 10 x 40 layouts."""
    for seed in range(10):
        made = check(some_weights(seed + 100 * shards), recipe, shards)
        for plane in made.format.planes:
            for segment in made.layout.segments:
                assert plane.nbytes(segment.offset) % 16 == 0
                assert plane.nbytes(segment.shard_numel) % 16 == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_many_ranks_of_which_most_have_no_rows_of_a_weight(recipe):
    made = check(some_weights(7, 3), recipe, 64)
    assert sum(made.layout.shard_range(0, rank).empty for rank in range(64)) >= 32


EXTREMES = {
    "zeros": lambda value: value.zero_(),
    "one block of zeros": lambda value: value[:32].zero_(),
    "tiny": lambda value: value.mul_(1e-40),
    "huge": lambda value: value.clamp_(-1, 1).mul_(3e38),
    "infinite": lambda value: value.view(-1)[77:78].fill_(torch.inf),
    "NaN": lambda value: value.view(-1)[77:79].copy_(torch.tensor([torch.nan, -torch.nan])),
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_at_the_ends_of_float32(recipe, extreme):
    values = [value.clone() for value in some_weights(3)]
    EXTREMES[extreme](values[0])
    check(values, recipe, 3)


# What cannot be cut.


def test_the_granule_is_the_strip_of_rows_that_a_kernel_stores_as_a_whole():
    """Of 16 rows, in 128 x 128 blocks: no store of a rank is outside of its shard."""
    spec = ParamSpec(0, ("w",), (64, 32), torch.bfloat16, True, 16 * 32, BLOCK128)
    assert BLOCK128.rows == 16 and plan_group([spec], 2).segments[0].granularity == 16 * 32

@pytest.mark.parametrize("shards", [2, 5])
def test_a_weight_whose_rows_do_not_make_granules_lies_on_one_shard(shards):
    values = [torch.randn(40, 64), torch.randn(48, 64), torch.randn(7, 32)]
    made = check(values, "block128", shards)
    assert [len(made.layout.holders(index)) == 1 for index in (0, 2)] == [True, True]
    assert [BLOCK128.cuts(tuple(v.shape)) for v in values] == [False, True, False]


def test_what_lies_whole_on_one_shard_is_said():
    module = nn.Linear(32, 40)
    module.weight = emulated_parameter(module.weight.detach(), "block128")
    with pytest.warns(UserWarning, match="parameter weight: 40 rows are no multiple of 16"):
        plans = partition(module, {}, domain_of=lambda *_: "dense", format_of=format_of)
    keys = list(plans[-1].groups)
    assert [key.quantized for key in keys] == [BLOCK128, None]
    assert [key.format for key in keys] == [BLOCK128, plain(torch.float32)]


@pytest.mark.parametrize("shape", [(48, 64), (64, 48)])
def test_a_weight_without_whole_blocks_is_refused_by_name(shape):
    module = nn.Module()
    module.weight = nn.Parameter(make(shape, torch.bfloat16, quantizer_of("mxfp8"), {}))
    with pytest.raises(ValueError, match="parameter weight in format mxfp8.*no whole blocks"):
        partition(module, {}, domain_of=lambda *_: "dense", format_of=format_of)


def mine(**changes: Any) -> WeightFormat:
    return WeightFormat("mine", **{"planes": (Plane("a", BYTES),), **changes})


def spec_in(format: WeightFormat, index: int = 0, granularity: int = 1024) -> ParamSpec:
    return ParamSpec(index, ("w",), (64, 32), torch.bfloat16, True, granularity, format)


BLOCKS = Plane("a", BYTES, (1, 32))
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no planes": (lambda: mine(planes=()), "not a format"),
    "two of a name": (lambda: mine(planes=(Plane("a", BYTES), Plane("a", BYTES))), "not a format"),
    "no rows": (lambda: mine(rows=0), "not a format"),
    "cut": (
        lambda: mine(planes=(Plane("a", BYTES, (32, 1)),), rows=16, align=512), "cut block"
    ),
    "unaligned": (lambda: mine(align=8), "not aligned to 16 bytes"),
    "blocks across shards": (lambda: mine(planes=(BLOCKS,)), "not aligned"),
    "no plane": (lambda: Plane("a", BYTES, (0, 1)), "not a plane"),
    "elements that cut blocks": (lambda: BLOCKS.numel(33), "33 elements are no whole blocks"),
    "a shape that cuts blocks": (
        lambda: BLOCKS.shape((4, 5, 32)), "no whole blocks of 1 x 32"
    ),
    "a layout of two formats": (
        lambda: plan_group([spec_in(MXFP8), spec_in(BLOCK128, 1)], 2), "one format"
    ),
    "a layout of another alignment": (
        lambda: plan_group([spec_in(MXFP8)], 2, align=16), "aligned to 16 elements, not as mxfp8"
    ),
    "a granule that is cut": (
        lambda: spec_in(MXFP8, granularity=32), "cuts granules of format mxfp8"
    ),
}  # fmt: skip


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
