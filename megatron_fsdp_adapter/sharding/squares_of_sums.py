"""Squares of gradients that are added up where these are summed over ranks, for their norm.

    reduce stream    exchange(2), sum + squares | exchange(1), sum + squares | ...
    compute stream   backward ...................................... | add up the squares | Adam

A norm reads every gradient once, between backward and the optimizer's step, where nothing hides it.
Where this package sums what ranks exchange, its kernel has each sum in registers: it leaves the sum
of squares of every `SQUARED` elements, and the norm adds those up.

They count as long as torch has seen nobody write the gradients since, by the version that all views
of a tensor share; what writes them by kernels that torch does not see (clipping in place) says so.
The groups of parameters that they are of are taken as wholes: where the norm counts not all
gradients of a group (replicas, parameters that are shared, norms of their own), it reads them all.

A kernel over each unit's gradients behind its reduction was turned down: it reads them once more,
beside products that wait for memory, and costs the host a launch for each unit. Where NCCL sums
(reduce-scatter) the norm reads gradients as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.reduction import Collective
from ..core.runtime.kernels import SQUARED
from ..core.runtime.sums import LastWrite, SquaredOutput

Tensors = Sequence[torch.Tensor]


class SquaresOfSums:
    """Asks the reductions of `engines` for squares of what they sum, and adds those up."""

    def __init__(self, engines: Sequence[FsdpEngine]) -> None:
        self._groups = [
            group for engine in engines for group in engine.groups if _leaves_squares(engine, group)
        ]
        counts = [
            -(-segment.numel() // SQUARED)
            for group in self._groups for segment in group.grad_segments
        ]
        self._sums = torch.zeros(sum(counts), device=engines[0].runtime.device)
        parts = iter(self._sums.split(counts))
        for group in self._groups:
            write = LastWrite(group.grad.tensor)
            group.squared = [SquaredOutput(next(parts), write) for _ in group.grad_segments]
        self._whole: dict[tuple[int, ...], tuple[list[ParamGroup], list[int]]] = {}

    @classmethod
    def where_left(cls, engines: Sequence[FsdpEngine]) -> SquaresOfSums | None:
        """None where no reduction leaves any."""
        made = cls(engines)
        return made if made._groups else None

    def forget(self) -> None:
        """Gradients are written by something that torch does not see."""
        for group in self._groups:
            group.squared[0].write.forget()

    def __call__(self, held: Tensors) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Of gradients: the sum of squares of some, float32 (1,), or None; and the others."""
        groups, others = self._groups_of(tuple(tensor.data_ptr() for tensor in held))
        known = [group for group in groups if group.squared[0].write.is_last]
        if not known:
            return None, list(held)
        rest = [held[index] for index in others]
        for group in groups:
            if group not in known:
                rest += [grad for grad in group.grad_items if grad.numel()]
        sums = self._sums
        if len(known) < len(self._groups):
            sums = torch.cat([one.sums for group in known for one in group.squared])
        return sums.sum(dim=0, keepdim=True, dtype=torch.float64).float(), rest

    def _groups_of(self, places: tuple[int, ...]) -> tuple[list[ParamGroup], list[int]]:
        """Those of which all gradients are among these, by address, and where the others are."""
        if places not in self._whole:
            found, groups, theirs = set(places), [], set[int]()
            for group in self._groups:
                own = {grad.data_ptr() for grad in group.grad_items if grad.numel()}
                if own and own <= found:
                    groups.append(group)
                    theirs |= own
            others = [index for index, place in enumerate(places) if place not in theirs]
            self._whole.clear()  # addresses of before
            self._whole[places] = groups, others
        return self._whole[places]


def _leaves_squares(engine: FsdpEngine, group: ParamGroup) -> bool:
    """Whether its gradients are what an exchange has summed: not 8-bit blocks, which another kernel
    sums, nor what is reduced over an outer axis afterwards."""
    if not group.key.requires_grad:
        return False
    plan = engine.reduce.plans[group.key.domain]
    summed = plan.collective is Collective.EXCHANGE and not plan.in_blocks
    alone = group.key.domain not in engine.reduce.outer
    return summed and alone and bool(group.grad_segments)
