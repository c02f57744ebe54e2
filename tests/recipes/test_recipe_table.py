"""The table of recipes says what the rules of today say of the options that it records, and
docs/recipes.md is made of it. Needs none of the sources: `test_recipe_sources.py` reads those."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.megatron.options.ddp_options import DDP_CONFIG_RULES
from megatron_fsdp_adapter.megatron.options.support import (
    MODEL_CONFIG_RULES,
    OPTIMIZER_CONFIG_RULES,
    problems,
)
from megatron_fsdp_adapter.megatron.options.validation import (
    BRIDGE_RULES,
    LAUNCH_RULES,
    PLAIN_OPTIONS,
    launch_options,
)
from tests.recipes import classify, table

ROWS = table.read()
RULES = (*DDP_CONFIG_RULES, *MODEL_CONFIG_RULES, *OPTIMIZER_CONFIG_RULES)
OF_A_LAUNCH = {
    rule.option.split(".")[-1]: rule.message for rule in (*BRIDGE_RULES, *LAUNCH_RULES)
}  # of options that the table records, and that the wrapper itself never sees


def identity(row: Any) -> str:
    return f"{row['source']}: {row['name']}"


def of_wrapper(row: table.Row) -> dict[str, str]:
    """What the wrapper's own rules refuse of the options that the row records."""
    on = {name: _value(value) for name, value in row["on"].items()}
    options = launch_options(SimpleNamespace(**{**PLAIN_OPTIONS, "num_experts": None, **on}))
    return classify.by_option(problems(options, RULES))


def _value(value: Any) -> Any:
    return getattr(torch, value) if value in ("float32", "bfloat16", "float16") else value


@pytest.mark.parametrize("row", ROWS, ids=identity)
def test_rules_of_today_say_what_the_row_says(row: table.Row) -> None:
    """No option that a rule refuses is missing, and none is left whose rule has gone or says
    something else."""
    if row["class"] == "other wrapper":
        assert not row["refused"] and row["on"] == {"use_torch_fsdp2": True}
        return
    found = of_wrapper(row)
    assert {option: row["refused"].get(option) for option in found} == found
    for option in row["refused"].keys() - found.keys():
        assert row["refused"][option] == OF_A_LAUNCH[option]
    assert row["refused"].keys() <= row["on"].keys()


@pytest.mark.parametrize("row", ROWS, ids=identity)
def test_class_follows_from_what_the_row_says(row: table.Row) -> None:
    assert row["class"] in table.CLASSES
    recipes = [row["on"].get(f"{name}_recipe") for name in ("fp8", "fp4") if name in row["on"]]
    lacking = [classify.HOPPER_LACKS[one] for one in recipes if one in classify.HOPPER_LACKS]
    assert row["waits"] == lacking
    if row["class"] != "other wrapper":
        made = classify.result(row["name"], row["source"], {}, row["refused"], row["waits"])
        assert row["class"] == made["class"]


def test_every_recipe_is_listed_once_and_in_order() -> None:
    places = [(row["source"], row["name"]) for row in ROWS]
    assert places == sorted(set(places))


def test_docs_are_made_of_the_table() -> None:
    assert table.DOCS.read_text() == table.rendered(ROWS), "python -m tests.recipes.table"


def test_a_source_that_is_computed_anew_replaces_its_rows_alone() -> None:
    new = [{**copy.deepcopy(ROWS[0]), "name": "another"}]
    merged = table.merged(ROWS, new)
    others = [row for row in ROWS if row["source"] != ROWS[0]["source"]]
    assert len(others) < len(ROWS) and [r for r in merged if r not in new] == others
    assert [row["name"] for row in merged if row in new] == ["another"]


def test_kinds_are_recorded_and_what_is_off_is_not() -> None:
    """Sizes of one are off, switches of True are not, though they are equal; an option that says
    nothing while another is off is left out."""
    config = SimpleNamespace(
        tensor_model_parallel_size=1, context_parallel_size=2, sequence_parallel=True,
        num_moe_experts=8, expert_model_parallel_size=4, fp8=None, fp8_recipe="delayed",
        moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend="deepep",
        megatron_fsdp_grad_comm_dtype=torch.bfloat16, check_for_large_grads=True,
    )  # fmt: skip
    assert classify.turned_on(["check_for_large_grads"], config) == {
        "megatron_fsdp_grad_comm_dtype": "bfloat16", "num_moe_experts": True,
        "sequence_parallel": True, "context_parallel_size": 2, "expert_model_parallel_size": 4,
        "moe_token_dispatcher_type": "alltoall", "check_for_large_grads": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "waits"),
    ((None, []), ("tensorwise", []), ("mxfp8", ["MXFP8 matrix products: compute capability 10.0"])),
)
def test_what_hopper_lacks_is_waited_for(recipe: str | None, waits: list[str]) -> None:
    config = SimpleNamespace(fp8=recipe and "hybrid", fp8_recipe=recipe, fp4=None)
    with classify.on_hopper({}):
        assert classify.waits_for(config) == waits


def test_lines_of_several_configs_count_an_option_once() -> None:
    lines = ["ddp.delay_wgrad_compute=True: first: and more", "delay_wgrad_compute=True: second"]
    assert classify.by_option(lines) == {"delay_wgrad_compute": "first: and more"}
