"""The state of delayed scaling for a weight's GEMM, as a tensor that a checkpoint can have.

Transformer Engine keeps scales and histories of amaxes in its modules: of all tensors of a product,
forward and backward, in a column each. Without them a run would go on with scales of 1, which puts
weights of 0.02 among the subnormals of E4M3. TE's own way, pickled bytes for each module
(`_extra_state`), can neither be split by expert nor read without running what it names.

A record is float32 of shape (2 + length, 5): by row the scales of the next casts, zeros, and the
history, from the present step back; by column input, weight, output, and in backward the gradients
of output and input. Amaxes are the same on all ranks that reduce them together, so one of them has
what all have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.identity import ParamPair

DIRECTIONS = (("scaling_fwd", 3), ("scaling_bwd", 2))
"""Attributes of TE's modules with that state, and the tensors of a GEMM that are quantized
there."""
HEAD = 2
"""Rows before the history."""


@dataclass(frozen=True)
class Scaling:
    """The source of the record of one weight: GEMM number `product` of TE's module `owner`."""

    owner: nn.Module
    product: int

    def record(self) -> torch.Tensor:
        """A copy of the state."""
        states = list(self._states())
        scales = torch.cat([scale for scale, _ in states])[None]
        histories = torch.cat([history for _, history in states], 1)
        return torch.cat([scales, torch.zeros_like(scales), histories])

    def problems(self, name: str, record: Any) -> list[str]:
        """Problems of what is to be loaded."""
        width = sum(count for _, count in DIRECTIONS)
        if not isinstance(record, torch.Tensor):
            return [f"{name}: a {type(record).__name__}, expected a tensor"]
        if record.dim() != 2 or record.shape[0] <= HEAD or record.shape[1] != width:
            return [f"{name}: shape {tuple(record.shape)}, expected (more than {HEAD}, {width})"]
        return []

    @torch.no_grad()
    def load(self, record: torch.Tensor) -> None:
        """Takes the state over. A history of another length is cut, or goes on with zeros."""
        first = 0
        for scale, history in self._states():
            columns = record[:, first : first + scale.numel()]
            rows = min(len(history), len(record) - HEAD)
            scale.copy_(columns[0])
            history.zero_()
            history[:rows].copy_(columns[HEAD : HEAD + rows])
            first += scale.numel()

    def _states(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The scales (n,) and the history (length, n) of each direction, as views."""
        for name, count in DIRECTIONS:
            state: Any = self.owner.fp8_meta[name]  # type: ignore[index]
            columns = slice(self.product * count, (self.product + 1) * count)
            yield state.scale[columns], state.amax_history[:, columns]


def scaling_of(pair: ParamPair) -> Scaling | None:
    """The scaling of a weight of TE's modules that compute with delayed scaling; None for any
    other."""
    for owner, name in pair.managed.slots:
        about = getattr(owner, "param_init_meta", {}).get(name)
        if getattr(about, "fp8_meta_index", None) is None:
            continue
        states = [getattr(owner, "fp8_meta", {}).get(key) for key, _ in DIRECTIONS]
        if all(hasattr(state, "amax_history") for state in states):
            return Scaling(owner, _product(about))
    return None


def _product(about: Any) -> int:
    """The number of a weight's product in its module. TE's index may be of a kind that has no
    arithmetic."""
    return int(about.fp8_meta_index) // DIRECTIONS[0][1]


def begin_scaling(module: nn.Module, recipe: Any) -> None:
    """Makes the state of delayed scaling of TE's modules that have none, as their first forward
    would, so that a load finds where it belongs; that forward keeps what is there."""
    child: Any
    for child in module.modules():
        about = getattr(child, "param_init_meta", {}).values()
        products = [_product(each) for each in about if each.fp8_meta_index is not None]
        if products and not getattr(child, "fp8_meta_tensors_initialized", True):
            child.fp8_meta |= {"recipe": recipe, "num_gemms": max(products) + 1}
            child.init_fp8_meta_tensors(recipe)
