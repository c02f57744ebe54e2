"""The same training without an engine: one unsharded process, main weights of its own, whole
weights quantized whenever main weights have changed."""

from __future__ import annotations

from typing import Any

import torch

from tests.lib.engine.small_model import Loop, Setup
from tests.lib.quantized.emulated import quantize_whole, roll
from tests.lib.quantized.te_weights import KNOWS


class PlainQuantizedRig(Loop):
    """Data of `ranks` ranks; `separately`: the gradients of each
    microbatch are added up over ranks first, as with sharded gradients; `rolls`: delayed scales
    move with every forward."""

    def __init__(
        self, setup: Setup, ranks: int = 1, separately: bool = False, rolls: bool = True
    ) -> None:
        super().__init__(setup)
        self.ranks = ranks
        self.separately = separately
        self.rolls = rolls
        self.params = dict(self.model.named_parameters())
        self.main = {
            name: getattr(param, "_high_precision_init_val", param).detach().float().clone()
            for name, param in self.params.items()
        }
        self.quantized: dict[str, Any] = {
            name: param for name, param in self.params.items() if hasattr(param, "_quantizer")
        }
        self.grads: dict[str, torch.Tensor] = {}

    def loss(self, index: int = 0) -> torch.Tensor:
        for param in self.quantized.values():
            KNOWS.drop_derived(param)
            KNOWS.prepare(param)
        return super().loss(index)

    def forward_backward(self, microbatches: int = 1, first: int = 0) -> None:
        indices = range(first, first + microbatches)
        orders = [[(i, r) for r in range(self.ranks)] for i in indices]
        if not self.separately:
            orders = [[(i, r) for i in indices] for r in range(self.ranks)]
        for order in orders:
            total: dict[str, torch.Tensor] = {}
            for index, rank in order:
                self.loss(index + 100 * rank).backward()
                self.roll()
                self._add(total, self._taken())
            self._add(self.grads, total)

    def _taken(self) -> dict[str, torch.Tensor]:
        found = {n: p.grad.float() for n, p in self.params.items() if p.grad is not None}
        for param in self.params.values():
            param.grad = None
        return found

    @staticmethod
    def _add(total: dict[str, torch.Tensor], more: dict[str, torch.Tensor]) -> None:
        for name, value in more.items():
            total[name] = total[name] + value if name in total else value

    def roll(self) -> None:
        for param in self.quantized.values() if self.rolls else ():
            roll(param)

    def zero(self) -> None:
        self.grads = {}
        self._taken()

    @torch.no_grad()
    def optimizer_step(self) -> None:
        self._add(self.grads, self._taken())
        for name, grad in self.grads.items():
            self.main[name].sub_(grad / self.ranks, alpha=0.1)
        self._follow(frozen=False)

    @torch.no_grad()
    def write(self) -> None:
        for value in self.main.values():
            value.mul_(0.5)
        self._follow(frozen=True)

    def _follow(self, frozen: bool) -> None:
        for name, param in self.params.items():
            if name in self.quantized:
                if param.requires_grad or frozen:
                    dtype = torch.float32 if param.requires_grad else param.dtype
                    quantize_whole(param, self.main[name].to(dtype))
            else:
                param.copy_(self.main[name])

    def weights(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.main.items()}
