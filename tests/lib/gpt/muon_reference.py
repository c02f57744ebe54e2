"""Muon and AdamW on whole weights, written down once more: what every test of Muon compares with.

Gradients are those of stock DDP, which each rank has whole but for tensor parallelism: over that
they are put together here, by core's marks. Fused weights are taken apart as the layers do it that
read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

Coefficients = tuple[tuple[float, float, float], ...]
QUINTIC: Coefficients = (
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
)  # fmt: skip


def orthogonal(matrix: torch.Tensor, coefficients: Coefficients = QUINTIC) -> torch.Tensor:
    """Steps on one matrix, as K. Jordan wrote them, by default five, in float32."""
    x = matrix.float()
    x = x / x.norm().clamp(min=1e-7)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def tensor_group(name: str) -> Any:
    if ".experts." in name:
        return ps.get_expert_tensor_parallel_group()
    return ps.get_tensor_model_parallel_group()


def is_split(param: Any, name: str) -> bool:
    """Over several tensor-parallel ranks."""
    return getattr(param, "tensor_model_parallel", False) and tensor_group(name).size() > 1


def whole(param: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    """Over tensor-parallel ranks; collective over them."""
    if not is_split(param, name):
        return value
    pieces = [torch.empty_like(value) for _ in range(tensor_group(name).size())]
    dist.all_gather(pieces, value.contiguous(), group=tensor_group(name))
    if "linear_fc1" in name and value.dim() == 2:  # gate and up of each rank
        halves = [piece.chunk(2) for piece in pieces]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(pieces, param.partition_dim)


def own_part(param: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    if not is_split(param, name):
        return value
    group = tensor_group(name)
    if "linear_fc1" in name:
        gate, up = (half.chunk(group.size())[group.rank()] for half in value.chunk(2))
        return torch.cat([gate, up])
    return value.chunk(group.size(), param.partition_dim)[group.rank()]


def is_muons(name: str, param: torch.Tensor) -> bool:
    apart = ("embedding", "output_layer", "router", "norm")
    return param.dim() == 2 and not any(word in name for word in apart)


@dataclass
class Reference:
    """State by name. config: fields of the model's config; dtype: matrices are rounded to it;
    scale: of rows and columns; coefficients: of each step; splits_qkv: into three matrices.

    gains: by name, the steepest slope of the steps' polynomials over the norm of what they made of
    a matrix whose norm was 1: how many times an error of the gradient, relative to it, may be in
    the update, relative to that."""

    config: Any
    lr: float
    decay: float
    eps: float
    clip: float
    dtype: torch.dtype = torch.float32
    momentum: float = 0.95
    nesterov: bool = False
    scale: Callable[[int, int], float] = lambda rows, columns: math.sqrt(max(rows, columns))
    coefficients: Coefficients = QUINTIC
    splits_qkv: bool = True
    orthogonalize: Callable[[torch.Tensor, Coefficients], torch.Tensor] = orthogonal
    gains: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def step(
        self,
        params: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        norm: float,
    ) -> dict[str, torch.Tensor]:
        """The weights after a step. params: the model's, for their marks."""
        factor = min(1.0, self.clip / (norm + 1e-6))
        found = {}
        for name, gradient in gradients.items():
            weight = weights[name]
            update = self.muon if is_muons(name, weight) else self._adam
            found[name] = update(name, params[name], weight.clone(), gradient * factor)
        return found

    def muon(self, name: str, param: Any, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The weight after a step; collective over tensor-parallel ranks. Each matrix of it is
        stepped by itself."""
        buffer = self.state.setdefault(name, torch.zeros_like(grad))
        buffer.lerp_(grad, 1 - self.momentum)
        update = grad.lerp(buffer, self.momentum) if self.nesterov else buffer
        weight = whole(param, name, weight) * (1 - self.lr * self.decay)
        parts = (self.parts_of(name, value) for value in (weight, whole(param, name, update)))
        for target, part in zip(*parts, strict=True):
            matrix = part.reshape(-1, weight.shape[1])
            found = self._direction(name, matrix).view(part.shape)
            target.add_(found, alpha=-self.lr * self.scale(*matrix.shape))
        return own_part(param, name, weight)

    def parts_of(self, name: str, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """The matrices of a whole parameter, as views of it: (repeats, rows, columns)."""
        heights = self._heights(name, value.shape[0])
        return value.view(-1, sum(heights), value.shape[1]).split(heights, dim=1)

    def _heights(self, name: str, rows: int) -> list[int]:
        """Of rows that repeat: queries, keys and values of a group; of latent attention keys and
        values of a head, latents and positions; gate and up. All rows of what is not fused."""
        config = self.config
        if "linear_qkv" in name and self.splits_qkv:
            size = config.kv_channels
            return [config.num_attention_heads // config.num_query_groups * size, size, size]
        if "linear_kv_up_proj" in name:
            return [config.qk_head_dim, config.v_head_dim]
        if "linear_kv_down_proj" in name:
            return [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        if "linear_fc1" in name and config.gated_linear_unit:
            return [rows // 2] * 2
        return [rows]

    def _direction(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        found = self.orthogonalize(matrix.to(self.dtype), self.coefficients)
        slope = math.prod(a for a, _, _ in self.coefficients)
        norm = float(found.norm())
        gain = slope / norm if norm else 0.0  # without a gradient there is no update
        self.gains[name] = max(gain, self.gains.get(name, 0.0))
        return found

    def _adam(
        self, name: str, param: Any, weight: torch.Tensor, grad: torch.Tensor
    ) -> torch.Tensor:
        if name not in self.state:
            held = weight.clone().requires_grad_()
            decay = self.decay if weight.dim() > 1 else 0.0
            adam = torch.optim.AdamW([held], self.lr, (0.9, 0.999), self.eps, decay)
            self.state[name] = held, adam
        held, adam = self.state[name]
        held.data.copy_(weight)
        held.grad = grad.clone()
        adam.step()
        return held.detach().clone()
