"""What `.metadata` says of a tensor beside its size and blocks, for each release of torch.

torch DCP pickles it as a tuple. Torch 2.15 appended strides, which nothing reads; torch 2.13
stops at a tuple of six, and with it at every checkpoint of 2.15. What we write has the values that
each release reads, and what follows them in what others wrote is passed over.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import TensorProperties

READ_BY_ALL = 5
"""dtype, layout, requires_grad, memory format, pin_memory."""


class PortableProperties(TensorProperties):
    """Is pickled as torch's own class, and stands for that where metadata is read."""

    def state(self) -> tuple[Any, ...]:
        """The values that are pickled."""
        return tuple(self.__getstate__()[:READ_BY_ALL])

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:READ_BY_ALL])

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorProperties, (), self.state()


def portable(given: TensorProperties) -> PortableProperties:
    """The same, but for what not every torch reads."""
    made = PortableProperties()
    made.__setstate__(given.__getstate__())
    return made
