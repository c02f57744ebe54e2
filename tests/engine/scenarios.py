"""The table of scenarios: models on an engine, what happens to them, and what is expected.

Each question is one test over all rows: of order in `test_engine_orders.py`, of schedules in
`test_engine_traces.py`, of weights, memory, host calls and recovery in `test_engine_scenarios.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.unit import Phase
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from tests.engine.small_model import Exploded, Loop, Setup
from tests.quantized.emulated import RECIPES

ZERO_0, ZERO_1, ZERO_2, ZERO_3, *_ = STRATEGIES
FP32, BF16 = torch.float32, torch.bfloat16


# What can happen to a model between and during training steps.

WORDS = {"unsynced": False, "waiting": True, "bf16": BF16, "fp32": FP32, "as_it_is": None}


def play(script: str, rig: Any) -> None:
    """Does one thing after another: what a method of the rig does, with numbers and `WORDS`, or

    path 0112          layers run in this order from now on
    more, last         of the step's microbatches more follow; the next one is the last
    forward 1          of a microbatch; backward, drop: of the oldest in flight, or of none
    failing A 2 in B   does B, in which the forward or backward A of layer 2 raises
    caches 1           layers keep what they make of weights from one forward to the next; or not
    """
    losses = []
    for line in script.split("; "):
        verb, *given = line.split()
        if verb == "path":
            rig.model.path = [int(layer) for layer in given[0]]
        elif verb in ("more", "last"):
            rig.last(verb == "last")
        elif verb == "forward":
            losses.append(rig.loss(int(given[0])))
        elif verb == "backward":
            losses.pop(0).backward()
        elif verb == "drop":
            losses.clear()
        elif verb == "failing":
            rig.model.explode = " ".join(given[:2])
            with pytest.raises(Exploded):
                play(" ".join(given[3:]).replace(" and ", "; "), rig)
            rig.model.explode = None
        elif verb == "caches":
            for layer in rig.model.layers:
                layer.caches, layer.cached = given == ["1"], None
        else:
            getattr(rig, verb)(*(WORDS[one] if one in WORDS else int(one) for one in given))


def inner_module_called(rig: Loop) -> None:
    """A layer is called by itself, for evaluation and for training."""
    x = torch.ones(2, rig.setup.hidden, dtype=rig.setup.dtype)
    rig.step()
    with torch.no_grad():
        rig.model.layers[1](x)
    rig.step()
    rig.zero()
    rig.model.layers[3](rig.model.layers[0](x)).float().square().mean().backward()
    rig.finish()
    rig.optimizer_step()
    rig.step()


def gathered_while_main_weights_are_shown(rig: Any) -> None:
    """By a backward, of an engine, before main weights change."""
    rig.step()
    rig.zero()
    loss = rig.loss()
    rig.weights()
    loss.backward()
    if rig.engine.units[2].phase is Phase.SHARDED:
        rig.engine.gather.launch(rig.engine.units[2])
    rig.engine.main_weights_changed()
    rig.step()


FORWARDS_IN_FLIGHT = (
    "zero; more; forward 0; forward 1; backward; last; backward; finish; optimizer_step"
)
"""Two forwards before the first backward, as a pipeline stage does."""
FURTHER = (
    "zero; last; forward 0; backward; last; forward 1; backward; finish; "
    "last; forward 2; backward; finish; optimizer_step"
)
SCRIPTS = {
    "steps": "step; step; step",
    "steps_without_sync": "step 1 unsynced; step 1 unsynced; step 1 unsynced",
    "steps_with_full_sync": "step 1 unsynced; sync waiting; step 1 unsynced; sync waiting",
    "microbatches": "step 3; step 3",
    "forwards_in_flight": f"{FORWARDS_IN_FLIGHT}; {FORWARDS_IN_FLIGHT}",
    "evaluation_between": "step; evaluate; evaluate; step 2; zero; more; forward 0; backward; "
                          "evaluate; last; forward 1; backward; evaluate; finish; optimizer_step",
    "layer_twice": "path 01123; step 2; step 2",
    "layer_again_later": "path 01203; step; step; step",
    # Layers run in another order than listed, and some not at all in a step.
    "layers_skipped": "path 3102; step; path 01; step; path 0123; step; path 2; step; "
                      "path 0123; step; path 3210; step",
    "forward_raises": "step; zero; failing forward 2 in forward 0; step; step 2",
    # Between a backward and its step one raises, and one leaves layers out: gathers that nothing
    # used are still running when the step writes what they read.
    "evaluations_before_the_step": "step; zero; forward_backward; finish; "
                                   "failing forward 1 in evaluate; optimizer_step; "
                                   "zero; forward_backward; finish; path 01; evaluate; path 0123; "
                                   "optimizer_step; step",
    # In the second microbatch, after some units of it have been reduced.
    "backward_raises": "step; zero; more; forward 0; backward; last; "
                       "failing backward 1 in forward 1 and backward; step 2; step",
    # Before anything is zeroed.
    "evaluation_after_one_that_raises": "step; zero; failing backward 1 in forward 0 and backward; "
                                        "evaluate; step",
    "zero_before_finish": "zero; forward_backward 2; step; zero; forward_backward 1; zero; zero; "
                          "step 2",
    "forward_without_backward": "step; forward 0; step; drop; step",
    # State dicts are taken after a step and in the middle of one.
    "weights_read_between": "step; weights; step 1 unsynced; weights; zero; more; forward 0; "
                            "backward; weights; last; forward 1; backward; finish; optimizer_step",
    # Main weights are written from outside, while a gather of the old ones is in flight.
    "weights_loaded": "step; load; step; load",
    # The same, and nothing says so: before the first step, after one, and between a backward and
    # its step.
    "weights_written": "write; step; write; evaluate; step 1 unsynced; zero; forward_backward; "
                       "finish; write; optimizer_step; write; step",
    # What was loaded for a step is not used, or older than what is written then.
    "no_step_follows": "step; zero; forward_backward; finish; "
                       "zero; forward_backward; finish; load; optimizer_step",
    # Their updates are the last ones, and nothing gathers them.
    "layers_left_out": "path 01; step; step; step",
    # The second microbatch uses what the first has made of weights: those nodes are older than its
    # own, so that autograd comes to them when the units are done.
    "gradients_late": "caches 1; step 2; caches 1; step 2; caches 0; step 2",
    "no_backward": "step; zero; finish; optimizer_step; step",
    # A caller that ends the step after a microbatch that was not marked as the last: what was
    # gathered for a forward that did not come is outdated.
    "last_is_not_said": "step; zero; more; forward 0; backward; finish; optimizer_step; step",
    # Each is marked as the last, and after the second the gradients are finished.
    "further_backwards": f"{FURTHER}; {FURTHER}",
    # After a step, with gathers in flight; with gradients; behind an evaluation; not to the end.
    "exports": "step; export bf16; step 1 unsynced; export as_it_is; zero; forward_backward 2; "
               "export bf16 2; finish; export fp32; optimizer_step; export bf16 1; evaluate; "
               "export bf16; load; export bf16; step",
}  # fmt: skip
EVENTS: dict[str, Callable[[Any], None]] = {
    **{name: functools.partial(play, script) for name, script in SCRIPTS.items()},
    "inner_module_called": inner_module_called,
    "gathered_while_shown": gathered_while_main_weights_are_shown,
}  # fmt: skip


# The table.

MIXED = ("microbatches", "evaluation_between", "layer_twice", "backward_raises")
BY_TENSOR_AND_BLOCK = ("current", "mxfp8")
"""Recipes that see more events by default. With --full all see all."""


@dataclass(frozen=True)
class Scenario:
    """A model, its engine and its loop, and what happens to it.

    options: of `Setup`, beside the strategy.
    events: names of `EVENTS`, each on a model of its own.
    strategies: that it is asked under.
    like: options that change no bit of the weights.
    apart: events that sum gradients in another order than autograd, as the nested backwards of a
        reentrant recomputation add to `.grad` one by one; None if autograd alone, on one rank in
        float32, is no comparison at all.
    weights: how many units more than three may have gathered weights at once.
    rare: asked with --full only.
    """

    options: dict[str, Any] = field(default_factory=dict)
    events: tuple[str, ...] = MIXED
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    like: dict[str, Any] = field(default_factory=dict)
    apart: tuple[str, ...] | None = ()
    weights: int = 0
    rare: bool = False

    def setup(self, strategy: str, **changes: Any) -> Setup:
        return Setup(strategy, **(self.options | changes))


APART = ("further_backwards", "gathered_while_shown")
ONE_AFTER_ANOTHER = tuple(event for event in EVENTS if event not in APART)
SHARDED, REDUCED = (
    tuple(name for name, row in STRATEGIES.items() if getattr(row, flag))
    for flag in ("shard_grads", "shard_main")
)
ONE_RANK_EACH = {"split": True, "whole": True}
"""Two ranks share a layer; one map of each layer has a domain of one rank."""
TWO_DOMAINS = {"split": True, "world": 4, "rank": 1}
INSTANCES = {"outer": 2, "shard_outer": True, "world": 4, "rank": 1}
FUSED = {"fused": WgradProtocol.OVERWRITES}
ADDING = {"fused": WgradProtocol.ACCUMULATES}
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

SCENARIOS: dict[str, Scenario] = {
    **{
        event: Scenario(events=(event,), weights=MORE_AT_ONCE.get(event, 0))
        for event in ONE_AFTER_ANOTHER
    },
    "further_backwards": Scenario(events=("further_backwards",), strategies=SHARDED, weights=1,
                                  apart=("further_backwards",)),
    # models
    "tied": Scenario({"tied": True}),
    "no_root": Scenario({"root_norm": False}, MIXED[:2]),
    "frozen": Scenario({"frozen": True}, ("microbatches", "backward_raises")),
    "one_unit": Scenario({"one_unit": True}, ("steps", "microbatches")),
    "many_layers": Scenario({"layers": 12}, ("microbatches",), SHARDED),
    "reentrant": Scenario({"recompute": "reentrant"}, apart=TWICE),
    "non_reentrant": Scenario({"recompute": "non_reentrant"}),
    "selective": Scenario({"recompute": "selective"}),
    "overwrites": Scenario(FUSED, apart=TWICE),
    "overwrites_early": Scenario({"fused": WgradProtocol.OVERWRITES_EARLY}, apart=TWICE),
    "accumulates": Scenario(ADDING, apart=TWICE),
    **{
        f"operations{name}": Scenario(
            options | {"operations": True}, ("microbatches", "evaluation_between"),
            like={"operations": False}, rare=bool(name),
        )
        for name, options in (
            ("", FUSED), ("_adding", ADDING),
            ("_early", {"fused": WgradProtocol.OVERWRITES_EARLY}),
        )
    },
    "fused_recompute": Scenario(FUSED | {"recompute": "non_reentrant"}, apart=TWICE, rare=True),
    # With one microbatch a step, so that gradients are added up in one order.
    "any_strategy": Scenario({}, ("steps", "layers_skipped", "weights_loaded"), REDUCED,
                             like={"strategy": ZERO_3}),
    # when things are launched, and where
    "far_prefetch": Scenario({"prefetch_bytes": 1 << 20}, like={"prefetch_bytes": 0}, weights=4),
    "no_overlap": Scenario({"overlap": False}, like={"overlap": True}),
    "checked": Scenario({"check_by": "parameter"}, MIXED[:1], like={"check_by": None}),
    "slots": Scenario({"slots": True}, (*MIXED, "forwards_in_flight"), like={"slots": False}),
    "slots_far_prefetch": Scenario({"slots": True, "prefetch_bytes": 1 << 20}, weights=4,
                                   rare=True),
    "slots_fused": Scenario({"slots": True} | FUSED, apart=TWICE, rare=True),
    "slots_recompute": Scenario({"slots": True, "recompute": "non_reentrant"}, rare=True),
    "slots_two_domains": Scenario({"slots": True} | TWO_DOMAINS, rare=True),
    "joined": Scenario({"joined": 150, "layers": 5}, (*MIXED, "layers_skipped"), weights=2),
    "joined_slots": Scenario({"joined": 150, "layers": 5, "slots": True, "comm_dtype": BF16},
                             rare=True),
    "joined_recompute": Scenario({"joined": 150, "layers": 5, "recompute": "reentrant"},
                                 apart=TWICE, rare=True),
    # dtypes
    "bf16_comm": Scenario({"comm_dtype": BF16}, MIXED[:1]),
    "bf16_grads": Scenario({"main_grads": BF16}, MIXED[:1]),
    "bf16_grads_fp32_comm": Scenario({"main_grads": BF16, "comm_dtype": FP32}, MIXED[:1]),
    "own_main": Scenario({"main_params": None}, MIXED[:1]),
    "fp32": Scenario({"dtype": FP32, "world": 3}, (*MIXED, "weights_loaded")),
    "fp32_sums": Scenario({"comm_dtype": BF16, "fp32_sums": True}, strategies=REDUCED),
    "fp32_sums_instances": Scenario({"comm_dtype": BF16, "fp32_sums": True, "outer": 2,
                                     "world": 4, "rank": 1}, strategies=REDUCED, rare=True),
    "scaled_before": Scenario({"scale_before_sum": True, "world": 4, "dtype": FP32}, MIXED[:1],
                              like={"scale_before_sum": False}),
    # copy engines, whose buckets are as narrow as the gradients
    "exchange": Scenario({"slots": True, "exchange": True}, (*MIXED, "gradients_late"), SHARDED,
                         like={"exchange": False}),
    "exchange_fused": Scenario({"slots": True, "exchange": True} | FUSED, strategies=SHARDED,
                               like={"exchange": False}, apart=TWICE, rare=True),
    "exchange_tied": Scenario({"slots": True, "exchange": True, "tied": True}, strategies=SHARDED,
                              like={"exchange": False}, rare=True),
    "exchange_bf16_grads": Scenario(
        {"slots": True, "exchange": True, "main_grads": BF16, "comm_dtype": FP32},
        strategies=SHARDED, like={"exchange": False}, rare=True,
    ),
    "exchange_two_domains": Scenario({"slots": True, "exchange": True} | TWO_DOMAINS,
                                     strategies=SHARDED, like={"exchange": False}, rare=True),
    # ranks
    "alone": Scenario({"world": 1, "whole": True}, (*TOGETHER, "weights_written"), SHARDED),
    "alone_scaled": Scenario({"world": 1, "whole": True, "grad_scale": 0.5, "one_unit": True},
                             ("further_backwards",), SHARDED, apart=None),
    "two_domains": Scenario(TWO_DOMAINS),
    "fused_two_domains": Scenario(FUSED | TWO_DOMAINS, apart=TWICE, rare=True),
    "two_instances": Scenario({"outer": 2, "world": 4, "rank": 1}),
    "sharded_instances": Scenario({"outer": 2, "shard_outer": True, "world": 6, "rank": 4}),
    "instances_far_prefetch": Scenario(INSTANCES | {"prefetch_bytes": 2560},
                                       ("evaluation_between", "weights_loaded"), weights=1),
    "shared_instances": Scenario({"split": True, "outer": 2, "shard_outer": True, "world": 8,
                                  "rank": 6}),
    "whole": Scenario(ONE_RANK_EACH, (*TOGETHER, "further_backwards"), SHARDED,
                      like={"whole": False}, apart=("further_backwards",)),
    "whole_scaled_before": Scenario(ONE_RANK_EACH | {"scale_before_sum": True}, TOGETHER, SHARDED,
                                    like={"whole": False}, rare=True),
    "whole_slots": Scenario(ONE_RANK_EACH | {"slots": True, "comm_dtype": BF16},
                            strategies=SHARDED, rare=True),
    "whole_exchange": Scenario(ONE_RANK_EACH | {"slots": True, "exchange": True},
                               strategies=SHARDED, rare=True),
    "whole_fused": Scenario(ONE_RANK_EACH | ADDING, strategies=SHARDED, apart=TWICE, rare=True),
    "whole_overwrites": Scenario(ONE_RANK_EACH | FUSED, strategies=SHARDED, apart=TWICE, rare=True),
    "whole_recompute": Scenario(ONE_RANK_EACH | {"recompute": "non_reentrant"}, strategies=SHARDED,
                                rare=True),
    "whole_kept": Scenario(ONE_RANK_EACH | KEPT, strategies=(ZERO_3,), rare=True),
    "whole_instances": Scenario(ONE_RANK_EACH | INSTANCES, strategies=SHARDED, rare=True),
    "whole_replicas": Scenario(ONE_RANK_EACH | {"outer": 2, "world": 4, "rank": 1},
                               strategies=SHARDED, rare=True),
    # units that keep weights, or gradients too
    "kept": Scenario(KEPT, (*MIXED, "gradients_late"), (ZERO_3,)),
    "kept_weights": Scenario({"own": (ZERO_2, ZERO_3)}, strategies=(ZERO_3,), like={"own": ()}),
    "kept_weights_slots": Scenario({"own": (ZERO_2,), "slots": True}, strategies=(ZERO_3,),
                                   like={"own": ()}),
    "kept_gradients": Scenario({"own": (ZERO_1,), "slots": True, "exchange": True},
                               ("microbatches", "evaluation_between"), (ZERO_3,),
                               like={"own": (), "strategy": ZERO_1, "exchange": False}),
    "kept_untold": Scenario(KEPT | {"told": False}, strategies=(ZERO_3,), like={"told": True}),
    "kept_slots": Scenario(KEPT | {"slots": True}, strategies=(ZERO_3,), rare=True),
    "kept_bf16_comm": Scenario(KEPT | {"slots": True, "comm_dtype": BF16}, strategies=(ZERO_3,)),
    "kept_exchange": Scenario(KEPT | {"slots": True, "exchange": True}, strategies=(ZERO_3,),
                              like={"exchange": False}, rare=True),
    "kept_fused": Scenario(KEPT | ADDING, strategies=(ZERO_3,), apart=TWICE, rare=True),
    # units that are to keep them once the engine is made
    "found_weights": Scenario({"found": (ZERO_2, ZERO_3)}, (*MIXED, "gradients_late"), (ZERO_3,),
                              like={"found": ()}),
    "found_gradients": Scenario({"found": (ZERO_1,)}, ("microbatches", "evaluation_between"),
                                (ZERO_3,), like={"found": (), "strategy": ZERO_1}),
    **{
        f"found{name}": Scenario({"found": KEPT["own"]} | options, strategies=(ZERO_3,),
                                 like={"found": (), "own": KEPT["own"]}, apart=apart,
                                 rare=bool(name))
        for name, options, apart in (
            ("", {}, ()), ("_fused", FUSED, TWICE), ("_adding", ADDING, TWICE),
            ("_recompute", {"recompute": "non_reentrant"}, ()), ("_instances", INSTANCES, ()),
            ("_early", {"fused": WgradProtocol.OVERWRITES_EARLY}, TWICE),
        )
    },
    "kept_recompute": Scenario(KEPT | {"recompute": "non_reentrant"}, strategies=(ZERO_3,),
                               rare=True),
    "kept_instances": Scenario(KEPT | INSTANCES, strategies=(ZERO_3,), rare=True),
    # a schedule that takes passes apart
    **{
        f"scheduled{name}": Scenario(
            {"scheduled": True} | options, ("microbatches", "steps", "evaluation_between"),
            like={"scheduled": False}, weights=1, apart=None, rare=bool(name),
        )
        for name, options in {
            "": {}, "_tied": {"tied": True}, "_frozen": {"frozen": True}, "_odd": {"layers": 3},
            "_no_overlap": {"overlap": False}, "_selective": {"recompute": "selective"},
            "_fused": FUSED, "_current": {"recipe": "current"}, "_mxfp8": {"recipe": "mxfp8"},
        }.items()
    },
    # layers with a stream of their own
    **{
        f"{kind}{name}": Scenario(
            {"side": kind} | options, ("microbatches", "evaluation_between", "forwards_in_flight"),
            like={"side": kind if kind == "computed" else None}, apart=None, weights=1,
            rare=bool(name),
        )
        for kind in ("dispatched", "computed", "reordered")
        for name, options in {
            "": {}, "_slots": {"slots": True}, "_recompute": {"recompute": "non_reentrant"},
            "_two_domains": TWO_DOMAINS,
        }.items()
    },
    # main weights and the state of Adam in host memory
    **{
        f"offload{name}": Scenario(
            {"adam": True, "offload": True} | options, ("steps",) if name else SAID,
            like={"offload": False}, apart=None, weights=1, rare=bool(name),
        )
        for name, options in {
            "": {}, "_fp32": {"dtype": FP32}, "_frozen": {"frozen": True}, "_tied": {"tied": True},
            "_split": {"split": True}, "_slots": {"slots": True}, "_instances": INSTANCES,
            "_bf16_main": {"main_params": BF16}, "_current": {"recipe": "current"},
        }.items()
    },
    # quantized weights
    **{
        recipe: Scenario(
            {"recipe": recipe}, weights=1,
            events=("steps", "exports", "weights_loaded", *MIXED) if recipe in BY_TENSOR_AND_BLOCK
            else ("steps", "microbatches"),
        )
        for recipe in RECIPES
    },
    **{
        f"{recipe}_in_all": Scenario({"recipe": recipe}, ONE_AFTER_ANOTHER, apart=None, rare=True)
        for recipe in RECIPES
    },
    **{
        f"{recipe}_{protocol.value}": Scenario({"recipe": recipe, "fused": protocol}, apart=TWICE,
                                               weights=1)
        for recipe, protocol in (
            ("current", WgradProtocol.OVERWRITES), ("mxfp8", WgradProtocol.OVERWRITES_EARLY),
            ("block128", WgradProtocol.ACCUMULATES),
        )
    },
    "mxfp8_shown": Scenario({"recipe": "mxfp8"}, ("gathered_while_shown",), apart=None),
}  # fmt: skip
SCENARIOS |= {
    f"{recipe}_{name}": Scenario(SCENARIOS[name].options | {"recipe": recipe}, MIXED[:2],
                                 (strategy,), apart=None, rare=is_long)
    for is_long, names in enumerate((
        ("tied", "frozen", "non_reentrant", "two_instances"),
        ("selective", "slots", "two_domains", "far_prefetch", "reentrant", "shared_instances",
         "slots_recompute"),
    )) for name in names
    for strategy, recipe in ((ZERO_1, "block128"), (ZERO_3, "mxfp8"), (ZERO_3, "current"))
}  # fmt: skip


def cells(*names: str, strategies: tuple[str, ...] = tuple(STRATEGIES)) -> list[Any]:
    """Parameters (strategy, scenario) of a test: the scenarios that are named, or all, each under
    each of its strategies."""
    return [
        pytest.param(strategy, name, marks=pytest.mark.full if scenario.rare else ())
        for name, scenario in SCENARIOS.items() if name in names or not names
        for strategy in scenario.strategies if strategy in strategies
    ]  # fmt: skip
