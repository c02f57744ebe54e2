"""Chunks: where a rank's piece lies in the whole, pure and attached to DTensors."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
from checkpoint_cases import SHAPES, data_mesh, plan, shard, uneven_dtensor, whole
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp_adapter.checkpoint.chunks import (
    LayoutRef,
    dtensor_like,
    tile,
)
from megatron_fsdp_adapter.core.layout.ranges import Box
from megatron_fsdp_adapter.dtensor import chunks_of, own_chunks

ROWS = (((2, 0), (3, 5)),)
"""Where three rows lie in a tensor of seven."""


def rows(local: torch.Tensor, chunks: tuple = ROWS) -> DTensor:
    """A piece of a tensor of 7 x 5."""
    return uneven_dtensor(local, data_mesh(1), [Shard(0)], (7, 5), (5, 1), chunks)


@pytest.mark.parametrize(
    "chunks",
    [
        (((0, 0), (2, 5)),),  # 10 elements, the local tensor has 15
        (((5, 0), (3, 5)),),  # beyond row 7
        (((-1, 0), (3, 5)),),
        (((0,), (15,)),),
        (((0, 0), (3, 5)), ((3, 0), (0, 5))),
    ],
)
def test_chunks_that_cannot_be_right_are_refused(one_rank: None, chunks: tuple) -> None:
    with pytest.raises(ValueError, match="chunk"):
        rows(torch.zeros(3, 5), chunks)


def test_the_dtensor_shares_the_storage_and_says_its_chunks(one_rank: None) -> None:
    local = torch.zeros(3, 5)
    tensor = rows(local)
    local.fill_(4)
    assert tuple(tensor.shape) == (7, 5) and bool((tensor.to_local() == 4).all())
    assert own_chunks(tensor).boxes == ROWS
    (item,) = tensor.__create_write_items__("key", tensor)
    assert item.tensor_data.size == torch.Size((7, 5))
    assert item.tensor_data.chunk.offsets == torch.Size((2, 0))


def test_an_empty_shard_has_no_chunk_and_still_is_a_value(one_rank: None) -> None:
    tensor = rows(torch.zeros(0, 5), ())
    assert own_chunks(tensor).boxes == ()
    assert tensor.__create_chunk_list__() == []
    assert tensor.__create_write_items__("key", tensor) == []


def test_what_has_the_geometry_has_the_chunks(one_rank: None) -> None:
    """Detached, copied, worked on element by element; not what is of another shape."""
    layout, mesh = plan(2), data_mesh(1)
    index = list(SHAPES).index("embedding")
    source = shard(LayoutRef(layout, index, 0), mesh, whole("embedding", (13, 6), torch.float32))
    detached = source.detach()
    for value in (detached, source.clone(), nn.Parameter(source).detach()):
        assert own_chunks(value).boxes == own_chunks(source).boxes
    for value in (torch.zeros_like(source), 2 * source, source.half()):
        # torch 2.11 asks no subclass of DTensor what its operators give.
        assert type(value) is DTensor or own_chunks(value).boxes == own_chunks(source).boxes
    assert chunks_of(source.sum()) is None and chunks_of(source[0]) is None
    assert detached.mul_(2) is detached
    detached._local_tensor.fill_(7)
    assert bool((source._local_tensor == 7).all())


def test_state_like_a_parameter(one_rank: None) -> None:
    source = rows(torch.zeros(3, 5))
    moment = torch.ones(3, 5, dtype=torch.bfloat16)
    state = dtensor_like(source, moment)
    assert state.dtype == torch.bfloat16 and state.shape == source.shape
    assert own_chunks(state).boxes == ROWS
    assert state._local_tensor.data_ptr() == moment.data_ptr()
    with pytest.raises(ValueError, match="local shape"):
        dtensor_like(source, torch.ones(5, 3))


def test_several_chunks_are_views_in_flat_order(one_rank: None) -> None:
    layout = plan(2, {"w": (3, 5)}, cut=1)
    ref = LayoutRef(layout, 0, 0)
    assert ref.chunks() == (((0, 0), (1, 5)), ((1, 0), (1, 3)))
    full = torch.arange(15.0).view(3, 5)
    local = full.view(-1)[:8].clone()
    tensor = uneven_dtensor(local, data_mesh(1), [Shard(0)], (3, 5), (5, 1), ref.chunks())
    for offsets, sizes in ref.chunks():
        block = tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size(offsets)))
        where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        assert torch.equal(block, full[where])
        block.fill_(-1)
    assert bool((tensor._local_tensor == -1).all()), "blocks must be views of the local tensor"
    with pytest.raises(ValueError, match="no chunk"):
        tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size((2, 0))))


BLOCKS: dict[str, tuple[list[Box], bool]] = {
    "one": ([((0, 0), (4, 3))], True),
    "rows": ([((2, 0), (2, 3)), ((0, 0), (2, 3))], True),
    "pieces of rows": ([((0, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 0), (3, 3))], True),
    "an empty one too": ([((0, 0), (4, 3)), ((4, 0), (0, 3)), ((0, 0), (4, 0))], True),
    "none": ([], False),
    "a gap": ([((0, 0), (2, 3)), ((3, 0), (1, 3))], False),
    "twice": ([((0, 0), (4, 3)), ((0, 0), (4, 3))], False),
    "as many elements": ([((0, 0), (2, 3)), ((0, 0), (2, 3))], False),
    "a gap and an overlap": ([((0, 0), (2, 3)), ((1, 0), (2, 3))], False),
    "shifted": ([((1, 0), (4, 3))], False),
    "beyond the end": ([((0, 0), (4, 3)), ((4, 0), (1, 3))], False),
}


@pytest.mark.parametrize("blocks", BLOCKS)
def test_blocks_tile_a_tensor_or_do_not(blocks: str) -> None:
    given, holds = BLOCKS[blocks]
    assert tile(((0, 0), (4, 3)), given) is holds


def test_a_scalar_has_one_block_and_nothing_has_none() -> None:
    assert tile(((), ()), [((), ())]) and not tile(((), ()), []) and tile(((0,), (0,)), [])


@pytest.mark.parametrize("cut", [0, 1])
def test_chunks_keep_no_tensor_alive(one_rank: None, cut: int) -> None:
    layout = plan(2, {"w": (3, 5)}, cut=cut)
    gc.disable()
    try:
        tensor = shard(LayoutRef(layout, 0, 0), data_mesh(1), torch.zeros(3, 5))
        alive = weakref.ref(tensor._local_tensor)
        del tensor
        assert alive() is None
    finally:
        gc.enable()


def test_a_deep_copy_is_saved_and_loaded_by_itself(one_rank: None) -> None:
    chunks = (((2, 0), (3, 5)),)
    tensor = uneven_dtensor(torch.zeros(3, 5), data_mesh(1), [Shard(0)], (7, 5), (5, 1), chunks)
    device_buffer = copy.deepcopy(tensor)
    device_buffer.__get_tensor_shard__(MetadataIndex("w", torch.Size((2, 0)))).fill_(3)
    assert bool((tensor._local_tensor == 0).all())
    assert own_chunks(device_buffer).boxes == chunks
    assert math.prod(device_buffer.to_local().shape) == 15
