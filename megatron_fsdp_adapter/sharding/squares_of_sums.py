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

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.reduction import Collective
from ..core.runtime.kernels import SQUARED
from ..core.runtime.sums import LastWrite, SquaredOutput

Tensors = Sequence[torch.Tensor]


class SquaresOfSums:
    """Asks reductions for squares of what they sum, and adds those up.

    Args:
        engines: whose reductions.
        params: an optimizer's parameters: groups of which it has all are asked for, so that two
            optimizers of one model ask for others.
    """

    def __init__(self, engines: Sequence[FsdpEngine], params: Iterable[Any]) -> None:
        own = {id(param) for param in params}
        shared = {
            id(pair.group) for engine in engines for pair in engine.pairs
            if pair.grad is not None and id(pair.optimizer) not in own
        }
        groups = [
            group for engine in engines for group in engine.groups
            if _leaves_squares(engine, group) and id(group) not in shared
        ]
        counts = [[-(-part.numel() // SQUARED) for part in one.grad_segments] for one in groups]
        self._sums = torch.zeros(sum(map(sum, counts)), device=engines[0].runtime.device)
        parts = iter(self._sums.split([count for some in counts for count in some]))
        self._asked: list[tuple[ParamGroup, list[SquaredOutput]]] = []
        for group in groups:
            write = LastWrite(group.grad.tensor)
            group.squared = [SquaredOutput(next(parts), write) for _ in group.grad_segments]
            self._asked.append((group, group.squared))
        self._whole: dict[tuple[int, ...], tuple[set[int], list[int]]] = {}

    @classmethod
    def where_left(
        cls, engines: Sequence[FsdpEngine], params: Iterable[Any]
    ) -> SquaresOfSums | None:
        """None where no reduction leaves any."""
        made = cls(engines, params)
        return made if made._asked else None

    def forget(self) -> None:
        """Gradients are written by something that torch does not see."""
        for _, squared in self._asked:
            squared[0].write.forget()

    def __call__(self, held: Tensors) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Of gradients: the sum of squares of some, float32 (1,), or None; and the others."""
        whole, others = self._whole_groups(tuple(tensor.data_ptr() for tensor in held))
        known: list[SquaredOutput] = []
        rest = [held[index] for index in others]
        for group, squared in self._asked:
            if id(group) not in whole:
                continue
            if group.squared is squared and squared[0].write.is_last:
                known += squared
            else:
                rest += [grad for grad in group.grad_items if grad.numel()]
        if not known:
            return None, list(held)
        every = sum(one.sums.numel() for one in known) == self._sums.numel()
        sums = self._sums if every else torch.cat([one.sums for one in known])
        return sums.sum(dim=0, keepdim=True, dtype=torch.float64).float(), rest

    def _whole_groups(self, places: tuple[int, ...]) -> tuple[set[int], list[int]]:
        """Those of which all gradients are among these, by address, and where the others are."""
        if places not in self._whole:
            found, whole, theirs = set(places), set[int](), set[int]()
            for group, _ in self._asked:
                own = {grad.data_ptr() for grad in group.grad_items if grad.numel()}
                if own and own <= found:
                    whole.add(id(group))
                    theirs |= own
            others = [index for index, place in enumerate(places) if place not in theirs]
            self._whole.clear()  # addresses of before
            self._whole[places] = whole, others
        return self._whole[places]


def _leaves_squares(engine: FsdpEngine, group: ParamGroup) -> bool:
    """Whether its gradients are what an exchange has summed: not what is reduced over an outer axis
    afterwards."""
    if not group.key.requires_grad or not group.grad_segments:
        return False
    summed = engine.reduce.plans[group.key.domain].collective is Collective.EXCHANGE
    return summed and group.key.domain not in engine.reduce.outer
