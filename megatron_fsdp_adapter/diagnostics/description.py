"""Which parameter is sharded over which ranks: a table for a person to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.engine.engine import FsdpEngine
from ..core.engine.identity import ParamPair
from ..core.topology import ShardDomain

MAX_RANKS = 8
"""Longer lists of ranks are abbreviated."""

DOMAIN_HEAD = (
    "domain", "shards on ranks", "gather group", "outer ranks", "mesh", "gradient x", "parameters",
    "elements",
)  # fmt: skip
PARAM_HEAD = (
    "parameter", "domain", "unit", "shape", "tensor parallel", "on this rank", "dtype", "trained",
)  # fmt: skip


@dataclass(frozen=True)
class ParamRow:
    """One parameter: its names, unit, domain, whole shape, and the rows of it on this rank."""

    name: str
    unit: str
    domain: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    tensor_parallel: str
    dtype: str
    trained: bool

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            self.domain,
            self.unit,
            "x".join(map(str, self.shape)),
            self.tensor_parallel,
            "x".join(map(str, self.local_shape)) if all(self.local_shape) else "none",
            self.dtype,
            "yes" if self.trained else "frozen",
        )


def _row(pair: ParamPair, unit: str) -> ParamRow:
    return ParamRow(
        name=" = ".join(pair.managed.fqns),
        unit=unit,
        domain=pair.group.key.domain,
        shape=tuple(pair.sharded.shape),
        local_shape=tuple(pair.sharded._local_tensor.shape),  # type: ignore[attr-defined]
        tensor_parallel=getattr(pair.unsharded, "_tensor_parallel_mode", "replicated"),
        dtype=pair.group.key.represented,
        trained=pair.group.key.requires_grad,
    )


def param_rows(engine: FsdpEngine) -> list[ParamRow]:
    """Every parameter of `engine`, each once, in unit order."""
    units = {id(group): unit.name for unit in engine.units for group in unit.groups}
    return [_row(pair, units[id(pair.group)]) for pair in engine.pairs]


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks, or the first and the last of a long list."""
    if len(ranks) <= MAX_RANKS:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} .. {ranks[-1]} ({len(ranks)})"


def _domain_cells(
    name: str, domain: ShardDomain, rows: Sequence[ParamRow], elements: int
) -> tuple[str, ...]:
    return (
        name,
        ranks_text(domain.axis.ranks),
        "own" if domain.gather_group is not domain.reduce_group else "shared",
        "-" if domain.outer is None else ranks_text(domain.outer.ranks),
        " x ".join(
            f"{dim} {size}"
            for dim, size in zip(
                domain.mesh.mesh_dim_names or (), domain.mesh.shape, strict=True
            )
        ),
        f"{domain.grad_scale:g}",
        str(len(rows)),
        f"{elements:,}",
    )


def _aligned(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
            for row in table]


def describe(engine: FsdpEngine) -> str:
    """Two tables: the domains in use (ranks of the shards, whether gathers have a communicator of
    their own, the outer ranks, the mesh, the factor on the sum of gradients, what is in them), and
    every parameter with its domain, unit, whole shape and the part on this rank."""
    rows = param_rows(engine)
    domains = {group.key.domain: group.domain for group in engine.groups}
    sizes = dict.fromkeys(domains, 0)
    for group in engine.groups:
        sizes[group.key.domain] += group.layout.item_numel
    domain_rows = (
        _domain_cells(name, domain, [row for row in rows if row.domain == name], sizes[name])
        for name, domain in domains.items()
    )
    lines = [f"strategy {engine.config.strategy.name}", "", *_aligned(DOMAIN_HEAD, domain_rows), ""]
    return "\n".join([*lines, *_aligned(PARAM_HEAD, (row.cells for row in rows))])
