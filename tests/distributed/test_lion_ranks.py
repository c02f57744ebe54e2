"""Lion beside Adam on uneven shards, with empty ones: each step is that of whole weights, and every
rank has the same state. Lion's updates are signs, which differ where sums in another order differ
by rounding: so whole weights are stepped with the gradients of the run itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer

from megatron_fsdp_adapter.prove.gather_full import plain_name
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
from tests.distributed.lion import BESIDE_ADAM, BETAS, IN_CORE, Whole, is_lions, lion_trainer

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.05)
STEPS = 3

pytestmark = pytest.mark.skipif(not IN_CORE, reason="this release has no optimizer 'lion'")


def _check_steps(rank: int, label: str, trainer: Trainer) -> None:
    names = {id(p): plain_name(n) for n, p in trainer.wrapper.named_parameters()}
    options = {
        names[id(param)]: group
        for group in trainer.optimizer.param_groups
        for param in group["params"]
    }
    whole = Whole(trainer.params(), options, CASE.adam_eps)
    assert whole.weights.keys() == options.keys(), label
    for step in range(STEPS):
        forward_backward(trainer, batches(trainer.case, step, rank, torch.device("cpu")))
        gradients = trainer.gradients()
        norm = torch.stack([g.double().norm() for g in gradients.values()]).norm().item()
        assert norm > CASE.clip, f"{norm} is to be clipped"
        success, found, _ = trainer.optimizer.step()
        assert success and float(found) == pytest.approx(norm, rel=1e-5), (label, step)
        # The run's own norm: a factor that is rounded in another way changes signs.
        whole.step(gradients, min(1.0, CASE.clip / (float(found) + 1e-6)))
        for name, weight in trainer.params().items():
            expected = whole.weights[name].detach()
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7, msg=label + name)


def _same_keys(rank: int, world: int, label: str, trainer: Trainer) -> None:
    said = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    state = trainer.optimizer.sharded_state_dict({}, metadata=said)
    mine = {name: sorted(entry) for name, entry in state["state"].items()}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    assert all(other == mine for other in everyone), label
    for name, weight in trainer.params().items():
        [kinds] = [kinds for key, kinds in mine.items() if plain_name(key) == name]
        expected = ["exp_avg"] if is_lions(name, weight) else ["exp_avg", "exp_avg_sq", "step"]
        assert kinds == expected, (label, name)


def _compare(rank: int, world: int) -> None:
    device = init_megatron()
    cells = [(CASE, strategy) for strategy in STRATEGIES]
    for case, strategy in [*cells, (CASE.but(bf16=True), "optim_grads_params")]:
        label = f"{strategy} bf16={case.bf16} "
        trainer = lion_trainer(case, strategy, device)
        _same_keys(rank, world, label, trainer)
        _check_steps(rank, label, trainer)
        _same_keys(rank, world, label, trainer)
    _refuses(trainer.wrapper)


def _refuses(wrapper: Any) -> None:
    """What core would do otherwise, or cannot."""
    first = "adam_beta1" if BESIDE_ADAM else "lion_beta1"
    for name, value in (
        ("optimizer_cpu_offload", True), ("use_precision_aware_optimizer", True),
        ("fp16", True), (first, 1.0),
    ):  # fmt: skip
        options = optimizer_config(CASE, optimizer="lion", **BETAS)
        setattr(options, name, value)
        with pytest.raises(ValueError, match=rf"optimizer='lion':? with {name}={value}"):
            get_megatron_optimizer(options, [wrapper], use_gloo_process_groups=False)


def test_two_ranks_take_the_steps_of_whole_weights() -> None:
    run_ranks(_compare, 2)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 3])
def test_other_numbers_of_ranks_take_the_steps_of_whole_weights(world: int) -> None:
    run_ranks(_compare, world)
