"""docs/options.md has every flag of Megatron-LM that concerns the wrapper, and the table of flags
about checkpoints every one of them. docs/contributing/fields.md has every field of the configs of
its megatron-core."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_fsdp_adapter.megatron.options.checkpoint_flags import CHECKPOINT_FLAGS
from tests.lib.integration.lm_flags import CONFIGS, fields_of, flags_of
from tests.lib.integration.lm_runs import ROOT
from tests.lib.megatron.option_pages import tables_of

CHECKS = (
    "launch/megatron_lm.py",
    "megatron/options/support.py",
    "megatron/options/table.py",
    "megatron/options/checkpoint_flags.py",
)

TEXT = (ROOT / "docs" / "options.md").read_text()

CONCERNS = re.compile(
    r"fsdp|hsdp|ddp-|nccl-ub|symmetric-registration|communication-unit|all-gather-group"
    r"|data-parallel-(sharding|random)|overlap-(grad|param)|align-(grad|param)|param-(gather|ag)"
    r"|distributed-optimizer|precision-aware|accumulate-allreduce|(grad-reduce|reduce-div)"
    r"|per-token-loss|nan-in-loss|large-grads|weight-hash|accumulation-fusion|delay-wgrad"
    r"|experts-wgrad|num-weight-shards|detach-heads|meta-device|cuda-graph|save-(d|w)grads"
    r"|transpose-cache|save-params|async-(save|strategy|ckpt)|persistent-ckpt|ckpt-(format$|workers)"
)
ELSEWHERE = re.compile(
    r"inference|decode|^--(no-)?rl-|^--moe-pad|^--dist-ckpt-format$|auto-detect|^--disable-(align|strict)"
)
"""Inference, reinforcement learning, and second names of flags."""


@pytest.fixture(scope="module")
def parsed(megatron_lm: Path) -> dict[str, str]:
    """Every flag of the parser, and the group that it belongs to."""
    return flags_of(megatron_lm)


def test_every_flag_of_checkpoints_is_in_the_table(parsed: dict[str, str]) -> None:
    """A flag that a new release brings is found here, and not by a job that cannot resume."""
    flags = {flag for flag, group in parsed.items() if group == "checkpointing"}
    assert len(flags) > 40
    known = {flag for row in CHECKPOINT_FLAGS for flag in row.flags}
    assert not flags - known, sorted(flags - known)
    assert not known & parsed.keys() - flags, "a flag of another group"


def test_every_flag_that_concerns_the_wrapper_is_in_the_document(parsed: dict[str, str]) -> None:
    flags = {flag for flag in parsed if CONCERNS.search(flag)}
    flags = {flag for flag in flags if not ELSEWHERE.search(flag)}
    assert len(flags) > 40
    written = set(re.findall(r"--[a-z0-9-]+", TEXT))
    assert not flags - written, sorted(flags - written)


def test_every_field_of_the_checkouts_configs_is_in_the_document(megatron_lm: Path) -> None:
    """As `tests/megatron/options/test_option_pages.py` checks with the installed megatron-core."""
    tables = tables_of("fields.md")
    known = {}
    for section in CONFIGS:
        names = " ".join(row[1] for row in tables[section])
        known[section] = set(re.findall(r"`(\w+)`", names))
    known["MLATransformerConfig"] |= known["TransformerConfig"]
    found = fields_of(megatron_lm)
    assert all(len(names) > 30 for names in found.values())
    unknown = {section: sorted(names - known[section]) for section, names in found.items()}
    assert not any(unknown.values()), unknown
