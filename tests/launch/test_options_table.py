"""docs/options.md names what there is: every flag, field and argument in it exists, and every flag
that is added or set by the runner is in it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

from megatron_fsdp_adapter import (
    DistributedDataParallelConfig,
    apply_fsdp_overrides,
    fully_shard_model,
)
from megatron_fsdp_adapter.launch import megatron_lm

TABLE = Path(__file__).parents[2] / "docs" / "options.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE.read_text().splitlines()
    if line.startswith("| ") and line.count("|") == 6
]
OPTIONS = [row for row in ROWS if row[0] != "flag"]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_flag_of_the_runner_has_a_row() -> None:
    written = set(re.findall(r"--[a-z0-9-]+", TABLE.read_text()))
    refused = {"--megatron-fsdp-enable-fine-grained-param-gather"}
    assert {flag.name for flag in megatron_lm.MAIN_FLAGS} - refused <= written
    elsewhere = {"--accumulate-allreduce-grads-in-fp32", "--no-gradient-accumulation-fusion"}
    assert {setting.flag for setting in megatron_lm.SETTINGS} - elsewhere <= written


def test_every_field_exists() -> None:
    known = {field.name for field in fields(DistributedDataParallelConfig)}
    for row in OPTIONS:
        for name in names(row[1]):
            other_config = re.search(r"\((optimizer|model|Bridge: `checkpoint`)\)", row[1])
            if other_config or name in ("dp_cp_ag", "expt_dp_ag", "ProcessGroupCollection", "dist",
                                        "fsdp_unit_modules", "module_placements"):  # fmt: skip
                continue
            assert name in known, f"{name} is no field of the DDP config"


def test_every_argument_exists() -> None:
    arguments = inspect.signature(fully_shard_model).parameters
    assert len(OPTIONS) >= 20
    for row in OPTIONS:
        for name in names(row[2]):
            assert name in arguments, name
    documented = {name for row in OPTIONS for name in names(row[2])}
    assert set(arguments) - documented == {"module", "sync_model_each_microbatch"}


def test_every_argument_of_the_overrides_is_listed() -> None:
    text = TABLE.read_text().partition("## `apply_fsdp_overrides")[2]
    wanted = [name for name in inspect.signature(apply_fsdp_overrides).parameters if name != "cfg"]
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == wanted
