"""Chunks: where a rank's piece lies in the whole. How they are saved, and copied with a DTensor:
test_checkpoint_roundtrip.py, and tests/state/test_state.py."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import Shard

from megatron_fsdp_adapter.core.dtensor.chunks import dtensor_like, tile
from tests.lib.checkpoint.checkpoint_cases import data_mesh, uneven_dtensor

CHECKS = ("core/dtensor/chunks.py", "core/layout/ranges.py")


def three_rows(chunks: tuple) -> torch.Tensor:
    """A tensor of 7 x 5, of which this rank has three rows."""
    return uneven_dtensor(torch.zeros(3, 5), data_mesh(1), [Shard(0)], (7, 5), (5, 1), chunks)


BAD_CHUNKS = [
    (((0, 0), (2, 5)),),  # 10 elements, the local tensor has 15
    (((5, 0), (3, 5)),),  # beyond row 7
    (((-1, 0), (3, 5)),),
    (((0,), (15,)),),
    (((0, 0), (3, 5)), ((3, 0), (0, 5))),
]


@pytest.mark.parametrize("chunks", BAD_CHUNKS)
def test_chunks_that_cannot_be_right_are_refused(one_rank: None, chunks: tuple) -> None:
    with pytest.raises(ValueError, match="chunk"):
        three_rows(chunks)


def test_what_is_not_its_own_is_refused(one_rank: None) -> None:
    tensor = three_rows((((2, 0), (3, 5)),))
    with pytest.raises(ValueError, match="local shape"):
        dtensor_like(tensor, torch.ones(5, 3))
    unknown = MetadataIndex("w", torch.Size((0, 0)))
    with pytest.raises(ValueError, match="no chunk"):
        tensor.__get_tensor_shard__(unknown)


WHOLE = ((0, 0), (4, 3))
FIRST = ((0, 0), (2, 3))
BLOCKS = {
    "one": ([WHOLE], True),
    "rows": ([((2, 0), (2, 3)), FIRST], True),
    "pieces of rows": ([((0, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 0), (3, 3))], True),
    "an empty one too": ([WHOLE, ((4, 0), (0, 3)), ((0, 0), (4, 0))], True),
    "none": ([], False),
    "a gap": ([FIRST, ((3, 0), (1, 3))], False),
    "twice": ([WHOLE, WHOLE], False),
    "as many elements": ([FIRST, FIRST], False),
    "a gap and an overlap": ([FIRST, ((1, 0), (2, 3))], False),
    "shifted": ([((1, 0), (4, 3))], False),
    "beyond the end": ([WHOLE, ((4, 0), (1, 3))], False),
}


@pytest.mark.parametrize("blocks", BLOCKS)
def test_blocks_tile_a_tensor_or_do_not(blocks: str) -> None:
    given, holds = BLOCKS[blocks]
    assert tile(WHOLE, given) is holds


def test_a_scalar_has_one_block_and_nothing_has_none() -> None:
    scalar = ((), ())
    assert tile(scalar, [scalar])
    assert not tile(scalar, [])
    assert tile(((0,), (0,)), [])
