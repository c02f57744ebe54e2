"""What the launcher's environment says of this process. Imports nothing of torch."""

from __future__ import annotations

import os


def is_first_rank(variable: str = "RANK") -> bool:
    """Whether this process is the first of all, or by LOCAL_RANK the first of its host. It is
    where no launcher has started it."""
    return int(os.environ.get(variable, "0")) == 0
