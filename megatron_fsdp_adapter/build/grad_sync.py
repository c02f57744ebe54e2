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
        """A context for all microbatches except the last. It may be nested. Inside, ZeRO-0/1 only
        accumulate gradients; ZeRO-2/3 reduce every microbatch, since they hold no full ones."""
        return self.engine.no_sync()

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Chooses what ends a step. True: each backward outside `no_sync`, as a plain training loop
        expects; when `backward()` returns, reductions are over and gradients attached. False: a
        call of `finish_grad_sync`, as Megatron makes it."""
        self.engine.set_auto_sync(sync_model)

    @contextmanager
    def sync(self) -> Iterator[None]:
        """A context with `set_model_auto_sync(True)`. The former choice is restored after it."""
        before = self.engine.auto_sync
        self.set_model_auto_sync(True)
        try:
            yield
        finally:
            self.set_model_auto_sync(before)
