"""Weights that are kept between a forward and its backward, sharded over fewer ranks than between
steps: those of one host, say. The backward gathers them among these ranks.

    8 ranks, kept over 4         0 1 2 3 4 5 6 7
    main weights                 a b c d e f g h
    gathered in forward          abcdefgh on each
    kept until the backward      ab cd ef gh ab cd ef gh

A part is cut from gathered weights, segment by segment, so it has the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megatron_fsdp_adapter.core.comm.communicator import Communicator, Pair
from megatron_fsdp_adapter.core.runtime.device import Runtime

from .buffer import FlatBuffer, copies_to
from .group import ParamGroup


class KeptParts:
    """This rank's parts of the weights of a unit.

    Args:
        groups: of the unit. Those that are gathered by functions of their own are left out.
        communicators: of the fewer ranks, by domain.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        communicators: Mapping[str, Communicator],
        runtime: Runtime,
    ) -> None:
        self.groups = []  # whose weights are kept in parts
        for group in groups:
            if group.key.domain in communicators and group.weights.gather_pairs:
                self.groups.append(group)
        self.communicators = communicators  # of the fewer ranks, by domain
        self.is_kept = False  # whether there are parts that no gather has taken yet
        self._runtime = runtime  # takes and gives their storage
        self._buffers: list[FlatBuffer] = []  # one for each group and dtype
        self._pairs: dict[ParamGroup, list[Pair]] = {}  # gathered segments, and parts of them
        self._own: list[torch.Tensor] = []  # views of gathered segments, of which parts are copies
        self._copy: Callable[[Sequence[torch.Tensor]], None]  # copies to all parts

    @property
    def nbytes(self) -> int:
        """Bytes of the parts that are there."""
        return sum(one.nbytes for one in self._buffers if one.allocated)

    def pairs_of(self, group: ParamGroup) -> Sequence[Pair]:
        """Output and input of each gather of `group`."""
        return self._pairs[group]

    def make(self) -> None:
        """Makes the parts without memory, unless they are made. The weights must be there, as views
        of them are made."""
        if not self._buffers:
            for group in self.groups:
                self._make(group)
            self._copy = copies_to([part for one in self._pairs.values() for _, part in one])
            self.release()

    def keep(self) -> None:
        """Copies the parts from gathered weights, on the current stream."""
        for buffer in self._buffers:
            buffer.allocate()
        self._copy(self._own)

    def release(self) -> None:
        """Gives the memory of the parts back, on the current stream."""
        for buffer in self._buffers:
            buffer.release()

    def _make(self, group: ParamGroup) -> None:
        # Views can be made only while the weights are there.
        communicator = self.communicators[group.key.domain]
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for whole, _ in group.weights.gather_pairs:
            by_dtype.setdefault(whole.dtype, []).append(whole)
        pairs: list[Pair] = []
        for dtype, wholes in by_dtype.items():
            sizes = [whole.numel() // communicator.size for whole in wholes]
            buffer = FlatBuffer(sum(sizes), dtype, self._runtime)
            buffer.label = f"parts of the weights of {group.name}"
            self._buffers.append(buffer)
            pairs += zip(wholes, buffer.tensor.split(sizes), strict=True)
            self._own += [one.view(communicator.size, -1)[communicator.rank] for one in wholes]
        self._pairs[group] = pairs
