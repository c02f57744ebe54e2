"""Bytes that a piece of code holds in tensors at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, what torch's operators make is counted while anything refers to its storage; what
    was there before is not. `peak` is the most at any time, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {s._cdata for s in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
        return result


def _storages(value: Any) -> list[torch.UntypedStorage]:
    found = []
    for leaf in tree_leaves(value):
        if type(leaf) in (torch.Tensor, torch.nn.Parameter):
            found.append(leaf.untyped_storage())
    return found
