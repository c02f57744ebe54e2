"""The engine's configuration: strategy, dtypes and overlap."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .comm.communicator import REDUCE_SCATTER, Reduce


@dataclass(frozen=True)
class Strategy:
    """The kinds of tensors that are sharded over the data-parallel axis (ZeRO, arXiv:1910.02054).

    Attributes:
        shard_weights: compute weights exist only while a unit uses them.
        shard_grads: main gradients exist as this rank's shard; every backward reduces.
        shard_main: main weights and optimizer state exist as this rank's shard.
    """

    name: str
    shard_weights: bool
    shard_grads: bool
    shard_main: bool

    def __post_init__(self) -> None:
        if self.shard_weights and not self.shard_grads:
            raise ValueError(
                f"strategy {self.name}: shard_weights=True with shard_grads=False: a unit that "
                "keeps gradients is resharded when they are reduced, which may be at the end of a "
                "backward. Shard gradients too, or change FsdpEngine.post_backward first"
            )
        if self.shard_grads and not self.shard_main:
            raise ValueError(
                f"strategy {self.name}: shard_grads=True with shard_main=False: main gradients are "
                "cut like main weights. Shard main weights too, or change group_shards and "
                "GradBuffers first"
            )


STRATEGIES: Mapping[str, Strategy] = {
    row.name: row
    for row in (
        Strategy("no_shard", shard_weights=False, shard_grads=False, shard_main=False),
        Strategy("optim", shard_weights=False, shard_grads=False, shard_main=True),
        Strategy("optim_grads", shard_weights=False, shard_grads=True, shard_main=True),
        Strategy("optim_grads_params", shard_weights=True, shard_grads=True, shard_main=True),
    )
}


OUTER_STRATEGIES: Mapping[str, bool] = {"no_shard": False, "optim": True}
"""Names of `outer_dp_sharding_strategy`: whether the outer axis splits main weights and optimizer
state again, under every row of `STRATEGIES`."""


def count_sharded(row: Strategy) -> int:
    """The number of kinds of tensors that `row` shards."""
    return row.shard_weights + row.shard_grads + row.shard_main


def strategy_named(name: str) -> Strategy:
    """The row called `name`; ValueError lists the rows."""
    if name not in STRATEGIES:
        raise ValueError(
            f"data_parallel_sharding_strategy={name!r}: unknown. Use one of {list(STRATEGIES)}"
        )
    return STRATEGIES[name]


POLICY_DTYPES = (None, torch.float32, torch.bfloat16)
FURTHER_DTYPES = (torch.float16, torch.float64)
"""Dtypes of gradients under `as_fsdp2` alone."""
TRAINED_DTYPES = (torch.float32, torch.bfloat16, *FURTHER_DTYPES)
"""Dtypes of parameters that may be trained."""

FIELDS_OF_TORCH = (
    "param_dtype",
    "reduce_dtype",
    "output_dtype",
    "cast_forward_inputs",
    "param_dtype_override_fn",
)
"""Fields of `torch.distributed.fsdp.MixedPrecisionPolicy`."""


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a model that `fully_shard_model` shards.

    Examples:
        >>> policy = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
        >>> model = fully_shard_model(nn.Linear(8, 4).bfloat16(), mixed_precision_policy=policy)
        >>> model.module.weight.dtype  # the main weight, which the optimizer updates
        torch.float32

    Attributes:
        main_params_dtype: dtype of the weights that the optimizer updates. None keeps the dtype of
            each parameter.
        main_grads_dtype: dtype in which gradients accumulate. None is float32.
        grad_comm_dtype: dtype in which gradients are sent. None is that of `main_grads_dtype`.
        compute_dtype: dtype of the weights with which modules compute, as `param_dtype` of FSDP2.
            None keeps the dtype of each parameter. Megatron's wrapper has no such option.
        as_fsdp2: True uses the dtypes of torch's FSDP2 for gradients; `fully_shard` sets it.
            Gradients accumulate in the dtype of their parameter. Without `grad_comm_dtype` they are
            sent in the dtype of backward. Sums are scaled in the dtype that was sent.
        since_torch_2_15: with `as_fsdp2`, True uses the dtypes of torch 2.15 and newer. Without
            `grad_comm_dtype` gradients are sent in the dtype of their parameter. They are cast to
            the dtype that is sent before they are added up, and to no narrower one.
        fp32_sums: True sums in float32 whatever dtype is sent, with `as_fsdp2` only.

    Raises:
        ValueError: a dtype that is not supported.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    as_fsdp2: bool = False
    since_torch_2_15: bool = False
    fp32_sums: bool = False

    def __new__(cls, *args: Any, **given: Any) -> MixedPrecisionPolicy:
        # Programs that change `from torch.distributed.fsdp import ...` often import the policy too.
        of_torch = [name for name in given if name in FIELDS_OF_TORCH]
        if of_torch:
            raise ValueError(
                f"{of_torch[0]}={given[of_torch[0]]}: is of torch's policy, which fully_shard "
                "takes. Import MixedPrecisionPolicy from torch.distributed.fsdp"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            if isinstance(dtype, bool):
                continue
            allowed = list(POLICY_DTYPES)
            if self.as_fsdp2:
                allowed += FURTHER_DTYPES
            elif name == "compute_dtype":
                allowed.append(torch.float16)
            if dtype not in allowed:
                raise ValueError(f"{name}={dtype}: unsupported. Use one of {allowed}")

    @property
    def grads_dtype(self) -> torch.dtype:
        return torch.float32 if self.main_grads_dtype is None else self.main_grads_dtype

    @property
    def comm_dtype(self) -> torch.dtype:
        return self.grads_dtype if self.grad_comm_dtype is None else self.grad_comm_dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which a reduction under `as_fsdp2` gives sums."""
        return torch.float32 if self.fp32_sums else self.comm_dtype

    def of_params(self, own: torch.dtype, computed: torch.dtype) -> MixedPrecisionPolicy:
        """The policy of trained parameters in the dtype `own`, with compute weights in the dtype
        `computed`."""
        if not self.as_fsdp2:
            return self
        comm = self.grad_comm_dtype or (own if self.since_torch_2_15 else computed)
        return replace(self, main_grads_dtype=own, grad_comm_dtype=comm)


POISON_VARIABLE = "MEGATRON_FSDP_ADAPTER_POISON"


def poison_asked() -> bool:
    """True if the environment asks for poisoned buffers. Raises ValueError for a value that is
    neither 0 nor 1. It is a variable so that any run can be repeated with it, unchanged."""
    value = os.environ.get(POISON_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(
            f"{POISON_VARIABLE}={value!r}: neither 0 nor 1. Use 1 to fill buffers with NaN, or 0"
        )
    return value == "1"


@dataclass(frozen=True)
class EngineConfig:
    """The options of one engine.

    Attributes:
        strategy: a row of `STRATEGIES`.
        domain_strategies: name of a domain and its row, for domains with another one.
        policy: dtypes of main weights, main gradients and gradient communication.
        overlap_grad_reduce: start a unit's reduction as soon as its backward is over.
        overlap_param_gather: gather a unit's weights while the unit before it computes.
        prefetch_bytes: weights, in bytes, that may be gathered ahead of the unit that computes;
            the next unit is gathered ahead whatever its size.
        reduce_scatter: how gradients are reduced where main weights are sharded.
        scale_before_sum: the domain's scale is applied to what is communicated. Otherwise it is
            applied to what came out of the reduction, which is smaller and rounds once.
        weight_slots, bucket_slots: gathered weights and reduce buckets are in fixed memory that
            units use in turn, where the strategy makes them transient at all.
        poison_buffers: buffers hold NaN whenever they are handed out or given back, to find reads
            of memory that was never written. For tests; on wherever the environment variable
            `MEGATRON_FSDP_ADAPTER_POISON` is 1.
        keep_derived: what backward derives from kept quantized weights (transposes) stays until
            main weights change, and not only until the unit has run.
        offload: main weights and optimizer state are in host memory. Main weights are not if they
            are compute weights too, or quantized ones are made of them (`MainWeights.is_on_host`).
        host_rows: main weights are in host memory, in the rows of parameters that are sharded
            already. So are the gradients that an optimizer reads, which steps there.
        shard_outer: main weights and optimizer state are split again over the outer axis of a
            domain that has one; otherwise its instances hold the same (HSDP).
        domain_shard_outer: name of a domain and its `shard_outer`, for domains with another one.
        even_rows: each parameter is split into rows as torch's `Shard(0)` splits it, so that its
            shard is a DTensor of torch's. Otherwise parameters are packed into few segments.
        units_switch: modules show unsharded parameters only while their own unit is unsharded.
            Otherwise all modules of the model do, from the start of a forward.
        whole: names of domains whose shard axis has one rank, in order. This rank has everything
            there: compute weights are kept, and backward adds to the main gradients. Those are
            released between steps, as shards are.
    """

    strategy: Strategy
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    domain_strategies: tuple[tuple[str, Strategy], ...] = ()
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    prefetch_bytes: int = 0
    reduce_scatter: Reduce = REDUCE_SCATTER
    scale_before_sum: bool = False
    shard_outer: bool = False
    domain_shard_outer: tuple[tuple[str, bool], ...] = ()
    keep_derived: bool = False
    offload: bool = False
    host_rows: bool = False
    even_rows: bool = False
    units_switch: bool = False
    whole: tuple[str, ...] = ()
    weight_slots: bool = False
    bucket_slots: bool = False
    poison_buffers: bool = field(default_factory=poison_asked)

    def __post_init__(self) -> None:
        if self.strategy.shard_grads and not self.overlap_grad_reduce:
            raise ValueError(
                f"overlap_grad_reduce=False with {self.strategy.name}: sharded gradients are "
                "reduced as each unit's backward ends. Set overlap_grad_reduce=True"
            )
        if self.strategy.shard_weights and not self.overlap_param_gather:
            raise ValueError(
                f"overlap_param_gather=False with {self.strategy.name}: sharded weights are "
                "gathered unit by unit. Set overlap_param_gather=True"
            )
        self._check_reduce_scatter()
        if self.keep_derived and self.strategy.shard_weights:
            raise ValueError(
                f"keep_derived=True with {self.strategy.name}: the transposes of all weights would "
                "stay whole on every rank. Set keep_derived=False, or keep the weights too"
            )

    def _check_reduce_scatter(self) -> None:
        chosen = self.reduce_scatter
        if not chosen.finishes or chosen.fixed:
            return
        comm = self.policy.comm_dtype
        grads = self.policy.grads_dtype
        rounds = grads == torch.float32 and comm != torch.float32
        has_shards = any(row.shard_main for row in self.strategies)
        if not has_shards or not rounds:
            raise ValueError(
                f"reduce_scatter={chosen.name} with {self.strategies_named}, communication in "
                f"{comm} and main gradients in {grads}: supports only a reduce-scatter of "
                "bfloat16 into float32. Set comm_dtype=torch.bfloat16 and "
                "grads_dtype=torch.float32"
            )

    @property
    def strategies(self) -> list[Strategy]:
        """The rows of all domains, each once; that of most domains first."""
        others = [row for _, row in self.domain_strategies]
        return list(dict.fromkeys([self.strategy, *others]))

    @property
    def strategies_named(self) -> str:
        """Names of the rows, for messages: "optim_grads_params (expert: optim)", for example."""
        others = []
        for domain, row in self.domain_strategies:
            if row != self.strategy:
                others.append(f"{domain}: {row.name}")
        return f"{self.strategy.name} ({', '.join(others)})" if others else self.strategy.name

    def of_domain(self, domain: str) -> EngineConfig:
        """This config with the strategy and the `shard_outer` of the domain of this name."""
        strategy = dict(self.domain_strategies).get(domain, self.strategy)
        shard_outer = dict(self.domain_shard_outer).get(domain, self.shard_outer)
        reduce_scatter = self.reduce_scatter
        # Ways to reduce that need shards are only for domains that have them.
        lacks_shards = not strategy.shard_main or (
            reduce_scatter.fixed and not strategy.shard_grads
        )
        if lacks_shards:
            reduce_scatter = REDUCE_SCATTER
        own = (strategy, shard_outer, reduce_scatter)
        if own == (self.strategy, self.shard_outer, self.reduce_scatter):
            return self
        return replace(
            self, strategy=strategy, shard_outer=shard_outer, reduce_scatter=reduce_scatter
        )

    def for_unit(self, strategy: Strategy | None) -> EngineConfig:
        """This config with a unit's own strategy; None for the engine's. Kept gradients are reduced
        by a plain reduce-scatter. Raises ValueError if the rows differ in `shard_main`."""
        if strategy is None or strategy == self.strategy:
            return self
        if strategy.shard_main != self.strategy.shard_main:
            raise ValueError(
                f"strategy {strategy.name} of a unit of a model with {self.strategy.name}: one of "
                "them shards main weights and the other does not. Choose rows with the same "
                "shard_main"
            )
        reduce_scatter = self.reduce_scatter if strategy.shard_grads else REDUCE_SCATTER
        return replace(self, strategy=strategy, reduce_scatter=reduce_scatter)

    def for_group(
        self,
        strategy: Strategy | None,
        domain: str,
        policy: MixedPrecisionPolicy | None = None,
        in_bucket: bool = False,
    ) -> EngineConfig:
        """`for_unit`, for the unit's groups in the domain of this name. Of the unit's strategy and
        the domain's, that counts which shards less. A domain of one rank communicates nothing over
        its shard axis, so nothing is cast or made ready for that.

        policy: of these groups; None for the engine's. in_bucket: a domain of one rank collects
            gradients in buckets all the same."""
        policy = policy or self.policy
        own = self.of_domain(domain)
        if domain not in self.whole:
            if strategy is not None and self.domain_strategies:
                strategy = min(strategy, own.strategy, key=count_sharded)
            return replace(own.for_unit(strategy), policy=policy)
        if in_bucket:
            return replace(own.for_unit(STRATEGIES["optim_grads"]), policy=policy)
        return replace(
            own.for_unit(STRATEGIES["optim"]),
            policy=replace(policy, grad_comm_dtype=None),
            reduce_scatter=REDUCE_SCATTER,
        )

    @property
    def has_buckets(self) -> bool:
        """True if gradients are reduced from buffers that come and go."""
        return self.strategy.shard_grads or self.policy.comm_dtype != self.policy.grads_dtype

    @property
    def narrows_buckets(self) -> bool:
        """True if buckets may hold gradients in the dtype that autograd gives them, where that is
        narrower than the communication dtype. The sums do not change: they are in float32, as if
        each gradient had been cast before, and scaling comes after them."""
        return self.reduce_scatter.finishes and not self.scale_before_sum


def forced_overlaps(*strategies: Strategy) -> dict[str, bool]:
    """The DDP config fields that any of `strategies` needs set, and their values."""
    forced = {}
    if any(row.shard_grads for row in strategies):
        forced["overlap_grad_reduce"] = True
    if any(row.shard_weights for row in strategies):
        forced["overlap_param_gather"] = True
    return forced
