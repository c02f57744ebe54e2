"""What can happen to a model between and during training steps, as functions of a rig.

Each runs on an engine (`engine_cases.Rig`) and on a plain model (`PlainRig`), which it must leave
with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from tests.engine.engine_cases import Exploded, Setup, make_net, microbatch

Scenario = Callable[[Any], None]


class PlainRig:
    """The same model under autograd alone, with the same surface as `Rig`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = make_net(setup)
        self.grads: dict[str, torch.Tensor] = {}

    def loss(self, index: int = 0) -> torch.Tensor:
        return self.model(microbatch(index)).float().square().mean()

    def forward_backward(self, microbatches: int = 1) -> None:
        for index in range(microbatches):
            self.loss(index).backward()

    def evaluate(self) -> torch.Tensor:
        with torch.no_grad():
            return self.loss(77)

    def zero(self) -> None:
        self.model.zero_grad()

    def finish(self) -> None:
        """Gradients are where they are."""

    def sync(self, wait: bool) -> None:
        """There is one copy of the weights."""

    def last(self, is_last: bool) -> None:
        """Gradients always accumulate."""

    @torch.no_grad()
    def optimizer_step(self) -> None:
        for param in self.model.parameters():
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)

    def step(self, microbatches: int = 1, sync: bool = True) -> None:
        self.zero()
        self.forward_backward(microbatches)
        self.optimizer_step()

    def write(self) -> None:
        self.load()

    @torch.no_grad()
    def load(self) -> None:
        for param in self.model.parameters():
            param.mul_(0.5)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def steps(rig: Any) -> None:
    for _ in range(3):
        rig.step()


def steps_without_sync(rig: Any) -> None:
    for _ in range(3):
        rig.step(sync=False)


def steps_with_full_sync(rig: Any) -> None:
    for _ in range(2):
        rig.step(sync=False)
        rig.sync(wait=True)


def microbatches(rig: Any) -> None:
    for _ in range(2):
        rig.step(microbatches=3)


def forwards_in_flight(rig: Any) -> None:
    """Two forwards before the first backward, as a pipeline stage does."""
    for _ in range(2):
        rig.zero()
        rig.last(False)
        first, second = rig.loss(0), rig.loss(1)
        first.backward()
        rig.last(True)
        second.backward()
        rig.finish()
        rig.optimizer_step()


def evaluation_between(rig: Any) -> None:
    rig.step()
    rig.evaluate()
    rig.evaluate()
    rig.step(microbatches=2)
    rig.zero()
    rig.last(False)
    rig.loss(0).backward()
    rig.evaluate()
    rig.last(True)
    rig.loss(1).backward()
    rig.evaluate()
    rig.finish()
    rig.optimizer_step()


def layer_twice(rig: Any) -> None:
    rig.model.path = [0, 1, 1, 2, 3]
    for _ in range(2):
        rig.step(microbatches=2)


def layer_again_later(rig: Any) -> None:
    rig.model.path = [0, 1, 2, 0, 3]
    for _ in range(3):
        rig.step()


def layers_skipped(rig: Any) -> None:
    """Layers run in another order than listed, and some not at all in a step."""
    for path in ([3, 1, 0, 2], [0, 1], [0, 1, 2, 3], [2], [0, 1, 2, 3], [3, 2, 1, 0]):
        rig.model.path = path
        rig.step()


def forward_raises(rig: Any) -> None:
    rig.step()
    rig.zero()
    rig.model.explode = "forward 2"
    with pytest.raises(Exploded):
        rig.loss()
    rig.model.explode = None
    rig.step()
    rig.step(microbatches=2)


def evaluations_before_the_step(rig: Any) -> None:
    """Between a backward and its step: one raises, and one leaves layers out. Gathers that nobody
    used are still running when the step writes what they read."""
    everything = rig.model.path
    rig.step()
    for explode, path in (("forward 1", everything), (None, [0, 1])):
        rig.zero()
        rig.forward_backward()
        rig.finish()
        rig.model.explode, rig.model.path = explode, path
        with pytest.raises(Exploded) if explode else nullcontext():
            rig.evaluate()
        rig.model.explode, rig.model.path = None, everything
        rig.optimizer_step()
    rig.step()


def backward_raises(rig: Any) -> None:
    """In the second microbatch, after some units of it have been reduced."""
    rig.step()
    rig.zero()
    rig.last(False)
    rig.loss(0).backward()
    rig.last(True)
    rig.model.explode = "backward 1"
    with pytest.raises(Exploded):
        rig.loss(1).backward()
    rig.model.explode = None
    rig.step(microbatches=2)
    rig.step()


def zero_before_finish(rig: Any) -> None:
    rig.zero()
    rig.forward_backward(2)
    rig.step()
    rig.zero()
    rig.forward_backward(1)
    rig.zero()
    rig.zero()
    rig.step(microbatches=2)


def forward_without_backward(rig: Any) -> None:
    rig.step()
    kept = rig.loss()
    rig.step()
    del kept
    rig.step()


def inner_module_called(rig: Any) -> None:
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


def weights_read_between(rig: Any) -> None:
    """State dicts are taken after a step and in the middle of one."""
    rig.step()
    rig.weights()
    rig.step(sync=False)
    rig.weights()
    rig.zero()
    rig.last(False)
    rig.loss(0).backward()
    rig.weights()
    rig.last(True)
    rig.loss(1).backward()
    rig.finish()
    rig.optimizer_step()


def weights_loaded(rig: Any) -> None:
    """Main weights are written from outside, while a gather of the old ones is in flight."""
    for _ in range(2):
        rig.step()
        rig.load()


def weights_written(rig: Any) -> None:
    """Main weights are written from outside, and nobody says so: before the first step, after one,
    and between a backward and its step."""
    rig.write()
    rig.step()
    rig.write()
    rig.evaluate()
    rig.step(sync=False)
    rig.zero()
    rig.forward_backward()
    rig.finish()
    rig.write()
    rig.optimizer_step()
    rig.write()
    rig.step()


def gradients_late(rig: Any) -> None:
    """The second microbatch uses what the first has made of weights: those nodes are older than its
    own, so that autograd comes to them when the units are done."""
    for _ in range(2):
        for layer in rig.model.layers:
            layer.caches, layer.cached = True, None
        rig.step(microbatches=2)
    for layer in rig.model.layers:
        layer.caches, layer.cached = False, None
    rig.step(microbatches=2)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        steps, steps_without_sync, steps_with_full_sync, microbatches, forwards_in_flight,
        evaluation_between, layer_twice, layer_again_later, layers_skipped, forward_raises,
        evaluations_before_the_step, backward_raises, zero_before_finish,
        forward_without_backward, inner_module_called,
        weights_read_between, weights_loaded, weights_written,
        gradients_late,
    )
}  # fmt: skip

KEPT = ("optim", "optim_grads_params", "optim_grads", "optim_grads_params", "optim")
"""Strategies of units in turn, of a model that shards weights: some keep them, gradients too."""

VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "no_root": {"root_norm": False},
    "frozen": {"frozen": True},
    "reentrant": {"recompute": "reentrant"},
    "non_reentrant": {"recompute": "non_reentrant"},
    "selective": {"recompute": "selective"},
    "far_prefetch": {"prefetch_bytes": 1 << 20},
    "no_overlap": {"overlap": False},
    "bf16_comm": {"comm_dtype": torch.bfloat16},
    "two_domains": {"split": True, "world": 4, "rank": 1},
    "two_instances": {"outer": 2, "world": 4, "rank": 1},
    "overwrites": {"fused": WgradProtocol.OVERWRITES},
    "overwrites_always": {"fused": WgradProtocol.OVERWRITES_ALWAYS},
    "accumulates": {"fused": WgradProtocol.ACCUMULATES},
    "fused_recompute": {"fused": WgradProtocol.OVERWRITES, "recompute": "non_reentrant"},
    "fused_two_domains": {"fused": WgradProtocol.OVERWRITES, "split": True, "world": 4, "rank": 1},
    "slots": {"slots": True},
    "slots_far_prefetch": {"slots": True, "prefetch_bytes": 1 << 20},
    "slots_exchange": {"slots": True, "exchange": True},
    "slots_fused": {"slots": True, "fused": WgradProtocol.OVERWRITES},
    "slots_recompute": {"slots": True, "recompute": "non_reentrant"},
    "slots_two_domains": {"slots": True, "split": True, "world": 4, "rank": 1},
    "kept": {"own": KEPT},
    "kept_slots": {"own": KEPT, "slots": True},
    "kept_bf16_comm": {"own": KEPT, "slots": True, "comm_dtype": torch.bfloat16},
    "kept_exchange": {"own": KEPT, "slots": True, "exchange": True},
    "kept_fused": {"own": KEPT, "fused": WgradProtocol.ACCUMULATES},
    "kept_recompute": {"own": KEPT, "recompute": "non_reentrant"},
    "kept_instances": {"own": KEPT, "outer": 2, "shard_outer": True, "world": 4, "rank": 1},
    "whole": {"split": True, "whole": True},
    "whole_slots": {"split": True, "whole": True, "slots": True, "comm_dtype": torch.bfloat16},
    "whole_exchange": {"split": True, "whole": True, "slots": True, "exchange": True},
    "whole_fused": {"split": True, "whole": True, "fused": WgradProtocol.ACCUMULATES},
    "whole_overwrites": {"split": True, "whole": True, "fused": WgradProtocol.OVERWRITES},
    "whole_recompute": {"split": True, "whole": True, "recompute": "non_reentrant"},
    "whole_kept": {"split": True, "whole": True, "own": KEPT},
    "whole_instances": {
        "split": True, "whole": True, "outer": 2, "shard_outer": True, "world": 4, "rank": 1,
    },
    "whole_replicas": {"split": True, "whole": True, "outer": 2, "world": 4, "rank": 1},
    "shared_instances": {"split": True, "outer": 2, "shard_outer": True, "world": 8, "rank": 6},
}

RARE = ("fused_recompute", "fused_two_domains", "slots_far_prefetch", "slots_exchange",
        "slots_fused", "slots_recompute", "slots_two_domains", "kept", "kept_slots",
        "kept_bf16_comm", "kept_exchange", "kept_fused", "kept_recompute",
        "kept_instances", "whole_slots", "whole_exchange", "whole_fused", "whole_overwrites",
        "whole_recompute", "whole_kept", "whole_instances", "whole_replicas")  # fmt: skip


def variant_cells(names: Iterable[str]) -> list[Any]:
    """Parameters (strategy, variant) of a test: each variant under each strategy that has it;
    combinations of two options only with --full."""
    return [
        pytest.param(strategy, name, marks=pytest.mark.full if name in RARE else ())
        for name in names
        for strategy, row in STRATEGIES.items()
        # Copy engines carry gradients to where they are sharded, nowhere else.
        if row.shard_grads or not VARIANTS[name].get("exchange")
        if row.shard_weights or not VARIANTS[name].get("own")
        if row.shard_grads or not VARIANTS[name].get("whole")
    ]
