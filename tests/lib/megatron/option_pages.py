"""Tables of docs/options.md, support.md and contributing/matrix.md, made of the tables of the code
and of contributing/features.md and fields.md. `python -m tests.lib.megatron.option_pages` writes
them between their marks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from megatron_fsdp_adapter.megatron.optimizer import group_options
from megatron_fsdp_adapter.megatron.options.checkpoint_flags import CHECKPOINT_FLAGS
from megatron_fsdp_adapter.megatron.options.cuda_graphs import GRAPH_RULES
from megatron_fsdp_adapter.megatron.options.option import DTYPES, Option
from megatron_fsdp_adapter.megatron.options.settings import SETTINGS
from megatron_fsdp_adapter.megatron.options.support import (
    MODEL_CONFIG_RULES,
    OPTIMIZER_CONFIG_RULES,
    SCHEDULE_RULES,
)
from megatron_fsdp_adapter.megatron.options.table import DDP_CONFIG_RULES, OPTIONS
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
KINDS = {
    "DDP config": "Config of the wrapper (DDP config)",
    "model config": "Config of the model",
    "optimizer config": "Config of the optimizer",
}
"""Kind of a rule -> title of its section, if it is another."""


def _row(*cells: str) -> str:
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [_row(*head), _row(*["---"] * len(head))]
    for row in rows:
        lines.append(_row(*row))
    return "\n".join(lines)


def _default(option: Option) -> str:
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    if isinstance(option.default, torch.dtype):
        return next(name for name, value in DTYPES.items() if value == option.default)
    if option.default is None:
        return "unset"
    if option.default == ():
        return "none"
    return str(option.default)


def options() -> str:
    """Flags and fields that megatron-core 0.16.1, or some Megatron-LM, lacks. The page lists those
    without effect in a section of their own."""
    rows = []
    for one in OPTIONS:
        if not one.help and (one.in_core or not one.use):
            continue
        flag = f"`{one.flag}`" if one.help else "-"
        argument = f"`{one.plain}`" if one.plain else "-"
        use = one.use or "accepted, without effect"
        rows.append((flag, f"`{one.name}`", argument, _default(one), one.help or "-", use))
    head = ("flag", "field of the DDP config", "`fully_shard_model`", "default", "effect", "use")
    return _table(head, rows)


def settings() -> str:
    """A row for each option that follows from others."""
    rows = []
    for one in SETTINGS:
        option = f"`{one.section}.{one.option}`"
        rows.append((option, str(one.value), ", ".join(one.ways), one.reason))
    return _table(("option", "value", "set by", "reason"), rows)


def refused() -> str:
    """A row for each rule, in a section for each kind."""
    texts = []
    for kind, rules in RULES.items():
        rows = []
        for rule in rules:
            beside = re.sub(r"=\{[^}]*\}", "", rule.beside)
            beside = beside.replace("{0.device}", "the CPU")
            rows.append((f"`{rule.option}`", beside or "-", rule.message))
        table = _table(("option", "refused with", "reason, and remedy"), rows)
        texts.append(f"### {KINDS.get(kind, kind)}\n\n{table}\n")
    return "\n".join(texts)


def checkpoint_flags() -> str:
    """A row for each flag of checkpoints."""
    rows = []
    for one in CHECKPOINT_FLAGS:
        told = [one.effect] if one.effect else []
        for rule in one.rules:
            told.append(f"refused: {rule.message}" if one.effect else rule.message)
        rows.append((", ".join(f"`{flag}`" for flag in one.flags), one.state, "; ".join(told)))
    return _table(("flag", "state", "effect, or reason and remedy"), rows)


def dimensions() -> str:
    """A row for each dimension of the matrix."""
    rows = []
    for name, values in table.DIMENSIONS.items():
        rows.append((name, ", ".join(map(str, values)), table.MEANING[name]))
    return _table(("dimension", "values", "meaning"), rows)


def arrays() -> str:
    """How many pairs of values and cells each array of the matrix has."""
    rows = []
    for array in table.ARRAYS:
        space = cells.space(array)
        cached = cells.cached(array)
        pairs = len(space.all_pairs)
        possible = len(space.possible_pairs)
        reached = len(covered(cached, space) & set(space.possible_pairs))
        counts = (pairs, possible, reached, pairs - possible, len(cached))
        rows.append((f"`{array}`", *map(str, counts)))
    head = ("array", "pairs of values", "possible pairs", "pairs in cells", "excluded pairs")
    return _table((*head, "cells"), rows)


def rules() -> str:
    """A row for each rule that excludes cells of the matrix."""
    return _table(("rule", "why"), ((rule.name, rule.reason) for rule in table.RULES))


ORIGINS = {
    # origin -> a resumed run's value with no flag, with the override, with the checkpoint's
    group_options.RUN: ("run", "run", "run"),
    group_options.CHECKPOINT: ("checkpoint", "checkpoint", "checkpoint"),
    group_options.APART: ("compared", "compared", "compared"),
    group_options.BOUND: ("compared", "run", "checkpoint"),
    group_options.EQUAL: ("must be equal", "run", "checkpoint"),
}


def _origins(options: Iterable[group_options.Origin]) -> list[tuple[str, ...]]:
    rows = []
    for one in options:
        if not one.flags and one.source in (group_options.RUN, group_options.CHECKPOINT):
            continue  # the page says in a sentence where they come from
        flags = ", ".join(f"`{flag}`" for flag in one.flags)
        rows.append((f"`{one.name}`", one.meaning, flags or "-", *ORIGINS[one.source]))
    return rows


def group_origins() -> str:
    """A row for each option of a parameter group: where a resumed run takes it from."""
    head = ("option", "meaning", "set by", "neither", "override", "use checkpoint")
    return _table(head, _origins(group_options.GROUP_OPTIONS))


def schedule_origins() -> str:
    """A row for each value of core's scheduler. The page says in a sentence where they come from:
    saved values are `EQUAL`, others the run's."""
    rows = _origins(group_options.SCHEDULE_OPTIONS)
    return _table(("option", "meaning", "set by"), (row[:3] for row in rows))


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """The rows of each section of a page for contributors, by the section's title."""
    found: dict[str, list[list[str]]] = {}
    for section in (DOCS / "contributing" / page).read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
        found[title] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return found


def _of_users(cell: str) -> str:
    """A cell with its links as they are in docs/."""
    return cell.replace("](../", "](")


def works() -> str:
    """The features of contributing/features.md, without tests, and without those that the table of
    refusals has."""
    texts = []
    for title, features in tables_of("features.md").items():
        rows = []
        for feature, state, page, _ in features:
            if page == "works":
                rows.append((_of_users(feature), _of_users(state)))
        texts.append(f"## {title}\n\n{_markdown(('feature', 'state'), rows)}\n")
    return "\n".join(texts)


def config_fields() -> str:
    """The fields of contributing/fields.md that work, without tests. The page has those of the DDP
    config in its first tables, and refusals are in another."""
    texts = []
    for title, fields in tables_of("fields.md").items():
        if title in ("TransformerConfig", "OptimizerConfig"):
            rows = [tuple(map(_of_users, row[1:3])) for row in fields if row[0] == "works"]
            head = ("fields", "effect")
            texts.append(f"### {title}\n\n{_markdown(head, rows)}\n")
    return "\n".join(texts)


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "options.md": {
        "options": options,
        "settings": settings,
        "flags": checkpoint_flags,
        "groups": group_origins,
        "schedule": schedule_origins,
        "fields": config_fields,
    },
    "support.md": {"works": works, "refused": refused},
    "contributing/matrix.md": {"dimensions": dimensions, "arrays": arrays, "rules": rules},
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
        made = rendered(page)
        state = "as it was" if made == (DOCS / page).read_text() else "written"
        (DOCS / page).write_text(made)
        print(f"docs/{page}: {state}", file=sys.stderr)
