"""Warnings that one rank prints for all."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from .launcher import is_first_rank


def warn(text: str, category: type[Warning] = UserWarning, of_host: bool = False) -> None:
    """Warns on the first rank of all. of_host: on the first rank of each host, for what may differ
    between hosts. Before there is a process group, the launcher's environment gives the rank."""
    if of_host:
        prints = is_first_rank("LOCAL_RANK")
    elif dist.is_initialized():
        prints = dist.get_rank() == 0
    else:
        prints = is_first_rank("RANK")
    if prints:
        warnings.warn(text, category, stacklevel=3)
