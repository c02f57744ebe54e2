"""Gradients summed in float64, and how far a sum in lower precision may be from them.

Standard rounding-error analysis (N. Higham, Accuracy and Stability of Numerical Algorithms,
section 4.2): a sum of n numbers, in any order and with k roundings of unit roundoff u on the way
of each of them, is off by at most gamma(k, u) * sum |x_i|, gamma(k, u) = k u / (1 - k u).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from .gpt import Case, build_model, forward_step, plain_name

U_FLOAT32 = 2.0**-24
U_BFLOAT16 = 2.0**-8
"""Unit roundoffs: half the distance from 1 to the next number, for 24 and 8 bits of significand."""


def gamma(roundings: int, unit: float) -> float:
    return roundings * unit / (1 - roundings * unit)


def exact_gradients(
    case: Case, weights: Mapping[str, torch.Tensor], data: list[torch.Tensor], device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(mean gradient, mean of the absolute values) over ranks of the sum over microbatches, in
    float64, from a model that nothing wraps and that computes in the case's dtype; collective."""
    model = build_model(case, device)
    params = {plain_name(name): param for name, param in model.named_parameters()}
    for name, param in params.items():
        param.data.copy_(weights[name])
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
    absolute = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
    for tokens in data:
        output, loss_func = forward_step(case, iter([tokens]), model)
        (loss_func(output)[0] / len(data)).backward()
        for name, param in params.items():
            assert param.grad is not None
            total[name] += param.grad
            absolute[name] += param.grad.abs()
            param.grad = None
    for tensors in (total, absolute):
        for tensor in tensors.values():
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
    return _on_host(total), _on_host(absolute)


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def rounding_bounds(
    absolute: Mapping[str, torch.Tensor], world: int, microbatches: int, comm_bf16: bool
) -> dict[str, torch.Tensor]:
    """Largest error of each element of a reduced gradient.

    There are world * microbatches summands. Accumulation and communication in float32 round each
    at most once per addition and once for the scale: gamma(world * microbatches, 2^-24). With
    communication in bfloat16 each microbatch's gradient is rounded once to bfloat16 and then at
    most once per rank that is added: gamma(world, 2^-8) more, on top of the float32 additions.
    """
    relative = gamma(world * microbatches, U_FLOAT32)
    if comm_bf16:
        relative = (1 + relative) * (1 + gamma(world, U_BFLOAT16)) - 1
    return {name: relative * tensor + 1e-37 for name, tensor in absolute.items()}
