"""Tables of docs/flags.md, docs/refused*.md and docs/matrix.md, made of the tables of the code:
`python -m tests.lib.megatron.option_pages` writes them between their marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from megatron_fsdp_adapter.megatron.options.cuda_graphs import GRAPH_RULES
from megatron_fsdp_adapter.megatron.options.settings import SETTINGS
from megatron_fsdp_adapter.megatron.options.support import (
    MODEL_CONFIG_RULES,
    OPTIMIZER_CONFIG_RULES,
    SCHEDULE_RULES,
)
from megatron_fsdp_adapter.megatron.options.table import DDP_CONFIG_RULES, DTYPES, OPTIONS, Option
from megatron_fsdp_adapter.megatron.options.validation import BRIDGE_RULES, LAUNCH_RULES
from tests.lib.matrix import cells, table
from tests.lib.matrix.cover import covered

DOCS = Path(__file__).parents[3] / "docs"
RULES = {
    "DDP config": DDP_CONFIG_RULES,
    "model config": (*MODEL_CONFIG_RULES, *SCHEDULE_RULES),
    "CUDA graphs": GRAPH_RULES,
    "optimizer config": OPTIMIZER_CONFIG_RULES,
    "Megatron-LM": LAUNCH_RULES,
    "Megatron-Bridge": BRIDGE_RULES,
}


OF_CONFIGS = ("DDP config", "model config")
"""The kinds of rules on docs/refused.md."""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join([_row(*head), _row(*["---"] * len(head)), *(_row(*row) for row in rows)])


def _default(option: Option) -> str:
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    if isinstance(option.default, torch.dtype):
        return next(name for name, value in DTYPES.items() if value == option.default)
    return {None: "unset", (): "none"}.get(option.default, str(option.default))


def options() -> str:
    """Flags and fields that megatron-core 0.16.1, or some Megatron-LM, lacks."""
    return _table(
        ("flag", "field of the DDP config", "`fully_shard_model`", "default", "effect", "use"),
        (
            (f"`{one.flag}`" if one.help else "-", f"`{one.name}`",
             f"`{one.plain}`" if one.plain else "-", _default(one), one.help or "-",
             one.use or "accepted, without effect")
            for one in OPTIONS if one.help or not one.in_core
        ),
    )  # fmt: skip


def settings() -> str:
    """A row for each option that follows from others."""
    return _table(
        ("option", "value", "set by", "reason"),
        (
            (f"`{one.section}.{one.option}`", str(one.value), ", ".join(one.ways), one.reason)
            for one in SETTINGS
        ),
    )


def refused(*kinds: str) -> str:
    """A row for each rule of some kinds."""
    return _table(
        ("option", "config or program", "refused with", "reason, and remedy"),
        (
            (
                f"`{rule.option}`",
                kind,
                re.sub(r"=\{[^}]*\}", "", rule.beside).replace("{0.device}", "the CPU") or "-",
                rule.message,
            )
            for kind in kinds
            for rule in RULES[kind]
        ),
    )


def dimensions() -> str:
    """A row for each dimension of the matrix."""
    return _table(
        ("dimension", "values", "meaning"),
        (
            (name, ", ".join(map(str, values)), table.MEANING[name])
            for name, values in table.DIMENSIONS.items()
        ),
    )


def arrays() -> str:
    """How many pairs of values and cells each array of the matrix has."""
    spaces = {array: (cells.space(array), cells.cached(array)) for array in table.ARRAYS}
    counts = {
        array: (
            len(space.all_pairs),
            len(space.possible_pairs),
            len(covered(rows, space) & set(space.possible_pairs)),
            len(space.all_pairs) - len(space.possible_pairs),
            len(rows),
        )
        for array, (space, rows) in spaces.items()
    }
    head = ("array", "pairs of values", "possible pairs", "pairs in cells", "excluded pairs")
    return _table(
        (*head, "cells"), ((f"`{array}`", *map(str, row)) for array, row in counts.items())
    )


def rules() -> str:
    """A row for each rule that excludes cells of the matrix."""
    return _table(("rule", "why"), ((rule.name, rule.reason) for rule in table.RULES))


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "flags.md": {"options": options, "settings": settings},
    "matrix.md": {"dimensions": dimensions, "arrays": arrays, "rules": rules},
    "refused.md": {"refused": lambda: refused(*OF_CONFIGS)},
    "refused_programs.md": {"refused": lambda: refused(*(k for k in RULES if k not in OF_CONFIGS))},
}


def rendered(page: str) -> str:
    """The page with its tables as the code has them. ValueError for a mark that is not there."""
    text = (DOCS / page).read_text()
    for name, made in PAGES[page].items():
        start = f"<!-- {name} -->\n"
        end = f"<!-- end of {name} -->"
        first = text.index(start) + len(start)
        last = text.index(end)
        text = f"{text[:first]}{made()}\n{text[last:]}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(rendered(page))
