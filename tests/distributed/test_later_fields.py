"""Fields that releases after 0.16.1 brought train like stock DDP of the same release: prediction
heads with a gradient norm of their own, MuP, MLPs in chunks, steps left out for their norm.

Each is skipped where the installed release lacks the field (docs/fields.md says since when it is).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.distributed.checks import check_loss, check_norm, check_weights
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    forward_backward,
    init_megatron,
    make_trainer,
    optimizer_config,
    train_step,
)
from tests.distributed.launch import run_ranks
from tests.distributed.models import CASE, _config, _gpt
from tests.distributed.random_cases import fresh_seed

WORLD, STEPS = 2, 3


def needs(*names: str, of: type = TransformerConfig) -> Any:
    """Skips where the installed release has no such fields."""
    lacks = [name for name in names if name not in of.__dataclass_fields__]  # type: ignore[attr-defined]
    return pytest.mark.skipif(bool(lacks), reason=f"this megatron-core has no {', '.join(lacks)}")


@dataclass(frozen=True)
class Run:
    """A model with some fields of its config set, and of the optimizer's."""

    model: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    clip: float = 1.0
    optimizer: dict[str, Any] = field(default_factory=dict)
    overrides: Callable[[OptimizerConfig, Any], Any] | None = None


def _trainer(run: Run, case: Case, strategy: str | None) -> Trainer:
    torch.manual_seed(case.seed)
    model_parallel_cuda_manual_seed(case.seed)
    model = _gpt(_config("none", **run.model), run.tied)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    trainer = make_trainer(model, case.but(overlap=strategy is not None), strategy)
    if run.optimizer or run.overrides:
        config = optimizer_config(trainer.case, **run.optimizer)
        overrides = run.overrides(config, model.config) if run.overrides else None
        trainer.optimizer = get_megatron_optimizer(
            config, [trainer.wrapper], config_overrides=overrides, use_gloo_process_groups=False
        )
        trainer.wrapper.config.grad_scale_func = trainer.optimizer.scale_loss
        for group in trainer.optimizer.param_groups:  # as OptimizerParamScheduler does
            group["lr"] = group.get("max_lr") or case.lr
            group["weight_decay"] = case.weight_decay * group["wd_mult"]
    return trainer


def _steps(trainer: Trainer, rank: int, device: torch.device) -> Iterator[Any]:
    for step in range(STEPS):
        yield train_step(trainer, batches(trainer.case, step, rank, device))


def _norms_by_group(trainer: Trainer) -> dict[str, float]:
    """Stock DDP's optimizer is a chain, which keeps them."""
    found = trainer.optimizer.grad_norms_by_group if hasattr(
        trainer.optimizer, "grad_norms_by_group"
    ) else {}
    return {name: float(norm) for name, norm in found.items()}


def _trains_like_ddp(rank: int, world: int, run: Run, seed: int) -> dict[str, float]:
    device = init_megatron()
    case = CASE.but(seed=seed, clip=run.clip)
    reference = _trainer(run, case, None)
    expected = list(_steps(reference, rank, device))
    weights = reference.params()
    for strategy in STRATEGIES:
        label = f"{strategy}, {run}, seed {seed}"
        trainer = _trainer(run, case, strategy)
        for mine, theirs in zip(_steps(trainer, rank, device), expected, strict=True):
            check_loss(mine[0], theirs[0], label)
            check_norm(mine[1], theirs[1], label, 1e-5)
        for name, norm in _norms_by_group(reference).items():
            check_norm(_norms_by_group(trainer)[name], norm, f"{name} of {label}", 1e-5)
        check_weights(trainer.params(), weights, label)
    return _norms_by_group(reference)


@needs("mtp_detach_heads")
@pytest.mark.parametrize("tied", (False, True))
def test_detached_prediction_heads_have_a_norm_of_their_own(tied: bool) -> None:
    """Clipped by a bound that both norms are above; the model's norm leaves the heads out."""
    run = Run({"mtp_num_layers": 2, "mtp_detach_heads": True}, tied, clip=0.05)
    found = run_ranks(_trains_like_ddp, WORLD, run, fresh_seed())
    assert set(found[0]) == {"mtp"} and found[0]["mtp"] > 0.05


@needs("mtp_use_repeated_layer")
def test_one_prediction_layer_that_is_called_for_every_token() -> None:
    run = Run({"mtp_num_layers": 2, "mtp_use_repeated_layer": True})
    run_ranks(_trains_like_ddp, WORLD, run, fresh_seed())


def _mup_overrides(config: OptimizerConfig, model_config: Any) -> Any:
    standard = core_optimizer.get_standard_config_overrides(config)
    width = model_config.mup_width_mult
    return {**standard, **core_optimizer.get_mup_config_overrides(config, width)}


@needs("use_mup")
def test_mup_scales_the_learning_rates_of_the_same_parameters() -> None:
    model = {"use_mup": True, "mup_base_hidden_size": CASE.hidden // 3, "mup_embedding_mult": 2.0}
    run = Run(model, overrides=_mup_overrides)
    run_ranks(_trains_like_ddp, WORLD, run, fresh_seed())


@needs("mlp_chunks_for_training")
def test_mlps_that_are_called_in_chunks() -> None:
    run_ranks(_trains_like_ddp, WORLD, Run({"mlp_chunks_for_training": 2}), fresh_seed())


# Steps that are left out.


def _left_out(rank: int, world: int, seed: int, clip: float) -> None:
    """Some steps are taken, some are not: the bound is between the norms that the batches have for
    the first weights, and the batch of the largest comes first."""
    device = init_megatron()
    case = CASE.but(seed=seed, clip=clip)
    still = _trainer(Run(optimizer={"grad_norm_skip_threshold": 1e-9}), case, None)
    norms = [_taken(still, rank, step, device)[1] for step in range(2 * STEPS)]
    bound = (min(norms) + max(norms)) / 2
    run = Run(optimizer={"grad_norm_skip_threshold": bound})
    trainers = {s: _trainer(run, case, s) for s in (None, *STRATEGIES)}
    seen = set()
    for step in sorted(range(2 * STEPS), key=lambda step: -norms[step]):
        found: dict[Any, tuple[bool, float]] = {}
        for strategy, trainer in trainers.items():
            before = trainer.params()
            found[strategy] = _taken(trainer, rank, step, device)
            changed = any(not torch.equal(w, before[n]) for n, w in trainer.params().items())
            assert changed is found[strategy][0], (strategy, step)
        taken = found[None][0]
        seen.add(taken)
        for strategy in STRATEGIES:
            assert found[strategy][0] is taken, (strategy, step, found, bound)
            check_weights(trainers[strategy].params(), trainers[None].params(), strategy)
    assert seen == {True, False}, (norms, bound)


def _taken(trainer: Trainer, rank: int, step: int, device: torch.device) -> tuple[bool, float]:
    forward_backward(trainer, batches(trainer.case, step, rank, device))
    success, norm, _ = trainer.optimizer.step()
    return bool(success), float(norm or 0.0)


@needs("grad_norm_skip_threshold", of=OptimizerConfig)
@pytest.mark.parametrize("clip", (1.0, 0.0))
def test_a_step_whose_norm_is_too_large_is_left_out_on_all_ranks(clip: float) -> None:
    run_ranks(_left_out, WORLD, fresh_seed(), clip)
