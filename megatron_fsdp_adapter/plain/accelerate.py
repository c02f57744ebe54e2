"""Attributes of parameters that accelerate reads, and torch does not give it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.engine.params import ParamPair


def give_addresses(pairs: Iterable[ParamPair]) -> None:
    """Gives each parameter an address of its own. accelerate finds the parameters of an optimizer
    by the addresses of their local tensors, but all empty tensors of torch have the address 0."""
    for number, pair in enumerate(pairs):
        sharded: Any = pair.sharded
        local = sharded._local_tensor
        if local.numel() == 0:
            # Negative, unlike the address of any tensor with elements.
            local.data_ptr = lambda own=-1 - number: own
        sharded.data_ptr = local.data_ptr
