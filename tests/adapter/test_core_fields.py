"""docs/fields.md has every field of the installed core's configs once, and says what is so and in
which releases they are.

A field that a new release brings is found here, not by a run that trains wrongly."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_fsdp_adapter.megatron.options.ddp_options import DDP_CONFIG_RULES
from megatron_fsdp_adapter.megatron.options.support import (
    MODEL_CONFIG_RULES,
    OPTIMIZER_CONFIG_RULES,
    Rule,
)

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "fields.md").read_text()
VERSION = importlib.metadata.version("megatron-core")
STATES = ("works", "refused", "nothing to do")

CONFIGS: dict[str, tuple[type, type | None, tuple[Rule, ...]]] = {
    # section -> (class, class whose fields have a section of their own, rules)
    "TransformerConfig": (TransformerConfig, None, MODEL_CONFIG_RULES),
    "MLATransformerConfig": (MLATransformerConfig, TransformerConfig, MODEL_CONFIG_RULES),
    "OptimizerConfig": (OptimizerConfig, None, OPTIMIZER_CONFIG_RULES),
    "DistributedDataParallelConfig": (DistributedDataParallelConfig, None, DDP_CONFIG_RULES),
}


def _rows(section: str) -> list[tuple[str, list[str], str]]:
    """(state, fields, why) of a section."""
    text = TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(state, re.findall(r"`(\w+)`", names), why) for state, names, why in cells]


def _release(version: str) -> tuple[int, int]:
    first, second = version.split(".")[:2]
    return int(first), int(second)


def _of_other_releases(installed: str) -> set[str]:
    """Fields that the installed release does not have yet, or no longer."""
    here = _release(installed)
    found: set[str] = set()
    for release, change, names in _changes():
        assert change in ("came", "gone")
        is_absent = _release(release) > here if change == "came" else _release(release) <= here
        found |= set(names) if is_absent else set()
    return found


def _changes() -> list[tuple[str, str, list[str]]]:
    """(release, "came" or "gone", fields) of the last section."""
    text = TEXT.partition("\n## Fields by release\n")[2]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(release, change, re.findall(r"`(\w+)`", names)) for release, change, names in cells]


def _names(cls: Any) -> set[str]:
    return {field.name for field in fields(cls)}


def _unlisted(section: str, cls: type, listed_elsewhere: type | None) -> set[str]:
    """Fields of the class that its section does not have."""
    known = {name for _, names, _ in _rows(section) for name in names}
    return _names(cls) - (_names(listed_elsewhere) if listed_elsewhere else set()) - known


@pytest.mark.parametrize("section", CONFIGS)
def test_every_field_is_listed_once_and_exists(section: str) -> None:
    cls, elsewhere, _ = CONFIGS[section]
    counts = Counter(name for _, names, _ in _rows(section) for name in names)
    assert not _unlisted(section, cls, elsewhere), "a field that nobody has judged"
    assert {name for name, count in counts.items() if count > 1} == set()
    absent = set(counts) - _names(cls)
    assert absent == set(counts) & _of_other_releases(VERSION), "a field that is gone, or not there"


def test_a_field_of_a_new_release_is_found() -> None:
    field = ("shards_weights_again", bool, False)
    newer = make_dataclass("Newer", [field], bases=(OptimizerConfig,))
    assert _unlisted("OptimizerConfig", newer, None) == {"shards_weights_again"}


@pytest.mark.parametrize("section", CONFIGS)
def test_what_is_refused_has_a_rule_and_what_has_none_is_not_refused(section: str) -> None:
    """A rule may also limit the values of what works."""
    cls, _, rules = CONFIGS[section]
    limited = {rule.option for rule in rules}
    for state, names, _ in _rows(section):
        assert state in STATES
        if state == "refused":
            assert set(names) <= limited, set(names) - limited
        if state == "nothing to do":
            assert not set(names) & limited
    listed = {name for state, names, _ in _rows(section) for name in names if state != STATES[2]}
    assert limited & _names(cls) <= listed | _names(CONFIGS["TransformerConfig"][0])


@pytest.mark.parametrize("section", CONFIGS)
def test_what_works_names_tests_that_exist(section: str) -> None:
    for state, names, why in _rows(section):
        assert names and why
        tests = re.findall(r"`(tests/[^`]+)`", why)
        assert bool(tests) == (state == "works"), names
        for path in tests:
            assert (ROOT / path).is_file(), path
