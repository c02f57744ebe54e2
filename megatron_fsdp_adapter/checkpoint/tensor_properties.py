"""Tensor properties in `.metadata` that each release of torch reads.

torch DCP pickles the properties as a tuple. torch 2.15 appended strides, which no reader uses;
torch 2.13 raises on a tuple of six, so it cannot read a checkpoint of 2.15. We write only the
values that each release reads, and ignore later ones when reading.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import TensorProperties

READ_BY_ALL = 5
"""dtype, layout, requires_grad, memory format, pin_memory."""


class PortableProperties(TensorProperties):
    """Pickles as torch's class, and replaces it when metadata is read."""

    def state(self) -> tuple[Any, ...]:
        """The values that are pickled."""
        return tuple(self.__getstate__()[:READ_BY_ALL])

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:READ_BY_ALL])

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorProperties, (), self.state()


def portable(given: TensorProperties) -> PortableProperties:
    """`given` without the values that some releases of torch do not read."""
    made = PortableProperties()
    made.__setstate__(given.__getstate__())
    return made
