"""Hooks that keep what autograd saves in copies on the host, as offload of activations does, and
spoil the originals: a read of one in backward gives NaN.

`torch.autograd.graph.save_on_cpu` is the same without the spoiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_fsdp_adapter.core.engine.params import GatheredParameter, PresentParameter

PLAIN = (torch.Tensor, torch.nn.Parameter, PresentParameter, GatheredParameter)


class HostCopies:
    """`with copies.hooks():` around a forward; its backward may run in or outside.

    Args:
        forbidden: `_cdata` of storages that must not be packed.
        spoils: whether originals are spoiled, which nothing may read any more when a backward
            begins. False for a schedule that runs backwards beside forwards.

    Attributes:
        packed: how many tensors were copied. found: shapes of those that were in `forbidden`.
    """

    def __init__(self, forbidden: set[int] | None = None, spoils: bool = True) -> None:
        self.forbidden = forbidden or set()
        self.spoils = spoils
        self.packed, self.found = 0, list[tuple[int, ...]]()
        self._originals = list[torch.Tensor]()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed += 1
        if any(part.untyped_storage()._cdata in self.forbidden for part in _parts(tensor)):
            self.found.append(tuple(tensor.shape))
            return tensor
        # Not a table that is used again and again, nor the quantized weight that Transformer
        # Engine keeps for the next microbatch.
        if tensor.requires_grad and type(tensor) in PLAIN:
            self._originals.append(tensor.detach())
        return tensor.detach().clone()

    def _unpack(self, copied: torch.Tensor) -> torch.Tensor:
        """The first one of a backward: nothing that was computed before is of use now."""
        originals = self._originals
        self._originals = []
        for original in originals:
            if self.spoils and original.is_floating_point():
                original.fill_(float("nan"))
        return copied.clone()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, or those that it is made of, for example a quantized one's."""
    parts = [one for one in vars(tensor).values() if type(one) is torch.Tensor]
    return parts if type(tensor) not in PLAIN else [tensor]
