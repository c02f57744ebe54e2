"""`optimizer="sgd"`: core's SGD on shards. Core's own DistributedOptimizer takes Adam only, so that
stock DDP without it is what training is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter import FullyShardedDataParallel
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_model,
    build_trainer,
    ddp_config,
    full_all,
    optimizer_config,
    train_step,
)

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, lr=0.05)
MOMENTA = (0.9, 0.0)
STEPS = 4


def sgd_trainer(case: Case, strategy: str | None, device: torch.device, momentum: float) -> Trainer:
    """`strategy` None: stock DDP with whole weights in its optimizer."""
    model = build_model(case, device)
    config = ddp_config(case, strategy)
    cls: Any = FullyShardedDataParallel
    if strategy is None:
        cls = DistributedDataParallel
        config = replace(config, use_distributed_optimizer=False, overlap_param_gather=False)
    wrapper = cls(model.config, config, model)
    options = optimizer_config(
        case, optimizer="sgd", sgd_momentum=momentum,
        use_distributed_optimizer=strategy is not None,
        overlap_param_gather=config.overlap_param_gather,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, [wrapper], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        group["lr"] = case.lr * group["lr_mult"]
        group["weight_decay"] = case.weight_decay * group["wd_mult"]
    wrapper.config.no_sync_func = wrapper.no_sync if config.overlap_grad_reduce else None
    wrapper.config.finalize_model_grads_func = finalize_model_grads
    wrapper.config.grad_scale_func = optimizer.scale_loss
    return Trainer(case, wrapper, optimizer, strategy)


def whole_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Main weights, float32."""
    if trainer.strategy is not None:
        return trainer.params()
    named = {}
    for name, param in trainer.wrapper.named_parameters():
        main = getattr(param, "main_param", param)
        named[name.removeprefix("module.").removeprefix("module.")] = main.detach().float().clone()
    return named


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("bf16", [False, True])
def test_it_trains_like_stock_ddp(
    one_rank: torch.device, strategy: str, momentum: float, bf16: bool
) -> None:
    case = CASE.but(bf16=bf16)
    stock, ours = (sgd_trainer(case, kind, one_rank, momentum) for kind in (None, strategy))
    for step in range(STEPS):
        data = batches(case, step, 0, one_rank)
        (loss, norm), (our_loss, our_norm) = train_step(stock, data), train_step(ours, data)
        assert our_loss == pytest.approx(loss, rel=1e-6)
        assert our_norm == pytest.approx(norm, rel=1e-5)
        expected, found = whole_weights(stock), whole_weights(ours)
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-7, msg=name)


class FusedSGD(torch.optim.Optimizer):
    """Stands for Transformer Engine's: a kernel over lists of tensors, none of them empty, and a
    buffer for each parameter, with a momentum and without. Not derived from a class of torch's."""

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                assert param.numel() > 0 and type(param) is not DTensor
                state = self.state[param]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
                buffer.mul_(group["momentum"]).add_(param.grad)
                buffer.add_(param, alpha=group["weight_decay"])
                param.sub_(group["lr"] * buffer)


@pytest.mark.parametrize("momentum", MOMENTA)
def test_a_fused_one_is_given_shards_and_keeps_its_buffers(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch, momentum: float
) -> None:
    plain = sgd_trainer(CASE, "optim_grads_params", one_rank, momentum)
    monkeypatch.setattr(core_optimizer, "SGD", FusedSGD)
    fused = sgd_trainer(CASE, "optim_grads_params", one_rank, momentum)
    for step in range(3):
        entries = _state(fused)["state"].values()
        assert all(set(entry) == {"momentum_buffer"} for entry in entries)
        for trainer in (plain, fused):
            train_step(trainer, batches(CASE, step, 0, one_rank))
    expected, found = plain.params(), fused.params()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-7, msg=name)


def _state(trainer: Trainer, is_loading: bool = False) -> Any:
    said = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    return trainer.optimizer.sharded_state_dict({}, is_loading=is_loading, metadata=said)


@pytest.mark.parametrize("momentum", MOMENTA)
def test_its_state_is_there_before_a_step_and_a_load_brings_it_back(
    one_rank: torch.device, momentum: float
) -> None:
    trainer = sgd_trainer(CASE, "optim_grads_params", one_rank, momentum)
    kinds = {kind for entry in _state(trainer)["state"].values() for kind in entry}
    assert kinds == ({"momentum_buffer"} if momentum else set())
    for step in range(2):
        train_step(trainer, batches(CASE, step, 0, one_rank))
    other = sgd_trainer(CASE, "optim_grads_params", one_rank, momentum)
    saved = _state(trainer)
    if momentum:
        buffers = {name: entry["momentum_buffer"] for name, entry in saved["state"].items()}
        assert all(value.abs().sum() > 0 for value in full_all(buffers).values())
    other.wrapper.load_state_dict(trainer.wrapper.state_dict())
    _state(other, is_loading=True)
    other.optimizer.load_state_dict(saved)
    for step in range(2, 4):
        data = batches(CASE, step, 0, one_rank)
        assert train_step(trainer, data) == train_step(other, data)
    expected, found = trainer.params(), other.params()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_its_gradients_and_weights_are_in_float32(one_rank: torch.device) -> None:
    """Transformer Engine's FusedSGD leaves others where they are, without a word."""
    wrapper = build_trainer(CASE, "optim", one_rank).wrapper
    options = optimizer_config(CASE, optimizer="sgd")
    options.use_precision_aware_optimizer = True
    with pytest.raises(ValueError, match="use_precision_aware_optimizer=True supports only"):
        get_megatron_optimizer(options, [wrapper], use_gloo_process_groups=False)
