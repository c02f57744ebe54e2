"""Warnings that one rank prints for all."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from .launcher import is_first_rank


def warn(text: str, category: type[Warning] = UserWarning, of_host: bool = False) -> None:
    """Warns on the first rank, of all or, with `of_host`, of each host: of what may differ between
    hosts. Before there is a process group, the launcher's environment has the rank."""
    is_known = dist.is_initialized() and not of_host
    if dist.get_rank() == 0 if is_known else is_first_rank("LOCAL_RANK" if of_host else "RANK"):
        warnings.warn(text, category, stacklevel=3)
