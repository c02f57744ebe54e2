"""What grows with the number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_fsdp_adapter.planning import command
from megatron_fsdp_adapter.planning.configurations import Configuration
from megatron_fsdp_adapter.planning.models import shape_named
from megatron_fsdp_adapter.planning.scale import bytes_of_block, scale_row
from megatron_fsdp_adapter.planning.shapes import with_layers

pytestmark = pytest.mark.once

SHAPE = with_layers(shape_named("llama3-70b"), 8)


def test_collectives_of_a_microbatch_do_not_grow_with_ranks():
    few, many = (scale_row(SHAPE, Configuration(ranks)) for ranks in (8, 16384))
    assert (few.gathers, few.reductions, few.groups) == (many.gathers, many.reductions, many.groups)
    # 8 layers forward and backward, embedding and output layer, which stays, and the root twice.
    assert few.reductions == 11 and few.gathers == 20 - 2


def test_blocks_of_a_checkpoint_are_at_most_twice_what_a_flat_layout_must_have():
    for ranks in (64, 1024, 16384):
        row = scale_row(SHAPE, Configuration(ranks))
        assert row.least <= row.blocks <= 2.2 * row.least
        assert row.metadata == int(row.blocks * bytes_of_block())


def test_instances_keep_padding_and_metadata_as_they_are():
    inside = scale_row(SHAPE, Configuration(512))
    far = scale_row(SHAPE, Configuration(16384, instances=32))
    same = ("padding", "shard_numel", "blocks", "gathers", "reductions")
    assert all(getattr(far, name) == getattr(inside, name) for name in same)
    assert far.once == 11 and far.groups == inside.groups + 1


def test_recomputing_or_batches_change_no_layout():
    plain = scale_row(SHAPE, Configuration(64))
    other = scale_row(SHAPE, replace(Configuration(64), microbatch=2))
    assert (other.padding, other.blocks) == (plain.padding, plain.blocks)


def test_the_command_has_a_row_for_each_number_of_ranks(capsys):
    status = command.main(["--preset", "llama3-8b", "--num-layers", "6", "--scale", "8,1024"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0 and len(lines) == 4  # 1,024 ranks also in instances of 512
