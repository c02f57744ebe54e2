"""Methods by which a training loop says which backward of a step reduces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..core.engine.engine import FsdpEngine
from ..state.not_copyable import NotCopyable


class GradSync(NotCopyable):
    """Chooses the backward of a step that reduces, and the place that waits for it."""

    engine: FsdpEngine

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Microbatches but the last run inside, at any depth of such contexts. ZeRO-0/1 only
        accumulate there; ZeRO-2/3 reduce every microbatch, since they hold no full gradients."""
        before = self.engine.is_last_microbatch
        self.engine.is_last_microbatch = False
        try:
            yield
        finally:
            if before is None:
                before = self.engine.after_no_sync
            self.engine.is_last_microbatch = before

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Sets whether each backward outside `no_sync` ends a step by itself: reductions are waited
        for and gradients attached when `backward()` returns, as a plain training loop expects. Off,
        that is what `finish_grad_sync` does, which Megatron calls."""
        self.engine.auto_sync = sync_model

    @contextmanager
    def sync(self) -> Iterator[None]:
        """`set_model_auto_sync` inside, and what it was before after."""
        before = self.engine.auto_sync
        self.set_model_auto_sync(True)
        try:
            yield
        finally:
            self.set_model_auto_sync(before)
