"""Checks in the first steps that the training loop recognizes the wrapper.

Megatron-LM and Megatron-Bridge test the model with isinstance, against a class that they imported
by name. If it is one and `overlap_grad_reduce` is on, they set `config.no_sync_func`. Where that
name was not rebound the test fails silently: every microbatch then counts as the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NoSyncCheck:
    """Watches one wrapper's steps until one of them shows that the loop uses `no_sync`.

    expected: True if the loop must use it: the wrapper was installed into Megatron, and
    `overlap_grad_reduce` was set. If False, nothing is checked.
    """

    def __init__(self, expected: bool) -> None:
        self._pending = expected  # True until `no_sync` is seen
        self._forwards = 0  # of this step

    def on_no_sync(self) -> None:
        """Notes that the loop marks the microbatches that are not the last."""
        self._pending = False

    def on_zero_grads(self) -> None:
        """Notes that a step begins."""
        self._forwards = 0

    def on_forward(self, config: Any, training: bool) -> None:
        """Notes a forward pass before it runs. RuntimeError at the second one of a step, if the
        loop has not used `no_sync`."""
        if not self._pending or not training or not torch.is_grad_enabled():
            return
        if config.no_sync_func is not None:
            self._pending = False
            return
        self._forwards += 1
        if self._forwards > 1:
            raise RuntimeError(
                "config.no_sync_func=None in a step of several microbatches with "
                "overlap_grad_reduce=True: the training loop does not recognize "
                "FullyShardedDataParallel, because a module holds Megatron's class under a name "
                "that install() could not rebind. Call megatron_fsdp_adapter.install() after the "
                "last import and before the model is built, or set config.no_sync_func = "
                "model.no_sync"
            )


def refusing(owner: type, original: Any) -> Callable[..., None]:
    """A constructor for Megatron's class that raises RuntimeError. Code that kept a reference to
    the class would otherwise train with an engine whose helpers are replaced."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"{owner.__module__}.{owner.__name__} was constructed while megatron_fsdp_adapter is "
            "installed, by Megatron's fully_shard() or by code that kept a reference from before "
            "install(). Call install() before that code is imported, or uninstall() to use "
            "Megatron's wrapper"
        )

    return __init__
