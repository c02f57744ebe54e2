"""docs/options.md and docs/support.md have the tables of the code.

docs/contributing/fields.md has every field of the installed core's configs once, with its releases.
A field that a new release brings is found here, not by a run that trains wrongly."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import fields
from typing import Any

import megatron.core
import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_fsdp_adapter import apply_fsdp_overrides, fully_shard_model
from megatron_fsdp_adapter.megatron.compat import releases
from megatron_fsdp_adapter.megatron.options.rules import Rule
from megatron_fsdp_adapter.megatron.options.support import (
    MODEL_CONFIG_RULES,
    OPTIMIZER_CONFIG_RULES,
)
from megatron_fsdp_adapter.megatron.options.table import DDP_CONFIG_RULES
from tests.lib.megatron import option_pages

CHECKS = ("megatron/options/table.py", "megatron/options/support.py", "megatron/options/rules.py")

OPTIONS = (option_pages.DOCS / "options.md").read_text()


@pytest.mark.parametrize("page", option_pages.PAGES)
def test_tables_are_made_of_the_code(page: str) -> None:
    written = (option_pages.DOCS / page).read_text()
    assert written == option_pages.rendered(page), "run python -m tests.lib.megatron.option_pages"


def test_every_argument_is_documented() -> None:
    rows = [line.split("|") for line in OPTIONS.splitlines() if line.startswith("| ")]
    named = set()
    for row in rows:
        if len(row) > 4:
            named.update(re.findall(r"`(\w+)`", row[3]))
    arguments = set(inspect.signature(fully_shard_model).parameters)
    # The last has a page of its own.
    assert arguments - named == {"module", "sync_model_each_microbatch"}
    text = OPTIONS.partition("\n## `apply_fsdp_overrides")[2].partition("\n## ")[0]
    wanted = [name for name in inspect.signature(apply_fsdp_overrides).parameters if name != "cfg"]
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == wanted


# docs/contributing/fields.md has every field of the installed core's configs once, and says what is
# so and in which releases they are.


FIELDS = option_pages.tables_of("fields.md")
VERSION = megatron.core.__version__  # of a checkout too

CONFIGS: dict[str, tuple[type, type | None, tuple[Rule, ...]]] = {
    # section -> (class, class whose fields have a section of their own, rules)
    "TransformerConfig": (TransformerConfig, None, MODEL_CONFIG_RULES),
    "MLATransformerConfig": (MLATransformerConfig, TransformerConfig, MODEL_CONFIG_RULES),
    "OptimizerConfig": (OptimizerConfig, None, OPTIMIZER_CONFIG_RULES),
    "DistributedDataParallelConfig": (DistributedDataParallelConfig, None, DDP_CONFIG_RULES),
}


def _rows(section: str) -> list[tuple[str, list[str], str]]:
    """(state, fields, why) of a section."""
    rows = FIELDS[section]
    return [(state, re.findall(r"`(\w+)`", names), why) for state, names, why, _ in rows]


def _of_other_releases(installed: str) -> set[str]:
    """Fields that the installed release does not have yet, or no longer."""
    here = releases.parse(installed)[0][:2]
    found: set[str] = set()
    for release, change, names in FIELDS["Fields by release"]:
        assert change in ("added", "removed")
        is_later = releases.parse(release)[0] > here
        is_absent = is_later if change == "added" else not is_later
        found |= set(re.findall(r"`(\w+)`", names)) if is_absent else set()
    return found


def _names(cls: Any) -> set[str]:
    return {field.name for field in fields(cls)}


@pytest.mark.parametrize("section", CONFIGS)
def test_every_field_is_listed_once_and_exists(section: str) -> None:
    cls, elsewhere, _ = CONFIGS[section]
    counts = Counter(name for _, names, _ in _rows(section) for name in names)
    in_another = _names(elsewhere) if elsewhere else set()
    assert _names(cls) - in_another <= set(counts), "a field without a row in the table"
    assert {name for name, count in counts.items() if count > 1} == set()
    absent = set(counts) - _names(cls)
    assert absent == set(counts) & _of_other_releases(VERSION), "a field that is gone, or not there"


@pytest.mark.parametrize("section", CONFIGS)
def test_what_is_refused_has_a_rule_and_what_has_none_is_not_refused(section: str) -> None:
    """A rule may also limit the values of what works."""
    cls, _, rules = CONFIGS[section]
    limited = {rule.option for rule in rules}
    named: dict[str, set[str]] = {"works": set(), "refused": set(), "nothing to do": set()}
    for state, names, _ in _rows(section):
        named[state] |= set(names)
    assert named["refused"] <= limited
    assert not named["nothing to do"] & limited
    assert limited & _names(cls) <= named["works"] | named["refused"] | _names(TransformerConfig)


def test_what_works_names_its_tests() -> None:
    features = [row for rows in option_pages.tables_of("features.md").values() for row in rows]
    fields_of_configs = [row for section in CONFIGS for row in FIELDS[section]]
    works = [row for row in features if row[1].startswith("works")]
    works += [row for row in fields_of_configs if row[0] == "works"]
    assert len(works) > 100
    assert [row for row in works if "`tests/" not in row[3]] == []


def test_features_are_on_the_page_of_what_works_or_among_refusals() -> None:
    features = [row for rows in option_pages.tables_of("features.md").values() for row in rows]
    assert {page for _, _, page, _ in features} == {"works", "refusals"}
