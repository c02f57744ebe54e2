"""`torch.optim.Muon`, whose step needs whole matrices, on shards."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence

import torch

from ...core.engine.engine import FsdpEngine
from ...core.engine.params import ParamPair
from ..local_shards import UpdateRule
from ..state import GroupOptions
from .exchange import exchange_groups, wanted_groups
from .shards import MuonOptions, muon


def is_torch_muon(kind: type) -> bool:
    """True if optimizers of this class step as `torch.optim.Muon` does."""
    if not issubclass(kind, torch.optim.Muon):
        return False
    return inspect.unwrap(kind.step) is inspect.unwrap(torch.optim.Muon.step)


def torch_muon(engines: Sequence[FsdpEngine]) -> UpdateRule:
    """The rule of a `torch.optim.Muon` over the parameters of `engines`. Every parameter is one
    matrix, as it is to torch's own. Collective over the default process group where an outer axis
    splits shards: all ranks have the same engines."""
    made = exchange_groups(engines) if wanted_groups(engines) else {}
    return muon(engines, made, _options, _whole)


def _whole(pair: ParamPair) -> tuple[int, ...]:
    """The heights of a parameter that is one matrix: all of its rows."""
    return (pair.group.layout.specs[pair.index].layout_shape[0],)


def _options(group: GroupOptions) -> MuonOptions:
    step = tuple(group["ns_coefficients"])
    return MuonOptions(
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        coefficients=(step,) * group["ns_steps"],
        eps=group["eps"],
        scale=functools.partial(_scale, group["adjust_lr_fn"]),
    )


def _scale(rule: str | None, rows: int, columns: int) -> float:
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
