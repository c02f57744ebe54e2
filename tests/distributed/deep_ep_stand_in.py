"""A stand-in for the package `deep_ep`, on gloo: what its two buffers return, and none of its
kernels, streams or memory. With it core's flex dispatcher runs without a GPU.

`Buffer` is checked against DeepEP's `deep_ep/buffers/legacy.py` and the assertions of
`csrc/legacy/buffer.hpp` (main of 2026-08). Kinder than the real one: activations of any floating
type (DeepEP: bf16), of any width (a multiple of 16 bytes), and no buffer that is too small.
`HybridEPBuffer` is checked against `hybrid_ep_buffer.py` of the branch hybrid-ep, whose handle
has 11 members, of which core reads the last. Experts' rows are not padded to `pad_multiple` here.

Everything that the buffers are given is noted, so that a test can tell whose memory it was.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

GIVEN: list[torch.Tensor] = []
"""Tensors that the dispatcher handed over, in order."""


def matrices(x: torch.Tensor, *weights: torch.Tensor | None) -> None:
    """What DeepEP demands of activations (tokens, hidden) and of float32 weights (tokens, k)."""
    assert x.dim() == 2 and x.is_contiguous(), x.shape
    for one in weights:
        if one is not None:
            assert one.dim() == 2 and one.is_contiguous() and len(one) == len(x), one.shape
            assert one.dtype == torch.float32, one.dtype


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


class EventHandle:
    """Of a stream that has always finished."""


class EventOverlap:
    def __init__(self, event: Any = None) -> None:
        pass

    def current_stream_wait(self) -> None:
        pass


class Buffer:
    """DeepEP: a token goes once to each rank that has an expert of its, and experts take it from
    there."""

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def get_dispatch_config(size: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden, ranks: hidden * ranks,
            get_rdma_buffer_size_hint=lambda hidden, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(number: int) -> None:
        pass

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **how: Any) -> Any:
        noted(topk_idx)
        assert topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        size = self.group.size()
        experts = (topk_idx[..., None] == torch.arange(num_experts)).any(1)
        by_rank = experts.view(len(topk_idx), size, -1).any(-1)
        return by_rank.sum(0), None, experts.sum(0), by_rank, EventOverlap()

    def dispatch(self, x: torch.Tensor, handle: Any = None, topk_idx: Any = None,
                 topk_weights: Any = None, is_token_in_rank: Any = None,
                 num_tokens_per_expert: Any = None, **how: Any) -> Any:  # fmt: skip
        matrices(x, topk_weights)
        noted(x, topk_idx, topk_weights)
        assert (topk_idx is None) == (topk_weights is None)
        if handle is not None:
            assert topk_idx is None  # a route is used again without them
            return handle.there(x), None, None, None, None, EventOverlap()
        route = route_of(is_token_in_rank, self.group)
        here = num_tokens_per_expert.numel() // self.group.size()
        local = route.there(topk_idx) - here * self.group.rank()
        others = (local < 0) | (local >= here)
        weights = route.there(topk_weights).masked_fill(others, 0.0)
        local = local.masked_fill(others, -1)
        counts = [int((local == expert).sum()) for expert in range(here)]
        return route.there(x), local, weights, counts, route, EventOverlap()

    def combine(self, x: torch.Tensor, handle: Any, topk_weights: Any = None, **how: Any) -> Any:
        matrices(x, topk_weights)
        noted(x, topk_weights)
        weights = None if topk_weights is None else handle.back(topk_weights)
        return handle.back(x), weights, EventOverlap()


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
    package.Buffer, package.HybridEPBuffer = Buffer, HybridEPBuffer  # type: ignore[attr-defined]
    utils = ModuleType("deep_ep.utils")
    utils.EventHandle, utils.EventOverlap = EventHandle, EventOverlap  # type: ignore[attr-defined]
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    found = importlib.reload(fused_a2a)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch",
                 "hybrid_ep_combine"):  # fmt: skip
        setattr(token_dispatcher, name, getattr(found, name))
