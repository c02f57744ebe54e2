"""Train a small GPT on real text with Muon and with AdamW, and compare the loss curves.

    python scripts/muon_loss_curves.py --ranks 2 --out runs/muon-curves --time-limit 170

500 steps of the same model from the same weights on the same text, the source of Python's standard
library: ours with AdamW, ours with Muon under two strategies. One learning rate serves both, as
updates of Muon's are scaled to the size of Adam's. Options are those of fp8_loss_curves.py, which
trains and draws.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import fp8_loss_curves

RUNS = (
    "ours:optim_grads_params@bf16#1,ours-muon:optim_grads_params@bf16#1,ours-muon:optim@bf16#1"
)


def main(arguments: Sequence[str]) -> int:
    """Exit status of fp8_loss_curves.py."""
    given = [] if any(word.startswith("--runs") for word in arguments) else ["--runs", RUNS]
    return fp8_loss_curves.main([*given, "--train-iters", "500", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
