"""Warnings that one rank prints for all."""

from __future__ import annotations

import os
import warnings

import torch.distributed as dist


def warn(text: str, category: type[Warning] = UserWarning, of_host: bool = False) -> None:
    """Warns on the first rank, of all or, with `of_host`, of each host: of what may differ between
    hosts. Before there is a process group, the launcher's environment has the rank."""
    variable = "LOCAL_RANK" if of_host else "RANK"
    is_known = dist.is_initialized() and not of_host
    if (dist.get_rank() if is_known else int(os.environ.get(variable, "0"))) == 0:
        warnings.warn(text, category, stacklevel=3)
