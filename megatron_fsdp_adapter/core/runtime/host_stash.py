"""Storages that are given back for a while, and then taken again with their contents.

Tensors stay the objects that they are: views, DTensors and optimizer state see the next storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .device import Runtime, fill_with_nan, storage_bytes

Kept = Sequence[torch.Tensor] | None
Storages = Mapping[str, Sequence[tuple[torch.Tensor, Kept]]]
"""Kind -> for each storage, a tensor over it, and the parts of it whose contents are kept (None:
all of it)."""

CHUNK = 1 << 26
"""Bytes of pinned memory that are taken at once. Torch rounds each piece up to a power of two, so a
large buffer in one piece would take up to twice its bytes."""


class StashedStorage:
    """The storage of `owner`, which can be given back and taken again.

    kept: contiguous tensors over it whose values return; None for all of it. Everything else is
        undefined then, or NaN where the runtime poisons.

    Host memory is taken the first time and then kept: pinning takes longer than the copy.
    """

    def __init__(self, owner: torch.Tensor, kept: Kept, runtime: Runtime) -> None:
        self._owner = owner
        self._runtime = runtime
        # Bytes of what is kept.
        self._parts: list[torch.Tensor] = []
        for view in [_everything(owner)] if kept is None else kept:
            self._parts += view.detach().view(-1).view(torch.uint8).split(CHUNK)
        # A copy of each, from the first `save` on.
        self._host: list[torch.Tensor] = []
        # Bytes of the storage when it was given back.
        self._nbytes = 0

    def save(self) -> None:
        """Starts to copy what is kept to the host, on the current stream."""
        if not self._host:
            pin = self._owner.is_cuda
            for part in self._parts:
                self._host.append(torch.empty_like(part, device="cpu", pin_memory=pin))
        for part, copy in zip(self._parts, self._host, strict=True):
            copy.copy_(part, non_blocking=True)

    def give_back(self) -> int:
        """Gives the storage back; returns its bytes. The copies of `save` must have finished."""
        self._nbytes = storage_bytes(self._owner)
        self._owner.untyped_storage().resize_(0)
        return self._nbytes

    def take(self) -> None:
        """Takes storage again and starts to copy into it, on the current stream."""
        self._owner.untyped_storage().resize_(self._nbytes)
        if self._runtime.poison:
            fill_with_nan(_everything(self._owner))
        for part, copy in zip(self._parts, self._host, strict=True):
            part.copy_(copy, non_blocking=True)


def _everything(owner: torch.Tensor) -> torch.Tensor:
    """The bytes of its storage."""
    storage = owner.untyped_storage()
    found = torch.empty(0, dtype=torch.uint8, device=owner.device)
    return found.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload,no-any-return]


class HostStash:
    """Storages by what they are for; each is here or away."""

    def __init__(self, runtime: Runtime, away: dict[str, list[StashedStorage]]) -> None:
        self._runtime = runtime
        # Kinds that are given back: the caller's, written here.
        self.away = away
        # By kind and owner's id, what was parked last, whose host memory is used again.
        self._known: dict[str, dict[int, StashedStorage]] = {}

    def park(self, storages: Storages) -> dict[str, int]:
        """Gives back storages; returns the bytes of each kind.

        Leaves out kinds that are away, released storages, and tensors on other devices. Blocks the
        host until the device is idle."""
        device = self._runtime.device
        found = {}
        for kind, owners in storages.items():
            if kind in self.away:
                continue
            before = self._known.get(kind, {})
            here = {}
            for owner, kept in owners:
                if owner.device.type == device.type and storage_bytes(owner):
                    known = before.get(id(owner))
                    here[id(owner)] = known or StashedStorage(owner, kept, self._runtime)
            self._known[kind] = here
            found[kind] = list(here.values())
        self._runtime.synchronize()
        for parked in found.values():
            for one in parked:
                one.save()
        self._runtime.synchronize()
        self.away.update(found)
        return {kind: sum(one.give_back() for one in parked) for kind, parked in found.items()}

    def take(self, kinds: Sequence[str]) -> None:
        """Takes back what of `kinds` is away. Work on the current stream may use it after this."""
        for kind in kinds:
            for parked in self.away.pop(kind, ()):
                parked.take()
