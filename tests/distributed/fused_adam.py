"""An Adam with the surface of Transformer Engine's FusedAdam, for machines without it.

It takes what TE's does and refuses what TE's kernels cannot do: empty tensors, a missing gradient,
a gradient under the wrong name. It is elementwise, so a step on rows is the rows of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer

from megatron_fsdp_adapter.sharding.adam_table import Update
from megatron_fsdp_adapter.sharding.tensor_table import Lists, Table


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        capturable: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        assert adam_w_mode
        assert not (capturable and master_weights and store_param_remainders), "as TE does"
        self.capturable = capturable
        if capturable:
            for group in self.param_groups:
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.master_weights, self.master_weight_dtype = master_weights, master_weight_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self.multi_tensor_adam = multi_tensor_adam
        self.multi_tensor_adam_capturable = multi_tensor_adam_capturable

    def initialize_state(self, param: Any, store_param_remainders: bool) -> None:
        for name, dtype in self.dtypes.items():
            self.state[param][name] = torch.zeros_like(param, dtype=dtype)
        if self.master_weights:
            self.state[param]["master_param"] = param.detach().clone().float()

    def state_dict(self) -> dict[str, Any]:
        """As TE's does: float32 copies, in place of the state."""
        result = super().state_dict()
        for state in result["state"].values():
            for name, value in state.items():
                state[name] = value.float().clone()
        return result

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self._count(group)
            for param in group["params"]:
                assert type(param) in (torch.Tensor, torch.nn.Parameter), type(param)
                assert param.numel() > 0, "an empty tensor ends the list for the kernel"
                grad = param.decoupled_grad if self.use_decoupled_grad else param.grad
                assert grad is not None, "nothing would be trained, in silence"
                assert not self.capturable or grad.dtype == param.dtype, "one type for both there"
                if not self.state[param]:
                    self.initialize_state(param, self.store_param_remainders)
                self._update(group, param, grad)

    def _count(self, group: dict[str, Any]) -> None:
        if not self.capturable:
            group["step"] = group.get("step", 0) + 1
        elif "step" in group:
            group["step"] += torch.ones(1, dtype=torch.int32)
        else:
            group["step"] = torch.ones(1, dtype=torch.int32)

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        (beta1, beta2), state = group["betas"], self.state[param]
        lists = [[grad], [param], [state["exp_avg"]], [state["exp_avg_sq"]]]
        step, decay = group["step"], group["weight_decay"]
        told = (lists, group["lr"], beta1, beta2, group["eps"], step, 1, 1, decay)
        if self.capturable:
            overflow, scale = torch.zeros(1, dtype=torch.int32), torch.ones(1)
            self.multi_tensor_adam_capturable(65536, overflow, *told, scale)
        else:
            self.multi_tensor_adam(65536, None, *told)


def multi_tensor_adam(
    chunk_size: int, overflow: Any, lists: list[list[torch.Tensor]], lr: Any, beta1: float,
    beta2: float, eps: float, step: Any, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """TE's function of that name, for AdamW. Betas are float32. Their powers are float64 where
    `step` is a number, and of float32 where it is a tensor."""
    assert mode == 1 and bias_correction == 1
    first, second = (1 - torch.tensor(beta).item() ** step for beta in (beta1, beta2))
    _adam(lists, lr, (beta1, beta2), eps, (first, second), weight_decay)


def _adam(
    lists: Lists, lr: Any, betas: tuple[float, float], eps: float, corrections: tuple[Any, Any],
    weight_decay: float,
) -> None:  # fmt: skip
    beta1, beta2 = betas
    for grad, param, exp_avg, exp_avg_sq in zip(*lists, strict=True):
        first = exp_avg.float().mul(beta1).add(grad.float(), alpha=1 - beta1)
        second = exp_avg_sq.float().mul(beta2).addcmul(grad.float(), grad.float(), value=1 - beta2)
        exp_avg.copy_(first)
        exp_avg_sq.copy_(second)
        denominator = (second / corrections[1]).sqrt().add(eps)
        update = (first / corrections[0]) / denominator + weight_decay * param.float()
        param.copy_(param.float() - lr * update)


class HostKernel:
    """Stands for the kernel of `one_pass_adam`: in torch, keeping what it was told."""

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self.updates: list[Update] = []

    def __call__(self, table: Table, lists: Lists, update: Update) -> None:
        assert table.addresses[:4].tolist() == [[t.data_ptr() for t in row] for row in lists]
        assert table.addresses[4].tolist() == [tensor.numel() for tensor in lists[0]]
        assert update.decoupled
        self.tables.append(table)
        self.updates.append(update)
        grads = [g if update.clip is None else g * update.clip.to(g.dtype) for g in lists[0]]
        if update.scale is not None:
            grads = [grad * update.scale for grad in grads]
        _adam(
            [grads, *lists[1:]], update.lr, (update.beta1, update.beta2), update.eps,
            (update.correction1, update.correction2), update.weight_decay,
        )  # fmt: skip


def multi_tensor_adam_capturable(
    chunk_size: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], *told: Any
) -> None:
    """TE's function of that name, where nothing has overflown."""
    *rest, scale = told
    for grad in lists[0]:
        grad.mul_(scale)
    multi_tensor_adam(chunk_size, overflow, lists, *rest)


@contextmanager
def transformer_engine_optimizer() -> Iterator[None]:
    """Inside, core makes this Adam where it would make TE's."""
    with (
        mock.patch.object(core_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(core_optimizer, "Adam", FusedAdam),
        mock.patch.object(distrib_optimizer, "Adam", FusedAdam),
        mock.patch.object(core_optimizer, "is_te_min_version", lambda version: True),
    ):
        yield


def precision_aware(config: OptimizerConfig, **options: Any) -> OptimizerConfig:
    """`config` with the precision-aware optimizer. Making one so needs TE."""
    config.use_precision_aware_optimizer = True
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    for name, value in options.items():
        setattr(config, name, value)
    return config
