"""Megatron's precision-aware optimizer: gradients and moments in bf16, on this rank's shards.

On GPUs with Transformer Engine itself: tests/gpu/test_gpu_precision.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from torch import nn

from tests.lib.gpt.checks import check_same_bits, recorded_step
from tests.lib.gpt.fused_adam import FusedAdam
from tests.lib.gpt.gpt import STRATEGIES, Trainer, batches, build_trainer, init_megatron
from tests.lib.gpt.lion import LION, LION_BESIDE_ADAM, OF_LATER_CORE
from tests.lib.gpt.precision_aware import CASE, precision_aware_trainer
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("megatron/optimizer/optimizer.py", "optim/step.py", "optim/local_shards.py")

BF16 = torch.bfloat16
FP32 = torch.float32

POLICIES: dict[str, dict[str, Any]] = {
    "bf16 gradients": {"megatron_fsdp_main_grads_dtype": BF16},
    "bf16 main weights, fp32 gradients": {"megatron_fsdp_main_params_dtype": None},
    "all bf16": {"megatron_fsdp_main_params_dtype": BF16, "megatron_fsdp_main_grads_dtype": BF16},
    "bf16 moments": {},
}
MOMENTS = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}


def _check_step(trainer: Trainer, whole: FusedAdam, plain: dict[str, Any], data: Any) -> None:
    """Clipping and the step are those on whole tensors, bit for bit."""
    found = recorded_step(trainer, data)
    norms = [grad.double().norm() for grad in found.gradients.values()]
    exact = torch.stack(norms).norm().item()
    # Core's kernel for machines without TE takes the norm of a tensor in the tensor's dtype.
    in_bf16 = any(grad.dtype == BF16 for grad in found.gradients.values())
    bound = 2.0**-7 if in_bf16 else 1e-5
    assert found.norm == pytest.approx(exact, rel=bound)
    assert found.norm > CASE.clip, "the step was to be clipped"
    factor = CASE.clip / (found.norm + 1e-6)
    for name, grad in found.gradients.items():
        plain[name].decoupled_grad = (grad * factor).to(grad.dtype)
    whole.step()
    check_same_bits(found.weights, plain, "the step on whole tensors")


BY_TURNS = []
for _at, _policy in enumerate(POLICIES):
    BY_TURNS.append((_policy, STRATEGIES[_at % 3]))
    BY_TURNS.append((_policy, STRATEGIES[3]))
"""Each policy with ZeRO-3 and one of the other strategies."""


@pytest.mark.parametrize(("policy", "strategy"), BY_TURNS)
@on_ranks(2)
def test_gradients_moments_and_main_weights_in_bf16(rank: int, strategy: str, policy: str) -> None:
    """Norm, clipping and three steps; state of local shape, and what a checkpoint is given is the
    state itself, not a copy."""
    device = init_megatron()
    moments = MOMENTS if policy in ("bf16 moments", "all bf16") else {}
    trainer = precision_aware_trainer(strategy, POLICIES[policy], device, **moments)
    plain = {name: nn.Parameter(value.clone()) for name, value in trainer.params().items()}
    matrices = [param for param in plain.values() if param.dim() != 1]
    vectors = [param for param in plain.values() if param.dim() == 1]
    whole = FusedAdam(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=1e-2,
        eps=CASE.adam_eps,
        use_decoupled_grad=True,
        **moments,
    )
    for step in range(3):
        _check_step(trainer, whole, plain, batches(CASE, step, rank, device))
    state = trainer.optimizer.optimizer.state
    for param in trainer.wrapper.parameters():
        own = param._local_tensor
        if own.numel() == 0:
            continue
        assert set(state[param]) == {"exp_avg", "exp_avg_sq"}, "no second copy of main weights"
        for key, value in state[param].items():
            assert value._local_tensor.shape == own.shape
            assert value.shape == param.shape
            assert value.dtype == moments.get(f"{key}_dtype", FP32)
    saved = trainer.optimizer.optimizer.state_dict()["state"]
    assert _memory_of(saved) == _memory_of(state)


def _memory_of(state: Any) -> set[int]:
    """The storages of this rank's parts of the state of parameters."""
    found = set()
    for values in state.values():
        for value in values.values():
            found.add(value._local_tensor.untyped_storage()._cdata)
    return found


WITH = {"use_precision_aware_optimizer": True}
IMPOSSIBLE: list[Any] = [
    # fields of the DDP config, of the optimizer's, what the error says
    (
        {"megatron_fsdp_main_grads_dtype": BF16},
        {},
        ("use_precision_aware_optimizer=False", "Set it to True (needs Transformer Engine)"),
    ),
    ({"megatron_fsdp_main_params_dtype": None}, {}, ("use_precision_aware_optimizer=False",)),
    ({}, WITH, ("use_precision_aware_optimizer=True", "cannot be imported")),
    (
        {},
        {**WITH, "main_grads_dtype": BF16},
        ("main_grads_dtype=torch.bfloat16", "DDP config is torch.float32"),
    ),
    (
        {},
        {**WITH, "main_params_dtype": torch.float16},
        ("main_params_dtype=torch.float16", "DDP config is torch.float32"),
    ),
    ({}, {"exp_avg_dtype": torch.uint8}, ("exp_avg_dtype=torch.uint8", "Use torch.float32")),
]
OF_LION = {
    "optimizer_cpu_offload": True,
    "use_precision_aware_optimizer": True,
    "fp16": True,
    "adam_beta1" if LION_BESIDE_ADAM else "lion_beta1": 1.0,
}
for _name, _value in OF_LION.items():
    _says = ("optimizer='lion'", f"{_name}={_value}")
    IMPOSSIBLE.append(pytest.param({}, {**LION, _name: _value}, _says, marks=OF_LATER_CORE))


@pytest.mark.parametrize(("ddp", "optimizer", "says"), IMPOSSIBLE)
@on_ranks(1)
def test_what_the_optimizer_cannot_do_is_an_early_error(
    ddp: dict[str, Any], optimizer: dict[str, Any], says: tuple[str, ...]
) -> None:
    def changed(config: OptimizerConfig) -> OptimizerConfig:
        vars(config).update(optimizer)
        return config

    with pytest.raises(ValueError) as caught:
        build_trainer(CASE, "optim_grads_params", init_megatron(), ddp=ddp, optimizer=changed)
    for text in says:
        assert text in str(caught.value), caught.value
