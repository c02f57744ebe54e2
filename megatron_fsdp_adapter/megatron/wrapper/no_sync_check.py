"""Checks whether the training loop around the wrapper knows it: a check in the first step.

Megatron-LM and Megatron-Bridge test the model with isinstance, against a class that they imported
by name, and wire `config.no_sync_func` if it fits and `overlap_grad_reduce` is on. Where a name was
not rebound the test fails without a word: every microbatch then counts as the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NoSyncCheck:
    """Looks at one wrapper's steps until one has shown that `no_sync` is used, or need not be.

    expected: whether the loop must wire it: the wrapper was installed into Megatron, and the loop
    was asked for `overlap_grad_reduce`.
    """

    def __init__(self, expected: bool) -> None:
        self._pending = expected  # until one step has shown it
        self._forwards = 0  # of this step

    def on_no_sync(self) -> None:
        """Notes that the loop marks the microbatches that are not the last."""
        self._pending = False

    def on_zero_grads(self) -> None:
        """A step begins."""
        self._forwards = 0

    def on_forward(self, config: Any, training: bool) -> None:
        """Before a forward pass. RuntimeError at the second one of a step, if the loop
        never called `no_sync`."""
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
    """A constructor of Megatron's class that is an error. What had kept the class would train on
    with an engine whose helpers are no longer its own."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"{owner.__module__}.{owner.__name__} was constructed while megatron_fsdp_adapter is "
            "installed, by Megatron's fully_shard() or by code that kept a reference from before "
            "install(). Call install() before that code is imported, or uninstall() to use "
            "Megatron's wrapper"
        )

    return __init__
