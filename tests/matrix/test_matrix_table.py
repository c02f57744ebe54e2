"""The matrix's table, its rules and its covering arrays, without any training."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from megatron_fsdp_adapter.megatron.options.support import FP8_RECIPES
from tests.matrix import cells
from tests.matrix.__main__ import main
from tests.matrix.bounds import bounds_of
from tests.matrix.cover import Space, covered
from tests.matrix.model import width_of
from tests.matrix.table import (
    ARRAYS,
    DIMENSIONS,
    MEANING,
    REFERENCE,
    RULES,
    Rule,
    cell_named,
    name_of,
    problems,
)

OUTDATED = "run `python -m tests.matrix generate`"


@pytest.mark.parametrize("array", ARRAYS)
def test_cached_cells_are_possible_and_all_different(array: str) -> None:
    rows = cells.cached(array)
    assert problems(rows) == [], OUTDATED
    assert len({name_of(row) for row in rows}) == len(rows)
    for row in rows:
        assert {name: row[name] for name in ARRAYS[array]} == dict(ARRAYS[array])


@pytest.mark.parametrize("array", ARRAYS)
def test_cached_cells_have_every_possible_pair(array: str) -> None:
    space = cells.space(array)
    missing = set(space.possible_pairs) - covered(cells.cached(array), space)
    assert not missing, OUTDATED


def test_cached_cells_are_what_the_table_yields() -> None:
    made = {name: [name_of(row) for row in rows] for name, rows in cells.computed().items()}
    assert json.loads(cells.FILE.read_text()) == made, OUTDATED


def _reversed(rule: Rule) -> Rule:
    broken = functools.wraps(rule.broken)(lambda *values: not rule.broken(*values))
    return Rule(f"not {rule.name}", rule.reason, broken)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_excludes_what_no_other_does(rule: Rule) -> None:
    if rule.name == "refused: FP8 recipe" and "blockwise" in FP8_RECIPES:
        return  # all recipes of the table are accepted
    others = [other for other in RULES if other is not rule]
    assert any(
        Space(DIMENSIONS, [*others, _reversed(rule)], fixed).complete({}) is not None
        for fixed in ({"target": "cpu"}, {"target": "gpu"})
    )


def test_rules_have_names_of_their_own_and_read_what_there_is() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert {name for rule in RULES for name in rule.reads} <= set(DIMENSIONS)
    assert set(MEANING) == set(DIMENSIONS) and set(REFERENCE) <= set(DIMENSIONS)


def test_recipes_that_are_accepted_are_in_the_table() -> None:
    """MXFP8 is for GPUs that no cell has run on."""
    recipes = [recipe for recipe in FP8_RECIPES if recipe != "mxfp8"]
    there = {f"{kind}_{recipe}" for recipe in recipes for kind in ("fp8", "fp8w")}
    assert there <= set(DIMENSIONS["precision"])


@pytest.mark.parametrize(
    ("name", "exact"),
    (
        ("gpu precision=fp8w_delayed layers=te", True),
        ("gpu strategy=optim precision=fp8w_blockwise microbatches=3 layers=te", True),
        ("gpu precision=fp8w_delayed microbatches=3 layers=te", False),
        ("gpu precision=fp8_delayed layers=te", False),
        ("gpu precision=fp8w_delayed fusion=on layers=te", False),
        ("gpu precision=fp8w_delayed layers=te tp=2", False),
    ),
)
def test_fp8_weights_are_to_give_the_references_bits_where_sums_have_one_order(
    name: str, exact: bool
) -> None:
    bounds = bounds_of(cell_named(name))
    assert (bounds.gradient == bounds.loss == 0.0) is exact
    assert bounds.later > 0 and bounds.movement > 0


@pytest.mark.parametrize("width", ("small", "real"))
def test_blocks_divide_the_weights_of_blockwise_cells(width: str) -> None:
    """Also those that two tensor-parallel ranks split, whose qkv has 3 parts of each head."""
    cell = cell_named("gpu precision=fp8w_blockwise layers=mla")
    sizes, latent = width_of(cell, width).sizes, width_of(cell, width).latent
    query, key_value, key, positions, value = latent
    split = (
        sizes["ffn"], sizes["hidden"], sizes["heads"] * (key + positions),
        sizes["heads"] * (key + value), 3 * sizes["hidden"],
    )  # fmt: skip
    assert [size for size in split if size % 256] == []
    assert [size for size in (query, key_value, key_value + positions) if size % 128] == []


@pytest.mark.parametrize("array", ARRAYS)
def test_a_name_tells_its_cell(array: str) -> None:
    for cell in cells.cached(array):
        assert cell_named(name_of(cell)) == cell


def test_a_name_that_tells_no_cell_is_an_error() -> None:
    for name in ("cpu tp=3", "cpu nonsense=1", "cpu tp"):
        with pytest.raises(ValueError, match="not a dimension and value"):
            cell_named(name)


def test_the_document_has_the_tables_of_today(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m tests.matrix count` prints them."""
    assert main(["count"]) == 0
    document = (Path(__file__).parents[2] / "docs" / "matrix.md").read_text()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) > len(DIMENSIONS) + len(RULES) + len(ARRAYS)
    assert [line for line in lines if line not in document] == []
