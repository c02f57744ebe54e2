"""The matrix's rules and covering arrays, without any training."""

from __future__ import annotations

import functools
import itertools
import json

import pytest

from megatron_fsdp_adapter.megatron.options.support import FP8_RECIPES
from tests.lib.matrix import cells
from tests.lib.matrix.cover import Space
from tests.lib.matrix.table import (
    ARRAYS,
    DIMENSIONS,
    MEANING,
    REFERENCE,
    RULES,
    TRIPLES,
    Rule,
    cell_named,
)

CHECKS = ("megatron/options/support.py",)


def test_cells_have_every_possible_pair_and_no_other() -> None:
    """Each name is that of its cell."""
    outdated = "run `python -m tests.lib.matrix.cells`"
    assert json.loads(cells.FILE.read_text()) == cells.computed(), outdated


def test_triples_of_graphs_and_what_stays_unsharded_are_in_cells() -> None:
    """Checked one by one, and not by what finds the cells."""
    assert set(TRIPLES) <= set(ARRAYS)
    for array, wanted in TRIPLES.items():
        there = [cell_named(name) for name in cells.names(array)]
        missing = []
        for names in itertools.combinations(wanted, 3):
            for values in itertools.product(*(wanted[name] for name in names)):
                triple = dict(zip(names, values, strict=True))
                if not any(triple.items() <= cell.items() for cell in there):
                    missing.append(triple)
        # An iteration is captured before a budget is found.
        assert all((one.get("graph"), one.get("kept")) == ("on", "found") for one in missing)
        assert missing


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
    assert set(MEANING) == set(DIMENSIONS)
    assert set(REFERENCE) <= set(DIMENSIONS)


def test_recipes_that_are_accepted_are_in_the_table() -> None:
    """MXFP8 is for GPUs that no cell has run on."""
    recipes = [recipe for recipe in FP8_RECIPES if recipe != "mxfp8"]
    there = {f"{kind}_{recipe}" for recipe in recipes for kind in ("fp8", "fp8w")}
    assert there <= set(DIMENSIONS["precision"])
