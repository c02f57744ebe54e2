"""A stand-in for HybridEP of the package `deep_ep`, on gloo: what its buffer returns, and none of
its kernels, streams or memory. With it core's flex dispatcher runs without a GPU.

Checked against `hybrid_ep_buffer.py` of the branch hybrid-ep, whose handle has 11 members, of which
core reads the last. Experts' rows are not padded to `pad_multiple` here. Everything that the buffer
is given is noted, so that a test can tell whose memory it was.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

GIVEN: list[torch.Tensor] = []
"""Tensors that the dispatcher handed over, in order."""


def noted(*tensors: torch.Tensor | None) -> None:
    GIVEN.extend(tensor.detach() for tensor in tensors if tensor is not None)


def exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> Any:
    """Rows of all ranks that go to this one, in rank order."""
    found = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


@dataclass(frozen=True)
class Route:
    """Which tokens (indices) this rank sends, in the order of the ranks that get them, how many to
    each, and how many it gets from each."""

    tokens: torch.Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int
    group: Any

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """A row for each token -> those that this rank gets."""
        return exchanged(rows[self.tokens], self.sent, self.received, self.group)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """The reverse: rows of a token are added up."""
        found = exchanged(rows, self.received, self.sent, self.group)
        sums = rows.new_zeros((self.num_tokens, *rows.shape[1:]), dtype=torch.float32)
        return sums.index_add_(0, self.tokens, found.float()).to(rows.dtype)


def route_of(wanted: torch.Tensor, group: Any) -> Route:
    """wanted: (tokens, ranks), true where a rank is to get a token."""
    tokens = torch.cat([column.nonzero().view(-1) for column in wanted.unbind(1)])
    sent = wanted.sum(0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return Route(tokens, sent.tolist(), received.tolist(), wanted.shape[0], group)


class HybridEPBuffer:
    """HybridEP: a token goes to each of its experts, in the experts' order, with its weight."""

    def __init__(self, group: Any, num_local_experts: int, **sizes: Any) -> None:
        self.group, self.num_local_experts = group, num_local_experts

    def dispatch_with_permute(self, *, hidden: torch.Tensor, routing_map: Any = None,
                              probs: Any = None, handle: Any = None,
                              num_permuted_tokens: Any = None, pad_multiple: Any = None,
                              **how: Any) -> Any:  # fmt: skip
        assert routing_map is None or routing_map.dtype == torch.bool
        assert pad_multiple is None
        noted(hidden, routing_map, probs)
        if handle is None:
            assert len(hidden) == len(routing_map)
            handle = self._handle(routing_map, num_permuted_tokens)
        (route, order, kept, counts, shape), _ = handle
        rows = hidden.repeat_interleave(shape[1], 0)
        weights = None if probs is None else route.there(probs.reshape(-1))[order][kept]
        return route.there(rows)[order][kept], weights, None, counts, handle

    def _handle(self, routing_map: torch.Tensor, budget: int | None) -> Any:
        """Rows are (token, expert) pairs; `order` sorts what this rank gets by expert, of which it
        keeps as many as it has room for. The last member says whether that was too little."""
        tokens, experts = routing_map.shape
        pairs = routing_map.reshape(-1)
        by_rank = torch.arange(experts) // self.num_local_experts
        wanted = torch.zeros(tokens * experts, self.group.size(), dtype=torch.bool)
        wanted[torch.arange(tokens * experts), by_rank.repeat(tokens)] = pairs.bool()
        route = route_of(wanted, self.group)
        expert = route.there((torch.arange(experts) % self.num_local_experts).repeat(tokens))
        order = expert.argsort(stable=True)
        kept = slice(0, len(order) if budget is None else int(budget))
        counts = torch.bincount(expert[order][kept], minlength=self.num_local_experts)
        overflow = torch.tensor([len(order) > len(order[kept])])
        return (route, order, kept, counts, (tokens, experts)), overflow

    def combine_with_unpermute(self, *, hidden: torch.Tensor, handle: Any, probs: Any = None,
                               **how: Any) -> Any:  # fmt: skip
        noted(hidden, probs)
        (route, order, kept, _, (tokens, experts)), _ = handle

        def back(rows: torch.Tensor) -> torch.Tensor:
            found = rows.new_zeros((len(order), *rows.shape[1:]))
            found[order[kept]] = rows
            return route.back(found).view(tokens, experts, *rows.shape[1:])

        return back(hidden).sum(1), None if probs is None else back(probs)


def install() -> None:
    """Lets core find the stand-in in this process, for good: a rank of a test."""
    package = ModuleType("deep_ep")
    package.HybridEPBuffer = HybridEPBuffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = package
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    found = importlib.reload(fused_a2a)
    for name in ("hybrid_ep_dispatch", "hybrid_ep_combine"):
        setattr(token_dispatcher, name, getattr(found, name))
