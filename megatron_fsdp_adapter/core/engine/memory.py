"""An engine's memory, by what it is for: given back between two steps, and taken again.

Main weights go to the host. Compute weights that a gather writes again are dropped; so are
gradients, buckets and slots. Quantized weights go to the host: their bytes are not a matter of
main weights alone. Storages are given back and taken again under the tensors, as gathers do it:
whatever holds a view of a buffer keeps it. Addresses change, which only CUDA graphs and
registrations with NCCL know of: those are refused, and left where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from megatron_fsdp_adapter.core.runtime.device import Runtime
from megatron_fsdp_adapter.core.runtime.host_stash import HostStash, Kept, Storages

from .unit import Unit

MAIN, COMPUTE, GRADIENTS, SLOTS = "main_weights", "compute_weights", "gradients", "slots"
KINDS = (MAIN, COMPUTE, GRADIENTS, SLOTS)
READ = (MAIN, COMPUTE, SLOTS)
"""What a forward pass without gradients needs."""


class EngineMemory:
    """Args:
    units: whose buffers they are. received: memory of exchanges of gradients. ordinary: whether
        that and slots are torch's own memory, which may go, and not registered.

    Attributes:
        pinned_by: why the memory is pinned, for messages ("a CUDA graph"); "" if it is not.
    """

    def __init__(
        self, units: Sequence[Unit], received: torch.Tensor | None, ordinary: bool,
        runtime: Runtime,
    ) -> None:
        self._units, self._ordinary = units, ordinary
        self._received = [] if received is None else [received]
        self._lot = HostStash(runtime)
        self.pinned_by = ""

    def storages(self) -> Storages:
        """By kind: a tensor over each storage, and which parts of it return as they were."""
        found: dict[str, list[tuple[torch.Tensor, Kept]]] = {kind: [] for kind in KINDS}
        found[SLOTS] = [(slot, ()) for slot in self._slots()]
        for group in (group for unit in self._units for group in unit.groups):
            for buffer in group.weight_shards:
                own = buffer.segments(group.held)
                kept = own if group.key.quantized and not group.write_planes else []
                if group.main_is_weight:
                    found[MAIN].append((buffer.tensor, own))
                elif not buffer.in_slot:
                    found[COMPUTE].append((buffer.tensor, kept))
            if not group.main_is_weight and not group.main_on_host:
                found[MAIN].append((group.main.tensor, None))
            if group.key.requires_grad and not group.grad.in_slot:
                found[GRADIENTS].append((group.grad.tensor, ()))
        return found

    def _slots(self) -> list[torch.Tensor]:
        stagings = [group.staging for unit in self._units for group in unit.groups]
        made = [slots for one in stagings for slots in (one.weights, one.buckets) if slots]
        memory = [one for slots in dict.fromkeys(made) for one in slots.memory]
        return [*memory, *self._received] if self._ordinary else []

    def check_free(self, kinds: Collection[str]) -> None:
        """Raises RuntimeError if memory of `kinds` is pinned."""
        if kinds and self.pinned_by:
            raise RuntimeError(
                f"release_memory: {self.pinned_by} has addresses of {', '.join(kinds)}; switch "
                f"that off, or release the optimizer's state alone, with keep={list(KINDS)}"
            )

    def park(self, kinds: Collection[str], more: Storages) -> dict[str, int]:
        """Gives back what is of `kinds`, and `more` storages by kind; the bytes of each. Nothing
        may be gathered or in flight."""
        storages = self.storages()
        return self._lot.park({kind: [*storages[kind], *more.get(kind, ())] for kind in kinds})

    def take(self, kinds: Sequence[str]) -> None:
        """Takes back what of `kinds` is away."""
        self._lot.take(kinds)

    @property
    def away(self) -> list[str]:
        """Kinds that are given back."""
        return list(self._lot.away)

    def check(self, action: str, needed: Collection[str]) -> None:
        """RuntimeError if something of `needed` is away."""
        missing = [kind for kind in self._lot.away if kind in needed]
        if missing:
            raise RuntimeError(
                f"{action}: {', '.join(missing)} of this model were released; call "
                "return_memory(model, optimizer) first"
            )
