"""The place of this process among those of its launcher. Imports nothing of torch."""

from __future__ import annotations

import os


def is_first_rank(variable: str = "RANK") -> bool:
    """True if this process is the first of all, or by LOCAL_RANK the first of its host, and where
    no launcher has started it."""
    return int(os.environ.get(variable, "0")) == 0
