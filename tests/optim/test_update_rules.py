"""Steps of Megatron's optimizers on uneven shards, with empty ones: each is that of the rule on
whole weights with the run's own gradients, every rank has the same state, and what a program does
to the inner optimizer has its effect. Muon's rule: test_muon.py. In plain loops: plain_loops.py."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from tests.lib.gpt.checks import Step, check_run_bits, recorded_step
from tests.lib.gpt.gather_full import plain_name
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    init_megatron,
)
from tests.lib.gpt.lion import BETAS, LION, LION_BESIDE_ADAM, LION_IN_CORE, OF_LATER_CORE
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "optim/step.py",
    "optim/local_shards.py",
    "optim/state.py",
    "optim/lion.py",
    "megatron/optimizer/lion.py",
)

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.05)
CPU = torch.device("cpu")


# Steps of whole weights.


class Lion(torch.optim.Optimizer):
    """Written down once more. Its updates are signs, which differ where sums in another order
    differ by rounding: so whole weights are stepped with the gradients of the run itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first, second = self.defaults["betas"]
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].get("exp_avg", torch.zeros_like(weight))
                direction = torch.sign(first * average + (1 - first) * weight.grad)
                weight.copy_(weight * (1 - group["lr"] * group["weight_decay"]))
                weight.sub_(group["lr"] * direction)
                self.state[weight]["exp_avg"] = second * average + (1 - second) * weight.grad


class FusedSGD(torch.optim.Optimizer):
    """Stands for Transformer Engine's: a kernel over lists of tensors, none of them empty, and a
    buffer for each parameter, with a momentum and without. Not derived from a class of torch's."""

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                assert param.numel() > 0
                assert type(param) is not DTensor
                state = self.state[param]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
                buffer.mul_(group["momentum"]).add_(param.grad)
                buffer.add_(param, alpha=group["weight_decay"])
                param.sub_(group["lr"] * buffer)


def is_lions(name: str, weight: torch.Tensor) -> bool:
    is_matrix = weight.dim() == 2 and not any(w in name for w in ("word_emb", "output_layer"))
    return is_matrix or not LION_BESIDE_ADAM


def of_lion(name: str, weight: Any, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    """With the rate and decay of the run's parameter group."""
    options = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    if not is_lions(name, weight):
        betas = BETAS["adam_beta1"], BETAS["adam_beta2"]
        return torch.optim.AdamW([weight], betas=betas, eps=CASE.adam_eps, **options)
    kind = "adam" if LION_BESIDE_ADAM else "lion"
    return Lion([weight], {**options, "betas": (BETAS[f"{kind}_beta1"], BETAS[f"{kind}_beta2"])})


def of_sgd(name: str, weight: Any, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    keys = ("lr", "weight_decay", "momentum")
    return torch.optim.SGD([weight], **{key: group[key] for key in keys})


@dataclass(frozen=True)
class Rule:
    """An optimizer of core's with one of torch's for each whole weight, the names of what it keeps
    of a weight, and the class that core makes where that is not its own."""

    options: Mapping[str, Any]
    whole: Callable[[str, Any, Mapping[str, Any]], torch.optim.Optimizer]
    state: Callable[[str, torch.Tensor], list[str]]
    case: Mapping[str, Any] = field(default_factory=dict)
    made_by_core: type[torch.optim.Optimizer] | None = None


def _lions_state(name: str, weight: torch.Tensor) -> list[str]:
    if is_lions(name, weight):
        return ["exp_avg"]
    return ["exp_avg", "exp_avg_sq", "step"]


SGD = {"optimizer": "sgd", "sgd_momentum": 0.9}


def _sgd_with_momentum(*unused):
    return ["momentum_buffer"]


def _sgd(*unused):
    return []


RULES: Mapping[str, Rule] = {
    "SGD with momentum": Rule(SGD, of_sgd, _sgd_with_momentum, {"lr": 0.05}),
    "SGD": Rule({**SGD, "sgd_momentum": 0.0}, of_sgd, _sgd, {"lr": 0.05}),
    **{
        name: Rule(
            {**SGD, "sgd_momentum": momentum},
            of_sgd,
            lambda *unused: ["momentum_buffer"],
            {"lr": 0.05},
            FusedSGD,
        )
        for name, momentum in (("a fused SGD", 0.9), ("a fused SGD without momentum", 0.0))
    },
    "Lion": Rule(LION, of_lion, _lions_state),
    "Lion in bf16": Rule(LION, of_lion, _lions_state, {"bf16": True}),
}
WITHOUT = {"use_distributed_optimizer": False}
"""In both configs: wrapper and optimizer switch it on, and a checkpoint has their form."""

OF_CORE = ("SGD", pytest.param("Lion", marks=OF_LATER_CORE))


@pytest.mark.parametrize("of_core", OF_CORE)
@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 3))])
@on_ranks(seconds=300)
def test_ranks_take_the_steps_of_whole_weights(rank: int, world: int, of_core: str) -> None:
    device = init_megatron()
    for name, rule in ((name, rule) for name, rule in RULES.items() if of_core in name):
        few = rule.case.get("bf16") or rule.made_by_core
        for strategy in STRATEGIES[-1:] if few else STRATEGIES:
            made = rule.made_by_core or core_optimizer.SGD
            with mock.patch.object(core_optimizer, "SGD", made):
                case = CASE.but(**rule.case)
                trainer = build_trainer(
                    case, strategy, device, ddp=WITHOUT, optimizer={**rule.options, **WITHOUT}
                )
            locals_ = [param._local_tensor for param in trainer.wrapper.parameters()]
            _check_rule(rank, world, f"{name}, {strategy} ", rule, trainer)
            if strategy == "optim_grads_params" and world > 1:
                some_are_empty = torch.tensor(float(any(not one.numel() for one in locals_)))
                dist.all_reduce(some_are_empty)
                assert some_are_empty, "a case that shows nothing about empty shards"


def _check_rule(rank: int, world: int, label: str, rule: Rule, trainer: Trainer) -> None:
    case = trainer.case
    names = {id(param): plain_name(name) for name, param in trainer.wrapper.named_parameters()}
    groups = {
        names[id(param)]: group
        for group in trainer.optimizer.param_groups
        for param in group["params"]
    }
    whole = trainer.params()
    steppers = {
        name: rule.whole(name, weight.requires_grad_(), groups[name])
        for name, weight in whole.items()
    }
    assert whole.keys() == groups.keys(), label
    for number in range(3):
        _check_state(world, label, rule, trainer, whole)
        found = recorded_step(trainer, batches(case, number, rank, CPU))
        norm = torch.stack([g.double().norm() for g in found.gradients.values()]).norm().item()
        assert norm > case.clip, f"{norm} is to be clipped"
        assert found.norm == pytest.approx(norm, rel=1e-5), (label, number)
        for name, gradient in found.gradients.items():
            # The run's own norm: a factor that is rounded in another way changes signs.
            whole[name].grad = gradient * min(1.0, case.clip / (found.norm + 1e-6))
            steppers[name].step()
            expected = whole[name].detach()
            torch.testing.assert_close(
                found.weights[name], expected, rtol=1e-5, atol=1e-7, msg=label + name
            )
    _check_state(world, label, rule, trainer, whole)


def _check_state(
    world: int, label: str, rule: Rule, trainer: Trainer, whole: Mapping[str, torch.Tensor]
) -> None:
    """The same on every rank, also of what a rank has no rows of; before the first step too."""
    state = trainer.optimizer.sharded_state_dict({})["state"]
    mine = {plain_name(name): sorted(entry) for name, entry in state.items()}
    assert all(other == mine for other in everyones(mine)), label
    expected = {name: rule.state(name, weight) for name, weight in whole.items()}
    assert mine == {name: kinds for name, kinds in expected.items() if kinds}, label


# What a program does to the inner optimizer, where a rule of ours steps beside it. Of the inner one
# alone, on the device and streamed: plain_state_loops.py.

ONE_MICROBATCH = CASE.but(microbatches=1)
KINDS = ("muon", *(["lion"] if LION_IN_CORE else []))

ADAM = sys.modules[torch.optim.Adam.__module__]
"""The module of torch's function, which `torch.optim` hides."""

Act = Callable[[Trainer, int], None]


def _run(kind: str, clip: float, act: Act, rank: int) -> list[Step]:
    """Two steps, what `act` does, and two more."""
    case = ONE_MICROBATCH.but(clip=clip)
    trainer = build_trainer(case, "optim_grads_params", CPU, optimizer={"optimizer": kind})
    found = []
    for step in range(4):
        if step == 2:
            act(trainer, rank)
        found.append(recorded_step(trainer, batches(trainer.case, step, rank, CPU)))
    return found


def _adam_does(*effects: Any) -> Act:
    """A step in which each call of torch's Adam has that effect, and no other: nothing, or a
    MemoryError."""

    def act(trainer: Trainer, rank: int) -> None:
        inner = distributed_optimizer(trainer).optimizer
        before = [list(map(id, group["params"])) for group in inner.param_groups]
        data = batches(trainer.case, 9, rank, CPU)
        said = pytest.raises(MemoryError) if effects else nullcontext()
        with mock.patch.object(ADAM, "adam", side_effect=effects or None), said:
            recorded_step(trainer, data)
        assert [list(map(id, group["params"])) for group in inner.param_groups] == before

    return act


def _zeroed(trainer: Trainer, rank: int) -> None:
    trainer.wrapper.stop_communication()
    for state in trainer.optimizer.state.values():
        for value in state.values():
            getattr(value, "_local_tensor", value).zero_()


def _taken_out(trainer: Trainer, rank: int, again: bool = False) -> None:
    """Every other parameter, of its group. again: into one whose learning rate is zero."""
    trainer.wrapper.stop_communication()
    inner = distributed_optimizer(trainer).optimizer
    for group in list(inner.param_groups):
        taken = group["params"][1::2]
        group["params"] = group["params"][::2]
        if again:
            inner.add_param_group({**group, "params": taken, "lr": 0.0})


ALIKE: Mapping[str, tuple[Act, Act]] = {
    "a step that raises at once, as one that does nothing": (_adam_does(MemoryError), _adam_does()),
    "a step that raises half way": (_adam_does(None, MemoryError), _adam_does()),
    "cleared state, as zeros": (lambda trainer, _: trainer.optimizer.state.clear(), _zeroed),
    "unclipped, parameters that are taken out of groups": (
        _taken_out,
        partial(_taken_out, again=True),
    ),
}
"""What is done, and what has the same bits afterwards. On all ranks; where Adam raises, what Muon
and Lion have updated before stays so."""


@pytest.mark.parametrize("what", ALIKE)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_what_is_done_to_the_inner_optimizer_has_its_effect(
    rank: int, kind: str, what: str
) -> None:
    """A step that raised leaves the next one right; state that is cleared is zero."""
    init_megatron()
    # Without clipping gradients are not copied; where Adam raises that matters. A norm is of what
    # is in groups.
    if "at once" in what and kind == "muon":
        clips = (0.0, 0.05)
    else:
        clips = (0.05,)
    for clip in (0.0,) if "unclipped" in what else clips:
        found, expected = (_run(kind, clip, act, rank) for act in ALIKE[what])
        check_run_bits(found, expected, f"clip {clip}")


class _Wraps(torch.optim.AdamW):
    """An optimizer whose step calls the step of its base class, which has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_a_step_inside_a_step_updates_every_unit_once(alone: None, offload: bool) -> None:
    """With state in host memory each unit takes the base class's step, whose end must leave the
    gradients of the units that follow."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    sharded = copy.deepcopy(plain)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1)
    model = fully_shard_model(sharded, None, [nn.Linear], chunked_optimizer_state_offload=offload)
    optimizer = fully_shard_optimizer(_Wraps(model.parameters(), lr=0.1))
    x = torch.randn(4, 8)
    for _ in range(3):
        for module, steps in ((plain, expected), (model, optimizer)):
            module(x).square().sum().backward()
            steps.step()
            steps.zero_grad()
        assert torch.equal(model(x), plain(x))
