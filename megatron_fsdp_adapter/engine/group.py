"""One group of parameters: its layout and its three buffers.

                 no_shard       optim            optim_grads      optim_grads_params
    weight       full, kept     full, kept       full, kept       full, while gathered
    main         full           shard            shard            shard
    grad         full, kept     full, kept       shard, released  shard, released
    bucket       is grad        is grad          full, transient  full, transient

`weight` is in the compute dtype and holds the raw parameters. `main` is what the optimizer
updates; where its dtype is the weights' and the weights are kept, it *is* this rank's slice of
them. Backward writes gradients into `bucket`, the reduction moves them to `grad`, and the
optimizer reads this rank's rows of `grad`.
"""

from __future__ import annotations

import enum

import torch

from megatron_fsdp_adapter.config import EngineConfig
from megatron_fsdp_adapter.layout.planner import plan_group
from megatron_fsdp_adapter.layout.ranges import FlatRange
from megatron_fsdp_adapter.runtime.device import Runtime
from megatron_fsdp_adapter.topology import ShardDomain

from .buffer import (
    FlatBuffer,
    full_items,
    local_items_in_full,
    local_items_in_shard,
    own_ranges,
    shard_ranges,
)
from .guard import unchecked
from .partition import GroupKey, ManagedParam


class GradState(enum.Enum):
    """Where the step's gradients are: nowhere yet, summed on this rank, or reduced."""

    EMPTY = "empty"
    ACCUMULATED = "accumulated"
    REDUCED = "reduced"


class ParamGroup:
    """The parameters of one unit that share domain, dtype and `requires_grad`.

    Construction moves the parameters' values into the group's buffers and makes each raw
    parameter's `.data` a view of `weight` for life. Afterwards the weights are present (the
    caller releases them).

    Attributes:
        params: raw parameters, in layout order; `managed[i]` tells their names and places.
        own_weights, main_segments: this rank's slice of each segment, of equal shapes.
        main_items: this rank's rows of each parameter, in the main dtype.
        grad_segments, grad_items: the same for gradients; valid between reduction and zeroing.
        bucket_items: full-size views that backward's gradients are written to.
    """

    def __init__(
        self,
        name: str,
        key: GroupKey,
        managed: list[ManagedParam],
        domain: ShardDomain,
        config: EngineConfig,
        runtime: Runtime,
    ) -> None:
        self.name, self.key, self.domain, self.config = name, key, domain, config
        self.managed = managed
        self.params = [entry.param for entry in managed]
        self.rank = domain.axis.rank
        self.layout = plan_group(
            [entry.spec(index) for index, entry in enumerate(managed)],
            domain.axis.size,
            padding_bound=config.padding_bound,
            max_segments=config.max_segments,
        )
        self.grad_state = GradState.EMPTY
        with torch.no_grad():
            self._build_weights(runtime)
            self._build_main(runtime)
            if key.requires_grad:
                self._build_grads(runtime)

    @property
    def main_dtype(self) -> torch.dtype:
        """Frozen parameters have no optimizer, so their main weights stay in compute dtype."""
        return self.config.policy.main_params_dtype if self.key.requires_grad else self.key.dtype

    @property
    def main_is_weight(self) -> bool:
        """Whether the main weights are a slice of the kept compute weights."""
        return self.main_dtype == self.key.dtype and not self.config.strategy.shard_weights

    def _build_weights(self, runtime: Runtime) -> None:
        self.weight = FlatBuffer(self.layout.total_numel, self.key.dtype, runtime)
        self.weight_items = full_items(self.weight, self.layout)
        self.own_weights = self.weight.views(self._held_ranges())
        self.gather_pairs = list(
            zip(
                self.weight.views([segment.range for segment in self.layout.segments]),
                self.weight.views(own_ranges(self.layout, self.rank)),
                strict=True,
            )
        )
        for param, view in zip(self.params, self.weight_items, strict=True):
            view.copy_(param.data)
            param.data = view

    def _held_ranges(self) -> list[FlatRange]:
        """What of the full buffer this rank's main weights cover."""
        if self.config.strategy.shard_main:
            return own_ranges(self.layout, self.rank)
        return [segment.range for segment in self.layout.segments]

    def _build_main(self, runtime: Runtime) -> None:
        if self.main_is_weight:
            self.main = self.weight
            self.main_segments = self.own_weights
        elif self.config.strategy.shard_main:
            self.main = FlatBuffer(self.layout.shard_numel, self.main_dtype, runtime)
            self.main_segments = self.main.views(shard_ranges(self.layout, self.rank))
        else:
            self.main = FlatBuffer(self.layout.total_numel, self.main_dtype, runtime)
            self.main_segments = self.main.views(self._held_ranges())
        self.main_items = self._optimizer_items(self.main, self.main_is_weight)
        if not self.main_is_weight:
            torch._foreach_copy_(self.main_segments, self.own_weights)

    def _optimizer_items(self, buffer: FlatBuffer, full_buffer: bool) -> list[torch.Tensor]:
        if not self.config.strategy.shard_main:
            return full_items(buffer, self.layout)
        if full_buffer:
            return local_items_in_full(buffer, self.layout, self.rank)
        return local_items_in_shard(buffer, self.layout, self.rank)

    def _build_grads(self, runtime: Runtime) -> None:
        strategy, policy = self.config.strategy, self.config.policy
        if strategy.shard_grads:
            self.bucket = FlatBuffer(self.layout.total_numel, policy.comm_dtype, runtime)
            self.grad = FlatBuffer(self.layout.shard_numel, policy.grads_dtype, runtime)
            self.grad_segments = self.grad.views(shard_ranges(self.layout, self.rank))
        else:
            self.bucket = FlatBuffer(self.layout.total_numel, policy.grads_dtype, runtime)
            self.grad = self.bucket
            self.grad_segments = self.grad.views(self._held_ranges())
        self.grad_items = self._optimizer_items(self.grad, not strategy.shard_grads)
        self.bucket_items = full_items(self.bucket, self.layout)
        self.bucket_gaps = self.bucket.views(self.layout.gaps())
        self.bucket_segments = self.bucket.views([s.range for s in self.layout.segments])
        self.bucket_own = self.bucket.views(own_ranges(self.layout, self.rank))
        if strategy.shard_grads:
            self.bucket.release()
            self.grad.release()

    def write_own_weights(self) -> None:
        """Casts the main weights into this rank's slice of the compute weights."""
        if not self.main_is_weight:
            torch._foreach_copy_(self.own_weights, self.main_segments)

    def take_grads(self, accumulate: bool) -> None:
        """Moves the raw parameters' `.grad` into the bucket and drops them.

        A parameter without a gradient contributes zero. `accumulate` adds to what the bucket
        holds, else its contents are replaced.
        """
        with unchecked():
            every = [param.grad for param in self.params]
            for param in self.params:
                param.grad = None
        targets = [v for v, grad in zip(self.bucket_items, every, strict=True) if grad is not None]
        grads = [grad for grad in every if grad is not None]
        if accumulate:
            if targets:
                torch._foreach_add_(targets, grads)
        else:
            missing = [v for v, grad in zip(self.bucket_items, every, strict=True) if grad is None]
            if targets:
                torch._foreach_copy_(targets, grads)
            if missing or self.bucket_gaps:
                torch._foreach_zero_(missing + self.bucket_gaps)

    def drop_grads(self) -> None:
        """Forgets the step's gradients, whatever state they are in."""
        with unchecked():
            for param in self.params:
                param.grad = None
        self.grad_state = GradState.EMPTY
        if self.key.requires_grad and self.config.strategy.shard_grads:
            self.bucket.release()
            self.grad.release()
