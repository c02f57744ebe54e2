"""A stand-in for HybridEP of the package `deep_ep`, on gloo: what its buffer returns, and none of
its kernels, streams or memory. With it core's flex dispatcher runs without a GPU.

Checked against `hybrid_ep_buffer.py` of the branch hybrid-ep, whose handle has 11 members, of which
core reads the last. Experts' rows are not padded here. Everything that the buffer
is given is noted, so that a test can tell whose memory it was.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

GIVEN: list[torch.Tensor] = []
"""Tensors that the dispatcher handed over, in order."""


def noted(*tensors: torch.Tensor | None) -> None:
    GIVEN.extend(tensor.detach() for tensor in tensors if tensor is not None)


class HybridEPBuffer:
    """HybridEP: a token goes to each of its experts, in the experts' order, with its weight. Each
    rank gets the tokens of all, and takes those of its experts."""

    def __init__(self, group: Any, num_local_experts: int, **sizes: Any) -> None:
        first = group.rank() * num_local_experts
        self.group, self.own = group, slice(first, first + num_local_experts)

    def _of_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks, in rank order."""
        found = [torch.empty_like(rows) for _ in range(self.group.size())]
        dist.all_gather(found, rows.contiguous(), group=self.group)
        return torch.cat(found)

    def _added_up(self, of_all: torch.Tensor) -> torch.Tensor:
        """The reverse: this rank's rows of the sums over the ranks."""
        dist.all_reduce(of_all, group=self.group)
        return of_all.chunk(self.group.size())[self.group.rank()].clone()  # no view: it is changed

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        routing_map: Any = None,
        probs: Any = None,
        handle: Any = None,
        num_permuted_tokens: Any = None,
        pad_multiple: Any = None,
        **how: Any,
    ) -> Any:
        assert pad_multiple in (None, 1)  # core passes 1 too from 0.20 on
        noted(hidden, routing_map, probs)
        if handle is None:
            assert routing_map.dtype == torch.bool
            assert len(hidden) == len(routing_map)
            handle = self._handle(routing_map.byte(), num_permuted_tokens)
        (tokens, experts, counts, _), _ = handle
        if probs is None:
            weights = None
        else:
            weights = self._of_all(probs)[:, self.own][tokens, experts]
        return self._of_all(hidden)[tokens], weights, None, counts, handle

    def _handle(self, routing_map: torch.Tensor, budget: Any) -> Any:
        """Tokens of all ranks and own experts of the rows that this rank gets, of which it keeps
        as many as it has room for. The last member says whether that was too little."""
        wanted = self._of_all(routing_map)[:, self.own]
        experts, tokens = wanted.t().nonzero(as_tuple=True)
        kept = slice(None if budget is None else int(budget))
        counts = torch.bincount(experts[kept], minlength=wanted.shape[1])
        shape = (self.group.size() * len(routing_map), routing_map.shape[1])
        overflow = torch.tensor([len(tokens) > len(tokens[kept])])
        return (tokens[kept], experts[kept], counts, shape), overflow

    def combine_with_unpermute(
        self, *, hidden: torch.Tensor, handle: Any, probs: Any = None, **how: Any
    ) -> Any:
        noted(hidden, probs)
        (tokens, experts, _, shape), _ = handle
        sums = torch.zeros(shape[0], hidden.shape[1]).index_add_(0, tokens, hidden.float())
        weights = None
        if probs is not None:
            of_all = probs.new_zeros(shape)
            of_all[:, self.own][tokens, experts] = probs
            weights = self._added_up(of_all)
        return self._added_up(sums).to(hidden.dtype), weights


def install() -> None:
    """Lets core find the stand-in in this process, for good: a rank of a test."""
    package = ModuleType("deep_ep")
    package.HybridEPBuffer = HybridEPBuffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = package
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    found = importlib.reload(fused_a2a)
    for name in ("hybrid_ep_dispatch", "hybrid_ep_combine"):
        setattr(token_dispatcher, name, getattr(found, name))
