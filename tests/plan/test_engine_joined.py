"""Which layers are grouped into one unit, and how many where nothing says so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_fsdp_adapter.core.engine.partition import (
    ROOT,
    managed_params,
    partition,
    unit_modules,
)
from megatron_fsdp_adapter.plan.unit_grouping import (
    JOINED_NUMEL,
    default_unit_numel,
    group_layers,
    layer_numels,
)

CHECKS = ("plan/unit_grouping.py",)


def squares(*widths: int) -> list[nn.Module]:
    return [nn.Linear(width, width, bias=False) for width in widths]


def lists(*widths: tuple[int, ...]) -> nn.Module:
    """A list of square layers of each width, for each of the tuples; behind an embedding."""
    model = nn.Module()
    model.embedding, model.output_layer = nn.Embedding(5, 2), nn.Linear(2, 5)
    for number, layers in enumerate(widths):
        setattr(model, f"list{number}", nn.ModuleList(squares(*layers)))
    return model


def plans_of(model: nn.Module) -> Any:
    kinds = (nn.Linear, nn.Embedding, nn.LayerNorm, Pair)
    units = unit_modules(model, lambda child: isinstance(child, kinds))
    return partition(units, managed_params(model, units))


class Pair(nn.Sequential):
    """A unit with units inside."""


SEQUENCE = nn.Sequential(nn.Embedding(5, 2), *squares(*[2] * 5), nn.LayerNorm(2), *squares(2))
NESTED = nn.Sequential(Pair(*squares(2, 2)), *squares(2, 2))
GROUPED = {
    "none": (SEQUENCE, 0, ["0", "1", "2", "3", "4", "5", "6", "7"]),
    "one layer has as many elements": (SEQUENCE, 4, ["0", "1", "2", "3", "4", "5", "6", "7"]),
    "until a unit has the elements": (SEQUENCE, 5, ["0", "1 to 2", "3 to 4", "5", "6", "7"]),
    "three, and what is left": (SEQUENCE, 12, ["0", "1 to 3", "4 to 5", "6", "7"]),
    "all that are alike in a row": (SEQUENCE, 1000, ["0", "1 to 5", "6", "7"]),
    "what is inside another unit is not": (NESTED, 100, ["0.0", "0.1", "1 to 2"]),
    # Of two towers, or the last layer and one that predicts further tokens.
    "layers of two lists are not, as other modules run in between": (
        lists((2, 2, 2), (2, 2)), 1000,
        ["embedding", "output_layer", "list0.0 to list0.2", "list1.0 to list1.1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPED)
def test_which_layers_are_grouped(name):
    model, numel, units = GROUPED[name]
    assert [plan.name for plan in group_layers(plans_of(model), numel)] == [*units, ROOT]


def test_layers_are_counted_where_a_list_has_several():
    assert layer_numels(plans_of(lists((2, 3, 4), (5,)))) == [4, 9, 16]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 300_000_000), max_size=80)
    | st.tuples(st.integers(1, 300_000_000), st.integers(1, 200)).map(lambda of: [of[0]] * of[1])
)
def test_what_is_joined_by_default(numels: list[int]):
    numel = default_unit_numel(numels)
    assert 0 <= numel <= JOINED_NUMEL
    units: list[list[int]] = []
    for layer in numels:
        if units and sum(units[-1]) < numel:
            units[-1].append(layer)
        else:
            units.append([layer])
    if numel == 0:
        assert units == [[layer] for layer in numels]
        alike = len({*numels}) == 1 and len(numels) >= 16
        assert not alike or numels[0] >= JOINED_NUMEL
        return
    assert len(numels) >= 16
    assert max(numels) < numel
    assert len(units) >= 8
    assert max(map(sum, units)) <= min(2 * JOINED_NUMEL, sum(numels) / 8)
    assert all(sum(unit) >= numel for unit in units[:-1])


@pytest.mark.parametrize(
    ("count", "layer", "by"),
    ((15, 60_000_000, 1), (16, 60_821_504, 2), (24, 12_596_224, 2), (32, 218_112_000, 1),
     (80, 45_000_000, 3), (40, 60_000_000, 2), (17, 99_999_999, 2), (17, 100_000_000, 1)),
)  # fmt: skip
def test_how_many_layers_of_known_models_are_joined(count: int, layer: int, by: int):
    assert max(1, -(-default_unit_numel([layer] * count) // layer)) == by
