"""Core's Lion on uneven shards of two ranks, with empty ones: each step is that of whole weights,
and every rank has the same state. Its updates are signs, which differ where sums in another order
differ by rounding: so whole weights are stepped with the gradients of the run itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer

from megatron_fsdp_adapter.prove.whole import plain_name
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    forward_backward,
    init_megatron,
    optimizer_config,
)
from tests.distributed.launch import run_ranks
from tests.distributed.lion import IN_CORE, Lion, lion_trainer, updated

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.05)
STEPS = 3
LATE = {"fsdp_overlap_param_gather_with_optimizer_step": True}

pytestmark = pytest.mark.skipif(not IN_CORE, reason="this release has no optimizer 'lion'")


class Whole:
    """All weights on one rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.weights = trainer.params()
        self.averages = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        names = {id(p): plain_name(n) for n, p in trainer.wrapper.named_parameters()}
        self.groups = {
            names[id(param)]: group
            for group in trainer.optimizer.param_groups
            for param in group["params"]
        }

    def step(self, gradients: dict[str, torch.Tensor], norm: float) -> None:
        """norm: the run's own, as a factor that is rounded in another way changes signs."""
        factor = min(1.0, CASE.clip / (norm + 1e-6))
        for name, gradient in gradients.items():
            self.weights[name], self.averages[name] = updated(
                self.weights[name], self.averages[name], gradient * factor, self.groups[name]
            )


def _check_steps(rank: int, label: str, trainer: Trainer) -> None:
    assert isinstance(trainer.optimizer.optimizer, Lion), type(trainer.optimizer.optimizer)
    whole = Whole(trainer)
    assert whole.weights.keys() == whole.groups.keys(), label
    for step in range(STEPS):
        forward_backward(trainer, batches(trainer.case, step, rank, torch.device("cpu")))
        gradients = trainer.gradients()
        norm = torch.stack([g.double().norm() for g in gradients.values()]).norm().item()
        assert norm > CASE.clip, f"{norm} is to be clipped"
        success, found, _ = trainer.optimizer.step()
        assert success and float(found) == pytest.approx(norm, rel=1e-5), (label, step)
        whole.step(gradients, float(found))
        for name, weight in trainer.params().items():
            expected = whole.weights[name]
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7, msg=label + name)


def _same_keys(rank: int, world: int, label: str, trainer: Trainer) -> None:
    said = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    state = trainer.optimizer.sharded_state_dict({}, metadata=said)
    mine = {name: sorted(entry) for name, entry in state["state"].items()}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    assert all(other == mine for other in everyone), label
    assert {tuple(kinds) for kinds in mine.values()} == {("exp_avg",)}, label
    assert all("step" not in meta for meta in state["param_to_group_meta"].values()), label


def _compare(rank: int, world: int) -> None:
    device = init_megatron()
    cells = [(CASE, strategy, {}) for strategy in STRATEGIES]
    cells += [(CASE.but(bf16=True), "optim_grads_params", {}), (CASE, "optim_grads_params", LATE)]
    for case, strategy, ddp in cells:
        label = f"{strategy} {ddp} bf16={case.bf16} "
        trainer = lion_trainer(case, strategy, device, **ddp)
        _same_keys(rank, world, label, trainer)
        _check_steps(rank, label, trainer)
        _same_keys(rank, world, label, trainer)
    _refuses(trainer.wrapper)


def _refuses(wrapper: Any) -> None:
    """What core would do otherwise, or cannot."""
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer", "optimizer_cuda_graph"):
        options = optimizer_config(CASE, optimizer="lion")
        setattr(options, name, True)
        with pytest.raises(ValueError, match=rf"{name}=True|with {name}=True|optimizer='lion'"):
            get_megatron_optimizer(options, [wrapper], use_gloo_process_groups=False)


def test_two_ranks_take_the_steps_of_whole_weights() -> None:
    run_ranks(_compare, 2)
