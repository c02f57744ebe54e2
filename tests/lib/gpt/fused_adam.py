"""An Adam with the surface of Transformer Engine's FusedAdam, for machines without it.

Checked line by line against `transformer_engine/pytorch/optimizers/fused_adam.py` of 2.11 and of
main of August 2026. Main differs, in what is here, by two things: it counts a step of a group
before it looks whether the group has parameters (`COUNTS_EMPTY_GROUPS`), and where both moments are
in bf16 it hands them to the kernel as they are, not as float32 copies.

apex's FusedAdam counts as 2.11 does. Its differences: other places of the arguments; no dtypes of
moments, no decoupled gradients, no `initialize_state` and no `state_dict` of its own; a parameter
without a gradient gets no state; `add_param_group` is of no use, as it steps the groups that it was
made with.

Left out: weights in fp8 and moments in fp16 or fp8 (refused here), main weights of its own, a
gradient scaler, `zero_grad`, and lists of several tensors for a call of the kernel. Added: an
assertion that no tensor is empty or a DTensor, which the kernels do not say. It is elementwise, so
a step on rows is the rows of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer

from megatron_fsdp_adapter.optim.multi_tensor import Lists, TensorTable, Update


class FusedAdam(torch.optim.Optimizer):
    COUNTS_EMPTY_GROUPS = False
    """True in TE's main."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        for dtype in (exp_avg_dtype, exp_avg_sq_dtype):
            assert dtype in (torch.float32, torch.bfloat16), "the stand-in knows no scales"
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        self.multi_tensor_adam = multi_tensor_adam
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )

    def initialize_state(self, param: Any, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            dtype = self.name_to_dtype_map[name]
            self.state[param][name] = torch.zeros(param.shape, dtype=dtype, device=param.device)

    def get_unscaled_state(self, param: Any, name: str) -> torch.Tensor:
        value = self.state[param][name]
        assert value.dtype == self.name_to_dtype_map[name]
        if value.dtype == torch.float32:
            return value
        return value.float()

    def state_dict(self) -> dict[str, Any]:
        """In place of the state float32 of it: copies of what has another dtype."""
        result = super().state_dict()
        result["state"] = {
            key: {name: value.float() for name, value in state.items()}
            for key, state in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        keys, params = (
            chain.from_iterable(group["params"] for group in groups)
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for key, param in zip(keys, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                dtype = self.name_to_dtype_map[name]
                self.state[param][name] = value.to(param.device, dtype, copy=True)

    @torch.no_grad()  # the kernels know no autograd
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if len(group["params"]) > 0 or self.COUNTS_EMPTY_GROUPS:
                group["step"] = group.get("step", 0) + 1
            self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            assert type(param) in (torch.Tensor, torch.nn.Parameter), type(param)
            assert param.numel() > 0, "an empty tensor ends the list for the kernel"
            if len(self.state[param]) == 0:
                self.initialize_state(param, self.store_param_remainders)
            kind = "decoupled_grad" if self.use_decoupled_grad else "grad"
            grad = getattr(param, kind, None)
            if grad is None:
                continue
            assert not self.master_weights, "the adapter has main weights of its own"
            wide = {name: self.get_unscaled_state(param, name) for name in self.state[param]}
            lists = [[grad.data], [param.data], [wide["exp_avg"]], [wide["exp_avg_sq"]]]
            self.multi_tensor_adam(
                65536,
                None,
                lists,
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"],
                self.adam_w_mode,
                1 if group["bias_correction"] else 0,
                group["weight_decay"],
            )
            for name, value in wide.items():
                self.state[param][name].copy_(value)


def multi_tensor_adam(
    chunk_size: int,
    overflow: Any,
    lists: list[list[torch.Tensor]],
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    step: Any,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """TE's function of that name, for AdamW. Betas are float32, their powers float64."""
    assert mode == 1
    assert bias_correction == 1
    first, second = (1 - torch.tensor(beta).item() ** step for beta in (beta1, beta2))
    _adam(lists, lr, (beta1, beta2), eps, (first, second), weight_decay)


def _adam(
    lists: Lists,
    lr: Any,
    betas: tuple[float, float],
    eps: float,
    corrections: tuple[Any, Any],
    weight_decay: float,
) -> None:
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
    """Stands for the kernel of `fused_adam`: in torch, keeping its arguments."""

    def __init__(self) -> None:
        self.tables: list[TensorTable] = []
        self.updates: list[Update] = []

    def __call__(self, table: TensorTable, lists: Lists, update: Update) -> None:
        assert table.addresses[:4].tolist() == [[t.data_ptr() for t in row] for row in lists]
        assert table.addresses[4].tolist() == [tensor.numel() for tensor in lists[0]]
        assert update.decoupled
        self.tables.append(table)
        self.updates.append(update)
        grads = []
        for g in lists[0]:
            if update.clip is not None:
                g = g * update.clip.to(g.dtype)
            grads.append(g)
        _adam(
            [grads, *lists[1:]],
            update.lr,
            (update.beta1, update.beta2),
            update.eps,
            (update.correction1, update.correction2),
            update.weight_decay,
        )


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
    asked = ("use_precision_aware_optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8")
    for name, value in {**dict.fromkeys(asked, True), **options}.items():
        setattr(config, name, value)
    return config
