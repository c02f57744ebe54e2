"""The flags of a checkout of Megatron-LM, from its own parser, and the fields of its configs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PRINT = """
import argparse, sys
sys.path.insert(0, sys.argv[1])
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
for group in parser._action_groups:
    for action in group._group_actions:
        for flag in action.option_strings:
            print(flag, group.title, sep="\\t")
"""


_PRINT_FIELDS = """
import dataclasses, importlib, sys
sys.path.insert(0, sys.argv[1])
for path in sys.argv[2:]:
    module, name = path.rsplit(".", 1)
    for field in dataclasses.fields(getattr(importlib.import_module(module), name)):
        print(path, field.name, sep="\\t")
"""

CONFIGS = {
    # section of docs/contributing/fields.md -> class
    "TransformerConfig": "megatron.core.transformer.TransformerConfig",
    "MLATransformerConfig": "megatron.core.transformer.transformer_config.MLATransformerConfig",
    "OptimizerConfig": "megatron.core.optimizer.OptimizerConfig",
    "DistributedDataParallelConfig": "megatron.core.distributed.DistributedDataParallelConfig",
}


def flags_of(checkout: Path) -> dict[str, str]:
    """Every flag, and the title of the group that it belongs to."""
    lines = _printed(_PRINT, checkout)
    return dict(line.split("\t") for line in lines if line.startswith("--"))


def fields_of(checkout: Path) -> dict[str, set[str]]:
    """The fields of each of `CONFIGS`. A class that derives from another has its fields, too."""
    found: dict[str, set[str]] = {section: set() for section in CONFIGS}
    sections = {path: section for section, path in CONFIGS.items()}
    for line in _printed(_PRINT_FIELDS, checkout, *sections):
        path, tab, name = line.partition("\t")
        if tab:
            found[sections[path]].add(name)
    return found


def _printed(code: str, checkout: Path, *words: str) -> list[str]:
    """The lines that code prints which imports Megatron from a checkout."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(checkout), *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
