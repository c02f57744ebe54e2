"""A checkpoint of one sharded model that another one goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def carried_over(
    one: Any,
    optimizer: torch.optim.Optimizer,
    other: Any,
    resumed: torch.optim.Optimizer,
    folder: Path,
) -> None:
    """Saves `one` and its optimizer in `folder`, and loads them into `other` and `resumed`."""
    weights, moments = get_state_dict(one, optimizer)
    dcp.save({"weights": weights, "moments": moments}, checkpoint_id=folder)
    weights, moments = get_state_dict(other, resumed)
    dcp.load({"weights": weights, "moments": moments}, checkpoint_id=folder)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=moments)
