"""docs/options.md and docs/flags.md have every flag of Megatron-LM that concerns the wrapper."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.lib.integration.lm_runs import ROOT

CHECKS = ("launch/megatron_lm.py", "megatron/options/support.py", "megatron/options/table.py")

TEXT = "".join((ROOT / "docs" / page).read_text() for page in ("options.md", "flags.md"))

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

_PRINT = """
import argparse, sys
sys.path.insert(0, sys.argv[1])
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
print(*parser._option_string_actions, sep="\\n")
"""


def test_every_flag_that_concerns_the_wrapper_is_in_the_document(megatron_lm: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PRINT, str(megatron_lm)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    flags = {line for line in done.stdout.splitlines() if CONCERNS.search(line)}
    flags = {flag for flag in flags if not ELSEWHERE.search(flag)}
    assert len(flags) > 40
    written = set(re.findall(r"--[a-z0-9-]+", TEXT))
    assert not flags - written, sorted(flags - written)
