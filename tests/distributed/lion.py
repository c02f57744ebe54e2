"""Stands for the Lion of NVIDIA's emerging_optimizers, which core makes where that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import OptimizerConfig
from torch.distributed.tensor import DTensor

from tests.distributed.gpt import Case, Trainer, build_trainer

IN_CORE = hasattr(OptimizerConfig, "lion_beta1")
"""Before 0.17 there is no such optimizer."""


def updated(
    weight: torch.Tensor, average: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and average after a step."""
    first, second = group["betas"]
    direction = torch.sign(first * average + (1 - first) * grad)
    decayed = weight * (1 - group["lr"] * group["weight_decay"])
    return decayed - group["lr"] * direction, average.lerp(grad, 1 - second)


class Lion(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                assert type(param) is not DTensor
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                weight, average = updated(param, state["exp_avg"], param.grad, group)
                param.copy_(weight)
                state["exp_avg"].copy_(average)


@contextmanager
def emerging_optimizers() -> Iterator[None]:
    """Inside, core has the package's Lion."""
    with (
        mock.patch.object(core_optimizer, "HAVE_EMERGING_OPTIMIZERS", True),
        mock.patch.object(core_optimizer, "Lion", Lion, create=True),
    ):
        yield


def lion_trainer(case: Case, strategy: str, device: torch.device, **ddp: Any) -> Trainer:
    with emerging_optimizers():
        return build_trainer(
            case, strategy, device, ddp=ddp,
            optimizer={"optimizer": "lion", "lion_beta1": 0.9, "lion_beta2": 0.95},
        )
