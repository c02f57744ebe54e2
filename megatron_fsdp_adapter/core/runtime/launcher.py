"""The place of this process among those of its launcher. Imports nothing of torch."""

from __future__ import annotations

import os


def is_first_rank(variable: str = "RANK") -> bool:
    """True if this process is the first of all; with "LOCAL_RANK", if it is the first of its host.
    True too if no launcher has started it."""
    return int(os.environ.get(variable, "0")) == 0
