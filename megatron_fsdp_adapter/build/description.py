"""A table of parameters and the ranks over which each is sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..core.engine.engine import FsdpEngine
from ..core.engine.params import ParamPair
from ..core.topology import ShardDomain

MAX_RANKS = 8
"""Longer lists of ranks are abbreviated."""

DescribedRow = dict[str, str]
"""The cells of a row, by the titles of their columns."""


def param_rows(engine: FsdpEngine) -> list[DescribedRow]:
    """A row for each parameter of `engine`, in unit order: its names, domain, unit, whole shape,
    tensor-parallel mode, shape on this rank, dtype, and if it is trained."""
    units = {id(group): unit.name for unit in engine.units for group in unit.groups}
    return [_param_row(pair, units[id(pair.group)]) for pair in engine.pairs]


def _param_row(pair: ParamPair, unit: str) -> DescribedRow:
    key = pair.group.key
    held = pair.sharded._local_tensor.shape  # type: ignore[attr-defined]
    return {
        "parameter": " = ".join(pair.managed.fqns),
        "domain": key.domain,
        "unit": unit,
        "shape": "x".join(map(str, pair.sharded.shape)),
        "tensor parallel": getattr(pair.unsharded, "_tensor_parallel_mode", "replicated"),
        "on this rank": "x".join(map(str, held)) if all(held) else "none",
        "dtype": key.represented,
        "trained": "yes" if key.requires_grad else "frozen",
    }


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks, or the first and the last of a long list."""
    if len(ranks) <= MAX_RANKS:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} .. {ranks[-1]} ({len(ranks)})"


def _domain_row(name: str, domain: ShardDomain, params: int, elements: int) -> DescribedRow:
    sizes = domain.mesh.shape
    mesh = zip(domain.mesh.mesh_dim_names or ("?",) * len(sizes), sizes, strict=True)
    is_shared = domain.gather_group is domain.reduce_group
    outer = "-" if domain.outer is None else ranks_text(domain.outer.ranks)
    return {
        "domain": name,
        "shards on ranks": ranks_text(domain.axis.ranks),
        "gather group": "shared" if is_shared else "own",
        "outer ranks": outer,
        "mesh": " x ".join(f"{dim} {size}" for dim, size in mesh),
        "gradient x": f"{domain.grad_scale:g}",
        "parameters": str(params),
        "elements": f"{elements:,}",
    }


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first row has the titles. Columns with numbers are aligned to the
    right, others to the left."""
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        has_numbers = any(cell[:1].isdigit() for cell in column[1:])
        justify = str.rjust if has_numbers else str.ljust
        columns.append([justify(cell, width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def _table(rows: Sequence[DescribedRow]) -> list[str]:
    lines = [tuple(row) for row in rows[:1]]
    for row in rows:
        lines.append(tuple(row.values()))
    return aligned(lines)


def describe(engine: FsdpEngine) -> str:
    """Two tables as text.

    - The domains in use: ranks of the shards, communicator of the gathers (shared or own), outer
      ranks, mesh, factor on the sum of gradients, number of parameters and elements.
    - Every parameter: the columns of `param_rows`."""
    rows = param_rows(engine)
    params = Counter(row["domain"] for row in rows)
    elements: Counter[str] = Counter()
    domains = {}
    for group in engine.groups:
        name = group.key.domain
        domains[name] = group.domain
        elements[name] += group.layout.item_numel
    domain_rows = [
        _domain_row(name, domains[name], params[name], elements[name]) for name in domains
    ]
    strategy = engine.config.strategies_named
    return "\n".join([f"strategy {strategy}", "", *_table(domain_rows), "", *_table(rows)])
