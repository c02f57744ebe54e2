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
    exact = torch.stack([grad.double().norm() for grad in found.gradients.values()]).norm().item()
    # Core's kernel for machines without TE takes the norm of a tensor in the tensor's dtype.
    in_bf16 = any(grad.dtype == BF16 for grad in found.gradients.values())
    assert found.norm == pytest.approx(exact, rel=2.0**-7 if in_bf16 else 1e-5)
    assert found.norm > CASE.clip, "the step was to be clipped"
    for name, grad in found.gradients.items():
        plain[name].decoupled_grad = (grad * (CASE.clip / (found.norm + 1e-6))).to(grad.dtype)
    whole.step()
    check_same_bits(found.weights, plain, "the step on whole tensors")


BY_TURNS = [
    (policy, strategy)
    for at, policy in enumerate(POLICIES)
    for strategy in (STRATEGIES[at % 3], STRATEGIES[3])
]
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
    groups = [[name for name, p in plain.items() if (p.dim() == 1) == flat] for flat in (0, 1)]
    whole = FusedAdam(
        [
            {"params": [plain[name] for name in names], "weight_decay": 0.1 * (1 - flat)}
            for flat, names in enumerate(groups)
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
            assert value._local_tensor.shape == own.shape and value.shape == param.shape
            assert value.dtype == moments.get(f"{key}_dtype", FP32)
    saved = trainer.optimizer.optimizer.state_dict()["state"]
    stored = {v.untyped_storage()._cdata for s in _locals(state.values()) for v in s}
    assert {v.untyped_storage()._cdata for s in _locals(saved.values()) for v in s} == stored


def _locals(states: Any) -> list[list[torch.Tensor]]:
    return [[value._local_tensor for value in state.values()] for state in states]


@pytest.mark.parametrize(
    ("ddp", "optimizer", "says"),
    [
        (
            {"megatron_fsdp_main_grads_dtype": BF16},
            {},
            ("use_precision_aware_optimizer=False", "Set it to True (needs Transformer Engine)"),
        ),
        ({"megatron_fsdp_main_params_dtype": None}, {}, ("use_precision_aware_optimizer=False",)),
        (
            {},
            {"use_precision_aware_optimizer": True},
            ("use_precision_aware_optimizer=True", "cannot be imported"),
        ),
        (
            {},
            {"use_precision_aware_optimizer": True, "main_grads_dtype": BF16},
            ("main_grads_dtype=torch.bfloat16", "DDP config is torch.float32"),
        ),
        (
            {},
            {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
            ("main_params_dtype=torch.float16", "DDP config is torch.float32"),
        ),
        ({}, {"exp_avg_dtype": torch.uint8}, ("exp_avg_dtype=torch.uint8", "Use torch.float32")),
        *(
            pytest.param(
                {},
                {**LION, name: value},
                ("optimizer='lion'", f"{name}={value}"),
                marks=OF_LATER_CORE,
            )
            for name, value in (
                ("optimizer_cpu_offload", True),
                ("use_precision_aware_optimizer", True),
                ("fp16", True),
                ("adam_beta1" if LION_BESIDE_ADAM else "lion_beta1", 1.0),
            )
        ),
    ],
)
@on_ranks(1)
def test_what_the_optimizer_cannot_do_is_an_early_error(
    ddp: dict[str, Any], optimizer: dict[str, Any], says: tuple[str, ...]
) -> None:
    def changed(config: OptimizerConfig) -> OptimizerConfig:
        vars(config).update(optimizer)
        return config

    with pytest.raises(ValueError) as caught:
        build_trainer(CASE, "optim_grads_params", init_megatron(), ddp=ddp, optimizer=changed)
    assert all(text in str(caught.value) for text in says), caught.value
