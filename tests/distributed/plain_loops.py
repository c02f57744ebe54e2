"""Training loops as users of PyTorch write them. Each runs as it stands on sharded models and on
unsharded ones whose losses are the mean over all ranks' data, and must leave the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.config import STRATEGIES
from tests.distributed.gpt import full_all
from tests.distributed.plain import WIDTH, Block, Net, device, tokens

STEPS = 4
LR = 0.05
WEIGHTS = 2e-5
"""Relative, of a weight tensor's norm after the steps of a loop."""

Batch = Callable[[nn.Module, int], torch.Tensor]


class Side:
    """What a loop is given. `sharded` and `strategy` tell on which side it runs."""

    def __init__(
        self, rank: int, world: int, strategy: str | None, options: Mapping[str, Any] | None = None
    ) -> None:
        self.rank, self.world, self.strategy, self.options = rank, world, strategy, options or {}
        self.models: list[nn.Module] = []
        self.numbers: list[float] = []

    def model(self, module: nn.Module | None = None, **options: Any) -> Any:
        """A module, sharded on that side."""
        if module is None:
            module = net()
        if self.strategy is not None:
            strategy = {"data_parallel_sharding_strategy": self.strategy}
            options = {**strategy, **self.options, **options}
            kinds = {type(child) for child in module.modules()} & {Block, nn.Embedding}
            module = fully_shard_model(module, fsdp_unit_modules=list(kinds), **options)
        self.models.append(module)
        return module

    def inner(self, model: Any) -> Any:
        """The user's own module."""
        return model if self.strategy is None else model.module

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer if self.strategy is None else fully_shard_optimizer(optimizer)

    def sgd(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        return self.optimizer(plain_sgd(params, **options))

    def mean(self, of_rank: Callable[[int], torch.Tensor], without: int = 0) -> torch.Tensor:
        """A loss: this rank's, or all ranks' but the first `without`, divided by all."""
        if self.strategy is not None:
            return of_rank(self.rank)
        losses = [of_rank(rank) for rank in range(without, self.world)]
        return torch.stack(losses).sum() / self.world

    def loss(self, model: nn.Module, step: int, microbatch: int = 0, without: int = 0) -> Any:
        return self.mean(lambda rank: model(tokens(step, microbatch, rank)), without)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self.strategy is None else model.no_sync()

    def note(self, value: torch.Tensor) -> None:
        """A number that both sides must have: a mean over ranks."""
        value = value.detach().clone()
        if self.strategy is not None:
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            dist.all_reduce(value)
            value /= self.world
        self.numbers.append(value.item())

    def weights(self) -> dict[str, torch.Tensor]:
        """Of all models, whole, by number and name; collective."""
        found = {}
        for number, model in enumerate(self.models):
            state = {n.removeprefix("module."): v for n, v in model.state_dict().items()}
            full = state if self.strategy is None else full_all(state)
            found.update({f"{number} {name}": value.clone() for name, value in full.items()})
        return found


Loop = Callable[[Side], None]


def net() -> Net:
    torch.manual_seed(5)
    return Net(2).to(device())


def plain_sgd(params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **{"lr": LR, "momentum": 0.9, "weight_decay": 0.1, **options})


# Gradients are cleared.


def grads_to_none(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None


def plain_optimizer(side: Side) -> None:
    """Of torch, over the DTensors."""
    model = side.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_optimizer_one_by_one(side: Side) -> None:
    model = side.model()
    optimizer = plain_sgd(model.parameters(), foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        side.loss(model, step).backward()
        optimizer.step()


def module_zero_grad(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        side.inner(model).zero_grad()


def cleared_between_forward_and_backward(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        loss = side.loss(model, step)
        optimizer.zero_grad() if step % 2 else model.zero_grad()
        loss.backward()
        optimizer.step()


def gradients_that_are_thrown_away(side: Side) -> None:
    """After microbatches, and after a backward."""
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        with side.no_sync(model):
            side.loss(model, step, 7).backward()
        optimizer.zero_grad()
        side.loss(model, step, 8).backward()
        for param in model.parameters():
            param.grad = None
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def some_gradients_taken_away(side: Side) -> None:
    """Other parameters in every step, of the same unit and of others."""
    model = side.model()
    optimizer = side.sgd(model.parameters())
    params = list(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        for param in params[step % 3 :: 3]:
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()


def gradients_replaced(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        for param in model.parameters():
            param.grad = param.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()


def gradients_replaced_between_backwards(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        for microbatch in range(2):
            side.loss(model, step, microbatch).backward()
            for param in model.parameters():
                param.grad = param.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()


# Several optimizers.


def _halves(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Of every unit."""
    params = list(model.parameters())
    return params[::2], params[1::2]


def two_optimizers(side: Side) -> None:
    model = side.model()
    first, second = (side.sgd(half) for half in _halves(model))
    for step in range(STEPS):
        side.loss(model, step).backward()
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()


def two_optimizers_of_whole_units(side: Side) -> None:
    model = side.model()
    blocks = list(side.inner(model).blocks.parameters())
    ids = {id(param) for param in blocks}
    first = side.sgd(blocks)
    second = side.sgd([param for param in model.parameters() if id(param) not in ids])
    for step in range(STEPS):
        side.loss(model, step).backward()
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()


def an_optimizer_every_other_step(side: Side) -> None:
    """Its gradients add up meanwhile, which needs sharded gradients."""
    model = side.model()
    first, second = (side.sgd(half) for half in _halves(model))
    for step in range(STEPS):
        side.loss(model, step).backward()
        first.step()
        first.zero_grad()
        if step % 2:
            second.step()
            second.zero_grad()


def groups_added_later(side: Side) -> None:
    model = side.model()
    first, second = _halves(model)
    optimizer = side.sgd(first)
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": second, "lr": 0.5 * LR})
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for param in second:
            param.grad = None


# Steps.


def scheduler_made_before(side: Side) -> None:
    model = side.model()
    plain = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.7)
    optimizer = side.optimizer(plain)
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def closures(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = side.loss(model, step)
            loss.backward()
            return loss

        side.note(optimizer.step(closure))


def scaled_losses(side: Side) -> None:
    """One step in four has an infinite gradient."""
    model = side.model()
    plain = plain_sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.7)
    optimizer = side.optimizer(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        loss = side.loss(model, step)
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        side.numbers.append(scaler.get_scale())
        optimizer.zero_grad()


class Cautious(torch.optim.SGD):
    """Steps by its base's step, and does something of its own before and after."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            param.grad = param.grad * 0.5
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.99)
        return result


def a_step_that_calls_its_base(side: Side) -> None:
    plain_sgd([nn.Parameter(torch.ones(1))])  # torch hooks the base's step when one is made
    model = side.model()
    optimizer = side.optimizer(Cautious(model.parameters(), lr=LR))
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def step_in_backward(side: Side) -> None:
    model = side.model()
    optimizers = {param: side.sgd([param]) for param in model.parameters()}

    def hook(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    for step in range(STEPS):
        side.loss(model, step).backward()


def a_rank_without_data(side: Side) -> None:
    """In the first step and a later one the first rank takes part by steps alone. A step that no
    gradients came before, on any rank, moves nothing."""
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        without = 1 - step % 2
        if side.strategy is None or side.rank >= without:
            side.loss(model, step, without=without).backward()
        if side.strategy is None:
            side.note(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        else:
            side.note(model.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


def a_rank_without_microbatches(side: Side) -> None:
    """As `a_rank_without_data`, in every other step, where others accumulate gradients."""
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        without = step % 2
        if side.strategy is None or side.rank >= without:
            with side.no_sync(model):
                side.loss(model, step, 0, without=without).backward()
            side.loss(model, step, 1, without=without).backward()
        optimizer.step()
        optimizer.zero_grad()


def nested_no_sync(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        with side.no_sync(model):
            with side.no_sync(model):
                side.loss(model, step, 0).backward()
            side.loss(model, step, 1).backward()
        side.loss(model, step, 2).backward()
        optimizer.step()
        optimizer.zero_grad()


# Weights that the user writes.


@torch.no_grad()
def _scale(params: Iterable[Any], factor: float) -> None:
    for param in params:
        param.mul_(factor)


def initialised_after_wrapping(side: Side) -> None:
    def init(module: nn.Module) -> None:
        _scale(module.parameters(recurse=False), 0.5)

    model = side.model()
    model.apply(init)
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        loss = side.loss(model, step)
        side.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def averaged_weights_evaluated(side: Side) -> None:
    """Other weights are swapped in for an evaluation, and back, by a list of before."""
    model = side.model()
    params = list(model.parameters())
    optimizer = side.sgd(params)
    average = [param.detach().clone() for param in params]
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            kept = [param.detach().clone() for param in params]
            for param, mean in zip(params, average, strict=True):
                mean.lerp_(param, 0.3)
                param.copy_(mean)
            for microbatch in range(2):
                side.note(side.loss(model, step, microbatch))
            for param, value in zip(params, kept, strict=True):
                param.copy_(value)


def clamped(side: Side) -> None:
    """After each step, and after the evaluation that follows it."""
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for bound in (0.4, 0.3):
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-bound, bound)
                side.note(side.loss(model, step, 1))


def clipped_after_an_evaluation(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    before = list(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        with torch.no_grad():
            side.note(side.loss(model, step, 1))
        after = list(model.parameters())
        assert all(one is other for one, other in zip(before, after, strict=True))
        inner = list(side.inner(model).parameters())
        assert all(one is other for one, other in zip(before, inner, strict=True))
        side.note(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            side.note(side.loss(model, step, 2))


def clipped_by_norms(side: Side) -> None:
    """By torch and by the model, in turn."""
    for norm_type in (float("inf"), 1.0, 2.0, 3.0):
        model = side.model()
        optimizer = side.sgd(model.parameters())
        for step in range(STEPS):
            side.loss(model, step).backward()
            if (step % 2 and norm_type < float("inf")) or side.strategy is None:
                params = model.parameters()
                norm = nn.utils.clip_grad_norm_(params, 0.05, norm_type, foreach=step != 3)
            else:
                norm = model.clip_grad_norm_(0.05, norm_type)
            side.note(norm)
            optimizer.step()
            optimizer.zero_grad()


# Freezing.


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.inner(noise))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)).mean()


def _noise(step: int, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * number + rank)
    return torch.randn(3, WIDTH, generator=generator).to(device())


def _adversaries(side: Side, clear_after: bool, freeze: Callable[[Any, bool], None]) -> None:
    torch.manual_seed(3)
    generator, critic = side.model(Generator().to(device())), side.model(Critic().to(device()))
    ours = side.optimizer(torch.optim.AdamW(generator.parameters(), lr=0.01, weight_decay=0.3))
    theirs = side.optimizer(torch.optim.AdamW(critic.parameters(), lr=0.01, weight_decay=0.3))
    for step in range(STEPS):
        freeze(critic, True)
        if not clear_after:
            theirs.zero_grad()

        def worth(rank: int, step: int = step) -> torch.Tensor:
            fake = generator(_noise(step, 1, rank)).detach()
            return critic(fake) - critic(_noise(step, 0, rank))

        side.mean(worth).backward()
        theirs.step()
        if clear_after:
            theirs.zero_grad()
        freeze(critic, False)
        side.mean(lambda rank, n=step: -critic(generator(_noise(n, 2, rank)))).backward()
        if clear_after:
            assert all(param.grad is None for param in critic.parameters())
        ours.step()
        ours.zero_grad()


def adversaries(side: Side) -> None:
    _adversaries(side, True, lambda model, trained: model.requires_grad_(trained))


def adversaries_cleared_late(side: Side) -> None:
    _adversaries(side, False, lambda model, trained: side.inner(model).requires_grad_(trained))


def layers_frozen_in_turn(side: Side) -> None:
    """By lists of before; half of each unit's parameters, and whole units."""
    model = side.model()
    params = list(model.parameters())
    optimizer = side.optimizer(torch.optim.AdamW(params, lr=0.01, weight_decay=0.3))
    for step in range(STEPS):
        for number, param in enumerate(params):
            param.requires_grad_(number % 2 == step % 2 if step < 2 else number > 5)
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: Mapping[str, Loop] = {
    loop.__name__: loop
    for loop in (
        grads_to_none, plain_optimizer, plain_optimizer_one_by_one, module_zero_grad,
        cleared_between_forward_and_backward, gradients_that_are_thrown_away,
        some_gradients_taken_away, gradients_replaced,
        gradients_replaced_between_backwards, two_optimizers,
        two_optimizers_of_whole_units, an_optimizer_every_other_step, groups_added_later,
        scheduler_made_before, closures, scaled_losses, a_step_that_calls_its_base,
        step_in_backward, a_rank_without_data, a_rank_without_microbatches, nested_no_sync,
        initialised_after_wrapping, averaged_weights_evaluated,
        clamped, clipped_after_an_evaluation, clipped_by_norms, adversaries,
        adversaries_cleared_late, layers_frozen_in_turn,
    )
}  # fmt: skip

NEEDS_KEPT_WEIGHTS = ("a_rank_without_data",)
"""Where weights are sharded all ranks gather them in each forward."""

NEEDS_SHARDED_GRADS = ("an_optimizer_every_other_step", "gradients_replaced_between_backwards")
"""Several backwards outside of `no_sync`, or an optimizer's gradients kept for a later one."""

NEEDS_KEPT_GRADS = ("a_rank_without_microbatches",)
"""Where gradients are sharded all ranks reduce them in each backward."""


def check_loops(
    rank: int, world: int, names: Iterable[str], outer: int = 0, **options: Any
) -> None:
    """Every strategy against the unsharded side. outer: the size of an outer axis, if there is to
    be one; options: of `fully_shard_model`."""
    if outer:
        options["mesh"] = init_device_mesh(device().type, (outer, world // outer))
    problems = []
    for name in names:
        reference = Side(rank, world, None)
        LOOPS[name](reference)
        expected = reference.weights()
        for strategy, row in STRATEGIES.items():
            if name in NEEDS_SHARDED_GRADS and not row.shard_grads:
                continue
            if name in NEEDS_KEPT_GRADS and row.shard_grads:
                continue
            if name in NEEDS_KEPT_WEIGHTS and row.shard_weights:
                continue
            side = Side(rank, world, strategy, options)
            try:
                LOOPS[name](side)
            except Exception as error:  # told with the others, by name
                problems.append(f"{name}, {strategy}: {type(error).__name__}: {error}")
                continue
            problems += [f"{name}, {strategy}, {line}" for line in _differences(side, expected)]
            if side.numbers != pytest.approx(reference.numbers, rel=2e-5, abs=1e-7):
                problems.append(f"{name}, {strategy}: {side.numbers} != {reference.numbers}")
    assert not problems, "\n".join(problems)


def _differences(side: Side, expected: Mapping[str, torch.Tensor]) -> list[str]:
    found = side.weights()
    assert found.keys() == expected.keys()
    lines = []
    for name, value in expected.items():
        error = float((found[name] - value).norm() / value.norm())
        if not error <= WEIGHTS:
            lines.append(f"{name}: off by {error:.1e}")
    return lines[:3]
