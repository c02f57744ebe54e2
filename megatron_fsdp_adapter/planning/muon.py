"""Muon's matrices in a plan: whole, over the ranks that own them, with the real assignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from megatron_fsdp_adapter.cli.gpt import whole_shape
from megatron_fsdp_adapter.cli.precision_options import is_matrix_of_muon
from megatron_fsdp_adapter.sharding.muon.newton_schulz import cost
from megatron_fsdp_adapter.sharding.muon.owners import assign, loads

from .shapes import DENSE, EXPERT, Parallel, Shape, listing

Matrix = tuple[int, int]
"""Rows and columns."""


@dataclass(frozen=True)
class MuonWork:
    """What Muon has to do on a stage's ranks.

    ranks: by domain, how many exchange matrices: those of its shards, and of tensor parallelism.
    most: the part of all operations that the rank of them with most has, with every layer of the
    stage counted. sends_rows: whether a rank lacks any.
    """

    shape: Shape
    tensor: int
    ranks: Mapping[str, int]
    most: Mapping[str, float]
    sends_rows: bool = True

    def matrices(self, name: str, part: tuple[int, ...]) -> tuple[Matrix, ...]:
        """Those of a weight of which a rank has `part`; none if it is Adam's."""
        return matrices_of(self.shape, self.tensor, name, part)


def matrices_of(
    shape: Shape, tensor: int, name: str, part: tuple[int, ...]
) -> tuple[Matrix, ...]:
    """The matrices of a weight, whole over `tensor` ranks: queries, keys and values apart, and gate
    and up; none of what is Adam's."""
    if not is_matrix_of_muon(name, part):
        return ()
    rows, columns = whole_shape(name, part, tensor)
    if "linear_qkv" in name:
        keys = shape.gpt.query_groups * shape.gpt.head_dim
        return (rows - 2 * keys, columns), (keys, columns), (keys, columns)
    if "linear_fc1" in name and shape.gpt.swiglu:
        return ((rows // 2, columns),) * 2
    return ((rows, columns),)


@lru_cache(maxsize=512)
def muon_work(
    shape: Shape, split: Parallel, stage: int, dense: int, experts: int, shards_main: bool
) -> MuonWork:
    """Of a stage whose weights are shared by so many ranks of the dense and the expert domain."""
    ranks = {DENSE: dense * split.tensor, EXPERT: experts}
    costs: dict[str, list[int]] = {DENSE: [], EXPERT: []}
    for _, name, part, domain in listing(shape, split, stage):
        costs[domain] += [cost(*one) for one in matrices_of(shape, split.tensor, name, part)]
    most = {
        domain: max(loads(each, assign(each, ranks[domain]), ranks[domain])) / (sum(each) or 1)
        for domain, each in costs.items()
    }
    return MuonWork(shape, split.tensor, ranks, most, shards_main)
