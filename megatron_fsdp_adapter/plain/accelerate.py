"""Attributes of parameters that accelerate reads, and torch does not give it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.dtensor.uneven import UnevenDTensor
from ..core.engine.params import ParamPair


def give_addresses(pairs: Iterable[ParamPair]) -> None:
    """Gives local tensors without rows an address of their own. accelerate finds the parameters of
    an optimizer by these addresses, but all empty tensors of torch have the address 0."""
    for number, pair in enumerate(pairs):
        sharded: Any = pair.sharded
        local = sharded._local_tensor
        if local.numel() == 0:
            # Negative, unlike the address of any tensor with elements.
            local.data_ptr = lambda own=-1 - number: own
        if isinstance(sharded, UnevenDTensor):  # accelerate knows torch's class alone
            sharded.data_ptr = local.data_ptr  # type: ignore[method-assign]
