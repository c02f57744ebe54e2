"""Attributes of parameters that accelerate reads, and torch does not give it."""

from __future__ import annotations

import itertools
from typing import Any

from ..core.dtensor.uneven import UnevenDTensor

_numbers = itertools.count(1)


def give_address(sharded: Any) -> None:
    """Gives a local tensor without rows an address of its own. accelerate finds the parameters of
    an optimizer by these addresses, but all empty tensors of torch have the address 0."""
    local = sharded._local_tensor
    if local.numel() == 0:
        # Negative, unlike the address of any tensor with elements.
        address = -next(_numbers)
        local.data_ptr = lambda: address
    if isinstance(sharded, UnevenDTensor):  # accelerate knows torch's class alone
        sharded.data_ptr = local.data_ptr  # type: ignore[method-assign]
