"""A filter that keeps tensors in the engine's buffers from other hooks on what autograd saves.

Such hooks (`saved_tensors_hooks`, `save_on_cpu`, offload of activations) copy it to the host, and
weights are saved by nearly every operation: as the parameter, as a view of it, or as a plane of a
quantized one. A copy would be a whole model on the host, copied again in each forward; the buffer
itself takes no memory while its unit is resharded, and a view of it reads the weights that backward
has gathered again.

When a unit or the model is called, a filter takes the place of hooks that are on, and shows them
tensors only whose storage has no mark (`mark_owned`). It replaces them and is not pushed on top:
torch pops the topmost hooks, and after an interrupt, which no hook of a module sees, that would be
the filter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from .buffer import is_owned


class _Kept(NamedTuple):
    """A saved tensor that was shown to no hook."""

    tensor: torch.Tensor


class _Filter:
    """A pair of hooks: `pack` and `unpack` of other hooks, which are not shown owned tensors."""

    def __init__(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        self.theirs = pack, unpack  # the other hooks
        self._pack = pack  # the first of them
        self._unpack = unpack  # the second

    def pack(self, tensor: torch.Tensor) -> Any:
        return _Kept(tensor) if is_owned(tensor) else self._pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed.tensor if type(packed) is _Kept else self._unpack(packed)


class SavedTensorFilter:
    """The filters of one engine. `enter` and `leave` of one call get the same key. `leave` follows
    also where the call raises."""

    def __init__(self) -> None:
        # Filters of calls that have not returned, with their keys; the innermost call's is last.
        self._entered: list[tuple[Hashable, _Filter]] = []

    def enter(self, key: Hashable) -> bool:
        """True if hooks are on as a module is called; sets the filter then. Costs 0.2 us where none
        are."""
        found = _innermost()
        if found is None:
            return False
        if not isinstance(getattr(found[0], "__self__", None), _Filter):
            sieve = _Filter(*found)
            _replace(sieve.pack, sieve.unpack)
            self._entered.append((key, sieve))
        return True

    def leave(self, key: Hashable) -> None:
        """Ends the filtering, if this call began it. Hooks that were put on top stay."""
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
