"""Methods by which a training loop says which backward of a step reduces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ..core.engine.engine import FsdpEngine
from ..state.not_copyable import NotCopyable


class GradSync(NotCopyable):
    """Lets a training loop choose which backward of a step reduces, and where it is waited for."""

    engine: FsdpEngine

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context for all microbatches of a step but the last. It may be nested. In it,
        ZeRO-0 and ZeRO-1 add up gradients and send nothing. ZeRO-2 and ZeRO-3 keep no full
        gradients, so they reduce those of every microbatch."""
        return self.engine.no_sync()

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Sets what finishes the gradients of a step. True: each backward outside of `no_sync`, as
        plain training loops expect. Reductions are over, and `.grad` is set, when `backward()`
        returns. False: a call of `finish_grad_sync`, which Megatron's training loop makes."""
        self.engine.set_auto_sync(sync_model)

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Returns a context with `set_model_auto_sync(True)`, which restores the setting after."""
        before = self.engine.auto_sync
        self.set_model_auto_sync(True)
        try:
            yield
        finally:
            self.set_model_auto_sync(before)
