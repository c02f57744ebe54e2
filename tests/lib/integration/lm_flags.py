"""The flags of a checkout of Megatron-LM, from its own parser."""

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


def flags_of(checkout: Path) -> dict[str, str]:
    """Every flag, and the title of the group that it belongs to."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PRINT, str(checkout)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split("\t") for line in done.stdout.splitlines() if line.startswith("--"))
