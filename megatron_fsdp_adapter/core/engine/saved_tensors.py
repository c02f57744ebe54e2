"""Filters what autograd saves for backward while other hooks are on (`saved_tensors_hooks`,
`save_on_cpu`, offload of activations): tensors in the engine's buffers are kept from them.

Such hooks copy what is saved to the host, and weights are saved by nearly every operation: as the
parameter, as a view of it, or as a plane of a quantized one. A copy would be a whole model on the
host, copied again in each forward; the buffer itself takes no memory while its unit is resharded,
and a view of it reads the weights that backward has gathered again.

Each storage of an engine's buffers carries a mark. When a unit or the model is called, a filter
takes the place of hooks that are on, and shows them unmarked tensors only. It replaces them and is
not pushed on top: torch pops the topmost hooks, and after an interrupt, which no hook of a module
sees, that would be the filter. A table of storages was rejected: code that offloads inside of units
(Megatron's) would have to find the engine. A subclass of `Parameter` was rejected: most of what is
saved are views, which have torch's class.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

_MARK = "_fsdp_engine_buffer"


def mark_owned(tensor: torch.Tensor) -> None:
    """Marks the storage of `tensor` as an engine's, for as long as it lives."""
    setattr(tensor.untyped_storage(), _MARK, True)


def is_owned(tensor: torch.Tensor) -> bool:
    """True if `tensor` is in a buffer of an engine; of a tensor made of others, which it holds as
    attributes, whether any of them is."""
    if torch._C._has_storage(tensor) and getattr(tensor.untyped_storage(), _MARK, False):
        return True
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    inside = [value for value in vars(tensor).values() if isinstance(value, torch.Tensor)]
    return any(is_owned(value) for value in inside)


class _Kept(NamedTuple):
    """A saved tensor that was shown to no hook."""

    tensor: torch.Tensor


class _Filter:
    """A pair of hooks: `pack` and `unpack` of other hooks, which are not shown owned tensors."""

    def __init__(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        self._pack, self._unpack = self.theirs = pack, unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        return _Kept(tensor) if is_owned(tensor) else self._pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed.tensor if type(packed) is _Kept else self._unpack(packed)


class SavedTensorFilter:
    """The filters of one engine. `enter` and `leave` of a call are given the same key; a call that
    raises is left as well."""

    def __init__(self) -> None:
        self._entered: list[tuple[Hashable, _Filter]] = []

    def enter(self, key: Hashable) -> bool:
        """A module is called; returns whether hooks are on. Costs 0.2 us where none are."""
        found = _innermost()
        if found is None:
            return False
        if not isinstance(getattr(found[0], "__self__", None), _Filter):
            sieve = _Filter(*found)
            _replace(sieve.pack, sieve.unpack)
            self._entered.append((key, sieve))
        return True

    def leave(self, key: Hashable) -> None:
        """Ends the filtering for a call."""
        if self._entered and self._entered[-1][0] == key:
            _, sieve = self._entered.pop()
            found = _innermost()
            if found is not None and getattr(found[0], "__self__", None) is sieve:
                _replace(*sieve.theirs)


def _innermost() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The hooks that are on; torch's types do not know the function."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined,no-any-return]


def _replace(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Puts these in the place of the innermost hooks."""
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
