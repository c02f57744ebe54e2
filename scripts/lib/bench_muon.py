"""Muon of others, for comparison: megatron-core's layer-wise optimizer, and torch's on FSDP2."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

MOMENTUM, STEPS, SCALE = 0.95, 5, 0.2
"""Of all rows with Muon; the last with `spectral` scaling gives the size of Adam's updates."""


def layer_wise_wrapper(config: Any, ddp_config: Any, module: Any) -> Any:
    """`module` in core's DDP, its matrices in a buffer whose shards cut none, as Megatron-LM of
    0.19 does it. Sets `use_distributed_optimizer` in the DDP config.

    Raises RuntimeError for a megatron-core without it, or without NVIDIA's emerging_optimizers.
    """
    from megatron.core.optimizer import layer_wise_optimizer as core

    tag = getattr(core, "tag_params_for_buffer_routing", None)
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    if tag is None or "full_param_layout" not in accepted:
        raise RuntimeError("ddp-muon: this megatron-core has no layout for it; use 0.19 or later")
    if not getattr(core_optimizer.emerging_optimizers, "HAVE_EMERGING_OPTIMIZERS", False):
        raise RuntimeError("ddp-muon: core needs the package emerging-optimizers for its Muon")
    ddp_config.use_distributed_optimizer = True
    tag([module])
    layout = core.LayerWiseDistributedOptimizer.compute_full_param_layout(
        [param for param in module.parameters() if param.requires_grad],
        ddp_config.bucket_size,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ddp_config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
    )
    return DistributedDataParallel(
        config=config, ddp_config=ddp_config, module=module, full_param_layout=layout
    )


def is_muons(name: str, param: torch.nn.Parameter) -> bool:
    apart = ("embedding", "output_layer", "router", "norm")
    return param.ndim == 2 and not any(word in name for word in apart)


class FullTensorMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` on fully_shard's DTensors: every rank gathers each momentum, in bf16, and
    orthogonalises it, as torch's function does it, and keeps its rows."""

    def __init__(self, params: Sequence[torch.nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        from torch.distributed.tensor import DTensor
        from torch.optim._muon import _zeropower_via_newtonschulz

        coefficients = (3.4445, -4.7750, 2.0315)
        for group in self.param_groups:
            for param in group["params"]:
                local, grad = param._local_tensor, param.grad._local_tensor
                momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(local))
                momentum.lerp_(grad, 1 - MOMENTUM)
                sent = DTensor.from_local(
                    momentum.bfloat16(), param.device_mesh, param.placements,
                    shape=param.shape, stride=param.stride(), run_check=False,
                )  # fmt: skip
                whole = _zeropower_via_newtonschulz(sent.full_tensor(), coefficients, STEPS, 1e-7)
                rows = whole.chunk(param.device_mesh.size())
                here = param.device_mesh.get_local_rank()
                local.mul_(1 - group["lr"] * group["weight_decay"])
                if here < len(rows):
                    scale = SCALE * max(param.shape) ** 0.5
                    local.add_(rows[here], alpha=-group["lr"] * scale)


class Several:
    """Optimizers that step as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
