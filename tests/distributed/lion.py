"""`optimizer` `lion` on shards, and its step on whole weights written down once more."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import OptimizerConfig

from tests.distributed.gpt import Case, Trainer, build_trainer

IN_CORE = hasattr(OptimizerConfig, "lion_beta1")
"""Before 0.17 there is no such optimizer."""
BESIDE_ADAM = hasattr(core_optimizer, "_get_megatron_emerging_optimizer")
"""From 0.18 on core's has Adam's betas, and matrices that are no embedding or output layer."""

BETAS = {"adam_beta1": 0.8, "adam_beta2": 0.95, "lion_beta1": 0.9, "lion_beta2": 0.85}


def is_lions(name: str, weight: torch.Tensor) -> bool:
    is_matrix = weight.dim() == 2 and not any(w in name for w in ("word_emb", "output_layer"))
    return is_matrix or not BESIDE_ADAM


class Whole:
    """All weights, and what Lion and Adam keep of them, on one rank. options: of each weight's
    parameter group."""

    def __init__(
        self, weights: dict[str, torch.Tensor], options: dict[str, Any], eps: float
    ) -> None:
        self.weights, self.options = weights, options
        self.averages = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        betas = BETAS["adam_beta1"], BETAS["adam_beta2"]
        self.adams = {
            name: torch.optim.AdamW([weight.requires_grad_()], 1.0, betas, eps)
            for name, weight in weights.items() if not is_lions(name, weight)
        }  # fmt: skip

    def step(self, gradients: dict[str, torch.Tensor], factor: float) -> None:
        for name, gradient in gradients.items():
            group, grad = self.options[name], gradient * factor
            if name in self.adams:
                self.adams[name].param_groups[0].update(
                    lr=group["lr"], weight_decay=group["weight_decay"]
                )
                self.weights[name].grad = grad
                self.adams[name].step()
            else:
                self._lion(name, group, grad)

    def _lion(self, name: str, group: dict[str, Any], grad: torch.Tensor) -> None:
        kind = "adam" if BESIDE_ADAM else "lion"
        first, second = BETAS[f"{kind}_beta1"], BETAS[f"{kind}_beta2"]
        weight, average = self.weights[name], self.averages[name]
        direction = torch.sign(first * average + (1 - first) * grad)
        decayed = weight * (1 - group["lr"] * group["weight_decay"])
        self.weights[name] = decayed - group["lr"] * direction
        self.averages[name] = second * average + (1 - second) * grad


def lion_trainer(case: Case, strategy: str, device: torch.device, **ddp: Any) -> Trainer:
    return build_trainer(case, strategy, device, ddp=ddp, optimizer={"optimizer": "lion", **BETAS})
