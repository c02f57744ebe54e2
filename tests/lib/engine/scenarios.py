"""The table of scenarios: models on an engine, what happens to them, and what is expected.

Each question is one test over all rows: of order in `test_engine_orders.py`, of schedules in
`test_engine_traces.py`, of weights, memory, host calls and recovery in `test_engine_scenarios.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from tests.lib.engine.events import EVENTS
from tests.lib.engine.small_model import Setup
from tests.lib.quantized.emulated import RECIPES

ZERO_0, ZERO_1, ZERO_2, ZERO_3, *_ = STRATEGIES
FP32 = torch.float32
BF16 = torch.bfloat16


MIXED = ("microbatches", "evaluation_between", "layer_twice", "backward_raises")
BY_TENSOR_AND_BLOCK = ("current", "mxfp8")
"""Recipes that see more events by default. With --full all see all."""


@dataclass(frozen=True)
class Scenario:
    """A model, its engine and its loop, and what happens to it."""

    # Of `Setup`, beside the strategy.
    options: dict[str, Any] = field(default_factory=dict)
    # Names of `EVENTS`, each on a model of its own.
    events: tuple[str, ...] = MIXED
    # That it is asked under.
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    # Options that change no bit of the weights.
    like: dict[str, Any] = field(default_factory=dict)
    # Events that sum gradients in another order than autograd, as the nested backwards of a
    # reentrant recomputation add to `.grad` one by one; None if autograd alone, on one rank in
    # float32, is no comparison at all.
    apart: tuple[str, ...] | None = ()
    # How many units more than three may have gathered weights at once.
    weights: int = 0
    # Asked with --full only.
    rare: bool = False

    def setup(self, strategy: str, **changes: Any) -> Setup:
        return Setup(strategy, **(self.options | changes))


APART = ("further_backwards", "gathered_while_shown")
ONE_AFTER_ANOTHER = tuple(event for event in EVENTS if event not in APART)
SHARDED = tuple(name for name, row in STRATEGIES.items() if row.shard_grads)
REDUCED = tuple(name for name, row in STRATEGIES.items() if row.shard_main)
ONE_RANK_EACH = {"split": True, "whole": True}
"""Two ranks share a layer; one map of each layer has a domain of one rank."""
TWO_DOMAINS = {"split": True, "world": 4, "rank": 1}
INSTANCES = {"outer": 2, "shard_outer": True, "world": 4, "rank": 1}
FUSED = {"fused": WgradProtocol.OVERWRITES}
ADDING = {"fused": WgradProtocol.ACCUMULATES}
EARLY = {"fused": WgradProtocol.OVERWRITES_EARLY}
SLOTS = {"slots": True}
EXCHANGE = {"slots": True, "exchange": True}
NO_EXCHANGE = {"exchange": False}
RECOMPUTED = {"recompute": "non_reentrant"}
JOINED = {"joined": 150, "layers": 5}
FAR = {"prefetch_bytes": 1 << 20}
FP32_SUMS = {"comm_dtype": BF16, "fp32_sums": True}
REPLICAS = {"outer": 2, "world": 4, "rank": 1}
ALONE = {"world": 1, "whole": True}
NONE_KEPT: dict[str, Any] = {"own": ()}
ONLY_ZERO_3 = (ZERO_3,)
PLAIN = ("microbatches", "evaluation_between")
KEPT = {"own": (ZERO_1, ZERO_3, ZERO_2, ZERO_3, ZERO_1)}
"""Strategies of units in turn, of a model that shards weights: some keep them, gradients too."""
TWICE = ("layer_twice",)
TOGETHER = ("microbatches", "evaluation_between", "gradients_late", "layer_twice")
SAID = ("steps", "microbatches", "evaluation_between", "weights_loaded", "forwards_in_flight",
        "layers_skipped", "zero_before_finish", "evaluations_before_the_step",
        "no_step_follows", "layers_left_out")  # fmt: skip
"""In which the loop says that it writes main weights, as Megatron's does."""
MORE_AT_ONCE = {
    "steps_with_full_sync": 4, "forwards_in_flight": 1, "forward_raises": 1, "layers_skipped": 1,
    "forward_without_backward": 1, "inner_module_called": 1, "layer_again_later": 1,
    "evaluations_before_the_step": 1, "exports": 1, "further_backwards": 1,
}  # fmt: skip
"""The unit that ended the last forward is kept for the backward that normally comes next. When that
does not come next, or another layer came last, it is one more. A sync with `wait` gathers all."""

rare = functools.partial(Scenario, rare=True)
"""A row that is asked with --full only."""

SCENARIOS: dict[str, Scenario] = {}
for event in ONE_AFTER_ANOTHER:
    SCENARIOS[event] = Scenario(events=(event,), weights=MORE_AT_ONCE.get(event, 0))
SCENARIOS["further_backwards"] = Scenario(
    events=("further_backwards",), strategies=SHARDED, weights=1, apart=("further_backwards",)
)

# models
SCENARIOS["tied"] = Scenario({"tied": True})
SCENARIOS["no_root"] = Scenario({"root_norm": False}, MIXED[:2])
SCENARIOS["frozen"] = Scenario({"frozen": True}, ("microbatches", "backward_raises"))
SCENARIOS["one_unit"] = Scenario({"one_unit": True}, ("steps", "microbatches"))
SCENARIOS["many_layers"] = Scenario({"layers": 12}, ("microbatches",), SHARDED)
SCENARIOS["reentrant"] = Scenario({"recompute": "reentrant"}, apart=TWICE)
SCENARIOS["non_reentrant"] = Scenario(RECOMPUTED)
SCENARIOS["selective"] = Scenario({"recompute": "selective"})
SCENARIOS["overwrites"] = Scenario(FUSED, apart=TWICE)
SCENARIOS["overwrites_early"] = Scenario(EARLY, apart=TWICE)
SCENARIOS["accumulates"] = Scenario(ADDING, apart=TWICE)
for name, options in (
    ("", FUSED),
    ("_adding", ADDING),
    ("_early", EARLY),
):
    SCENARIOS[f"operations{name}"] = Scenario(
        options | {"operations": True},
        PLAIN,
        like={"operations": False},
        rare=bool(name),
    )
SCENARIOS["fused_recompute"] = rare(FUSED | RECOMPUTED, apart=TWICE)

# With one microbatch a step, so that gradients are added up in one order.
SCENARIOS["any_strategy"] = Scenario(
    {}, ("steps", "layers_skipped", "weights_loaded"), REDUCED, like={"strategy": ZERO_3}
)

# when things are launched, and where
SCENARIOS["far_prefetch"] = Scenario(FAR, like={"prefetch_bytes": 0}, weights=4)
SCENARIOS["no_overlap"] = Scenario({"overlap": False}, like={"overlap": True})
SCENARIOS["checked"] = Scenario({"check_by": "parameter"}, MIXED[:1], like={"check_by": None})
SCENARIOS["slots"] = Scenario(SLOTS, (*MIXED, "forwards_in_flight"), like={"slots": False})
SCENARIOS["slots_far_prefetch"] = rare(SLOTS | FAR, weights=4)
SCENARIOS["slots_fused"] = rare(SLOTS | FUSED, apart=TWICE)
SCENARIOS["slots_recompute"] = rare(SLOTS | RECOMPUTED)
SCENARIOS["slots_two_domains"] = rare(SLOTS | TWO_DOMAINS)
SCENARIOS["joined"] = Scenario(JOINED, (*MIXED, "layers_skipped"), weights=2)
SCENARIOS["joined_slots"] = rare(JOINED | {"slots": True, "comm_dtype": BF16})
SCENARIOS["joined_recompute"] = rare(JOINED | {"recompute": "reentrant"}, apart=TWICE)

# dtypes
SCENARIOS["bf16_comm"] = Scenario({"comm_dtype": BF16}, MIXED[:1])
SCENARIOS["bf16_grads"] = Scenario({"main_grads": BF16}, MIXED[:1])
SCENARIOS["bf16_grads_fp32_comm"] = Scenario({"main_grads": BF16, "comm_dtype": FP32}, MIXED[:1])
SCENARIOS["own_main"] = Scenario({"main_params": None}, MIXED[:1])
SCENARIOS["fp32"] = Scenario({"dtype": FP32, "world": 3}, (*MIXED, "weights_loaded"))
SCENARIOS["fp32_sums"] = Scenario(FP32_SUMS, strategies=REDUCED)
SCENARIOS["fp32_sums_instances"] = rare(
    FP32_SUMS | REPLICAS,
    strategies=REDUCED,
)
SCENARIOS["scaled_before"] = Scenario(
    {"scale_before_sum": True, "world": 4, "dtype": FP32},
    MIXED[:1],
    like={"scale_before_sum": False},
)

# copy engines, whose buckets are as narrow as the gradients
SCENARIOS["exchange"] = Scenario(
    EXCHANGE,
    (*MIXED, "gradients_late"),
    SHARDED,
    like=NO_EXCHANGE,
)
SCENARIOS["exchange_fused"] = rare(
    EXCHANGE | FUSED,
    strategies=SHARDED,
    like=NO_EXCHANGE,
    apart=TWICE,
)
SCENARIOS["exchange_tied"] = rare(
    {"slots": True, "exchange": True, "tied": True},
    strategies=SHARDED,
    like=NO_EXCHANGE,
)
SCENARIOS["exchange_bf16_grads"] = rare(
    {"slots": True, "exchange": True, "main_grads": BF16, "comm_dtype": FP32},
    strategies=SHARDED,
    like=NO_EXCHANGE,
)
SCENARIOS["exchange_two_domains"] = rare(
    EXCHANGE | TWO_DOMAINS,
    strategies=SHARDED,
    like=NO_EXCHANGE,
)

# ranks
SCENARIOS["alone"] = Scenario(ALONE, (*TOGETHER, "weights_written"), SHARDED)
SCENARIOS["alone_scaled"] = Scenario(
    {"world": 1, "whole": True, "grad_scale": 0.5, "one_unit": True},
    ("further_backwards",),
    SHARDED,
    apart=None,
)
SCENARIOS["two_domains"] = Scenario(TWO_DOMAINS)
SCENARIOS["fused_two_domains"] = rare(FUSED | TWO_DOMAINS, apart=TWICE)
SCENARIOS["two_instances"] = Scenario(REPLICAS)
SCENARIOS["sharded_instances"] = Scenario({"outer": 2, "shard_outer": True, "world": 6, "rank": 4})
SCENARIOS["instances_far_prefetch"] = Scenario(
    INSTANCES | {"prefetch_bytes": 2560}, ("evaluation_between", "weights_loaded"), weights=1
)
SCENARIOS["shared_instances"] = Scenario(
    {"split": True, "outer": 2, "shard_outer": True, "world": 8, "rank": 6}
)
SCENARIOS["kept_parts"] = Scenario(
    {"kept_over": 2, "world": 4, "rank": 1}, (*MIXED, "weights_written"), ONLY_ZERO_3
)
SCENARIOS["whole"] = Scenario(
    ONE_RANK_EACH,
    (*TOGETHER, "further_backwards"),
    SHARDED,
    like={"whole": False},
    apart=("further_backwards",),
)
SCENARIOS["whole_scaled_before"] = rare(
    ONE_RANK_EACH | {"scale_before_sum": True},
    TOGETHER,
    SHARDED,
    like={"whole": False},
)
SCENARIOS["whole_slots"] = rare(
    ONE_RANK_EACH | {"slots": True, "comm_dtype": BF16}, strategies=SHARDED
)
SCENARIOS["whole_exchange"] = rare(ONE_RANK_EACH | EXCHANGE, strategies=SHARDED)
SCENARIOS["whole_fused"] = rare(ONE_RANK_EACH | ADDING, strategies=SHARDED, apart=TWICE)
SCENARIOS["whole_overwrites"] = rare(ONE_RANK_EACH | FUSED, strategies=SHARDED, apart=TWICE)
SCENARIOS["whole_recompute"] = rare(ONE_RANK_EACH | RECOMPUTED, strategies=SHARDED)
SCENARIOS["whole_kept"] = rare(ONE_RANK_EACH | KEPT, strategies=ONLY_ZERO_3)
SCENARIOS["whole_instances"] = rare(ONE_RANK_EACH | INSTANCES, strategies=SHARDED)
SCENARIOS["whole_replicas"] = rare(ONE_RANK_EACH | REPLICAS, strategies=SHARDED)

# domains with strategies of their own
for name in STRATEGIES:
    others = tuple(other for other in STRATEGIES if other != name)
    split = TWO_DOMAINS | {"split_strategy": name}
    SCENARIOS[f"split_{name}"] = Scenario(split, PLAIN, others)
    SCENARIOS[f"split_{name}_mixed"] = rare(split, (*MIXED[2:], "gradients_late"), others)
    SCENARIOS[f"split_{name}_slots"] = rare(split | SLOTS, (*MIXED, "exports"), others)
    SCENARIOS[f"split_{name}_adding"] = rare(split | ADDING, strategies=others, apart=TWICE)
    SCENARIOS[f"split_{name}_recompute"] = rare(split | RECOMPUTED, strategies=others)
    SCENARIOS[f"split_{name}_instances"] = rare(split | INSTANCES, strategies=others)
    untold = tuple(other for other in others if {name, other} & {*SHARDED})
    SCENARIOS[f"split_{name}_untold"] = rare(
        split | {"told": False}, strategies=untold, like={"told": True}
    )

# sums in float32, and copy engines, of the domain alone that has shards
for name in REDUCED:
    split = TWO_DOMAINS | {"split_strategy": name}
    SCENARIOS[f"split_{name}_sums"] = rare(split | FP32_SUMS, strategies=("no_shard",))
    if name in SHARDED:
        SCENARIOS[f"split_{name}_exchange"] = rare(
            split | EXCHANGE, strategies=("no_shard", "optim")
        )

# domains with instances of their own
APART_INSTANCES = {
    "one": {"outer": 2, "shard_outer": True, "split_outer": 1},
    "parts": {"split_outer": 2, "split_shard_outer": True},
    "replicas": {"outer": 2, "shard_outer": True, "split_shard_outer": False},
}
for name, options in APART_INSTANCES.items():
    split = {"split": True, "world": 8, "rank": 5} | options
    SCENARIOS[f"split_into_{name}"] = Scenario(split, PLAIN, ONLY_ZERO_3)
    SCENARIOS[f"split_into_{name}_all"] = rare(split)
    SCENARIOS[f"split_into_{name}_fused"] = rare(split | FUSED, apart=TWICE)
    SCENARIOS[f"split_into_{name}_untold"] = rare(split | {"told": False}, PLAIN, SHARDED)
    for other in STRATEGIES:
        SCENARIOS[f"split_into_{name}_{other}"] = rare(split | {"split_strategy": other}, PLAIN)

# units that keep weights, or gradients too
SCENARIOS["kept"] = Scenario(KEPT, (*MIXED, "gradients_late"), ONLY_ZERO_3)
SCENARIOS["kept_weights"] = Scenario(
    {"own": (ZERO_2, ZERO_3)}, strategies=ONLY_ZERO_3, like=NONE_KEPT
)
SCENARIOS["kept_weights_slots"] = Scenario(
    {"own": (ZERO_2,), "slots": True}, strategies=ONLY_ZERO_3, like=NONE_KEPT
)
SCENARIOS["kept_gradients"] = Scenario(
    {"own": (ZERO_1,), "slots": True, "exchange": True},
    PLAIN,
    ONLY_ZERO_3,
    like={"own": (), "strategy": ZERO_1, "exchange": False},
)
SCENARIOS["kept_untold"] = Scenario(
    KEPT | {"told": False}, strategies=ONLY_ZERO_3, like={"told": True}
)
SCENARIOS["kept_slots"] = rare(KEPT | SLOTS, strategies=ONLY_ZERO_3)
SCENARIOS["kept_bf16_comm"] = Scenario(
    KEPT | {"slots": True, "comm_dtype": BF16}, strategies=ONLY_ZERO_3
)
SCENARIOS["kept_exchange"] = rare(
    KEPT | EXCHANGE,
    strategies=ONLY_ZERO_3,
    like=NO_EXCHANGE,
)
SCENARIOS["kept_fused"] = rare(KEPT | ADDING, strategies=ONLY_ZERO_3, apart=TWICE)

# units that are to keep them once the engine is made
SCENARIOS["found_weights"] = Scenario(
    {"found": (ZERO_2, ZERO_3)}, (*MIXED, "gradients_late"), ONLY_ZERO_3, like={"found": ()}
)
SCENARIOS["found_gradients"] = Scenario(
    {"found": (ZERO_1,)},
    PLAIN,
    ONLY_ZERO_3,
    like={"found": (), "strategy": ZERO_1},
)
for name, options, apart in (
    ("", {}, ()),
    ("_fused", FUSED, TWICE),
    ("_adding", ADDING, TWICE),
    ("_recompute", RECOMPUTED, ()),
    ("_instances", INSTANCES, ()),
    ("_early", EARLY, TWICE),
):
    SCENARIOS[f"found{name}"] = Scenario(
        {"found": KEPT["own"]} | options,
        strategies=ONLY_ZERO_3,
        like={"found": (), "own": KEPT["own"]},
        apart=apart,
        rare=bool(name),
    )
SCENARIOS["kept_recompute"] = rare(KEPT | RECOMPUTED, strategies=ONLY_ZERO_3)
SCENARIOS["kept_instances"] = rare(KEPT | INSTANCES, strategies=ONLY_ZERO_3)

# a schedule that takes passes apart
SCHEDULED_WITH: dict[str, dict[str, Any]] = {
    "": {},
    "_tied": {"tied": True},
    "_frozen": {"frozen": True},
    "_odd": {"layers": 3},
    "_no_overlap": {"overlap": False},
    "_selective": {"recompute": "selective"},
    "_fused": FUSED,
    "_current": {"recipe": "current"},
    "_mxfp8": {"recipe": "mxfp8"},
}
for name, options in SCHEDULED_WITH.items():
    SCENARIOS[f"scheduled{name}"] = Scenario(
        {"scheduled": True} | options,
        ("microbatches", "steps", "evaluation_between"),
        like={"scheduled": False},
        weights=1,
        apart=None,
        rare=bool(name),
    )

# layers with a stream of their own
BESIDE: dict[str, dict[str, Any]] = {
    "": {},
    "_slots": SLOTS,
    "_recompute": RECOMPUTED,
    "_two_domains": TWO_DOMAINS,
}
for kind in ("dispatched", "computed", "reordered"):
    like = {"side": kind if kind == "computed" else None}
    for name, options in BESIDE.items():
        SCENARIOS[f"{kind}{name}"] = Scenario(
            {"side": kind} | options,
            ("microbatches", "evaluation_between", "forwards_in_flight"),
            like=like,
            apart=None,
            weights=1,
            rare=bool(name),
        )

# main weights and the state of Adam in host memory
OFFLOADED_WITH: dict[str, dict[str, Any]] = {
    "": {},
    "_fp32": {"dtype": FP32},
    "_frozen": {"frozen": True},
    "_tied": {"tied": True},
    "_split": {"split": True},
    "_slots": SLOTS,
    "_instances": INSTANCES,
    "_bf16_main": {"main_params": BF16},
    "_current": {"recipe": "current"},
}
for name, options in OFFLOADED_WITH.items():
    SCENARIOS[f"offload{name}"] = Scenario(
        {"adam": True, "offload": True} | options,
        ("steps",) if name else SAID,
        like={"offload": False},
        apart=None,
        weights=1,
        rare=bool(name),
    )

# quantized weights
for recipe in RECIPES:
    seen: tuple[str, ...] = ("steps", "microbatches")
    if recipe in BY_TENSOR_AND_BLOCK:
        seen = ("steps", "exports", "weights_loaded", *MIXED)
    SCENARIOS[recipe] = Scenario({"recipe": recipe}, seen, weights=1)
for recipe in RECIPES:
    SCENARIOS[f"{recipe}_in_all"] = rare({"recipe": recipe}, ONE_AFTER_ANOTHER, apart=None)
for recipe, protocol in (
    ("current", WgradProtocol.OVERWRITES),
    ("mxfp8", WgradProtocol.OVERWRITES_EARLY),
    ("block128", WgradProtocol.ACCUMULATES),
):
    SCENARIOS[f"{recipe}_{protocol.value}"] = Scenario(
        {"recipe": recipe, "fused": protocol}, apart=TWICE, weights=1
    )
SCENARIOS["mxfp8_shown"] = Scenario({"recipe": "mxfp8"}, ("gathered_while_shown",), apart=None)

# quantized weights, and what else changes how they are gathered
QUANTIZED_WITH = ("tied", "frozen", "non_reentrant", "two_instances")
RARELY_QUANTIZED_WITH = (
    "selective", "slots", "two_domains", "far_prefetch", "reentrant", "shared_instances",
    "slots_recompute",
)  # fmt: skip
for name in (*QUANTIZED_WITH, *RARELY_QUANTIZED_WITH):
    for strategy, recipe in ((ZERO_1, "block128"), (ZERO_3, "mxfp8"), (ZERO_3, "current")):
        options = SCENARIOS[name].options | {"recipe": recipe}
        rarely = name in RARELY_QUANTIZED_WITH
        SCENARIOS[f"{recipe}_{name}"] = Scenario(
            options, MIXED[:2], (strategy,), apart=None, rare=rarely
        )


def cells(*names: str, strategies: tuple[str, ...] = tuple(STRATEGIES)) -> list[Any]:
    """Parameters (strategy, scenario) of a test: the scenarios that are named, or all, each under
    each of its strategies."""
    found = []
    for name, scenario in SCENARIOS.items():
        if names and name not in names:
            continue
        marks = pytest.mark.full if scenario.rare else ()
        for strategy in scenario.strategies:
            if strategy in strategies:
                found.append(pytest.param(strategy, name, marks=marks))
    return found
