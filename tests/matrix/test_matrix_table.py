"""The matrix's rules, covering arrays and bounds, without any training."""

from __future__ import annotations

import functools
import json

import pytest

from megatron_fsdp_adapter.megatron.options.support import FP8_RECIPES
from tests.matrix import cells
from tests.matrix.bounds import bounds_of
from tests.matrix.cover import Space
from tests.matrix.table import DIMENSIONS, MEANING, REFERENCE, RULES, Rule, cell_named


def test_cells_have_every_possible_pair_and_no_other() -> None:
    """Each name is that of its cell."""
    outdated = "run `python -m tests.matrix.cells`"
    assert json.loads(cells.FILE.read_text()) == cells.computed(), outdated


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


def test_a_name_that_tells_no_cell_is_an_error() -> None:
    for name in ("cpu tp=3", "cpu nonsense=1", "cpu tp"):
        with pytest.raises(ValueError, match="not a dimension and value"):
            cell_named(name)
