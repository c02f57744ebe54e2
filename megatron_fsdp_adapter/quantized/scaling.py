"""The state of delayed scaling for a weight's GEMM, as a tensor that a checkpoint can have.

Transformer Engine keeps scales and histories of amaxes in its modules: of all tensors of a product,
forward and backward, in a column each. Without them a run would go on with scales of 1, which puts
weights of 0.02 among the subnormals of E4M3. TE's own way, pickled bytes for each module
(`_extra_state`), can neither be split by expert nor read without running what it names.

A record is float32 of shape (2 + length, 5): by row the scales of the next casts, how the weight's
bytes were made, and the history, from the present step back; by column input, weight, output, and
in backward the gradients of output and input. Amaxes are the same on all ranks that reduce them
together, so one of them has what all have. How the bytes were made is in the weight's column: the
scale that they have, which is not the next one where a step was left out or the weight is frozen;
`OUTDATED` where they will be made with the next one; NaN where it is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.params import ParamPair

DIRECTIONS = (("scaling_fwd", 3), ("scaling_bwd", 2))
"""Attributes of TE's modules with that state, and the tensors of a GEMM that are quantized
there."""
WEIGHT = 1
"""Its column."""
OUTDATED = 0.0
HEAD = 2
"""Rows before the history."""
LAST = "_fsdp_last_scale"
"""Attribute of a quantized parameter: the scale of its bytes, (1,) float32."""
NEXT = "_fsdp_next_cast"
"""Attribute of a quantized parameter: how a load wants its bytes made from main weights. With this
scale, and then the history is as it was saved; or, if that is an integer, with one that is found
from their amax, divided by 2 to the power of it."""


@dataclass(frozen=True)
class Scaling:
    """The source of the record of one weight: GEMM number `product` of TE's module `owner`."""

    owner: nn.Module
    # The weight as it is computed with.
    param: nn.Parameter
    product: int
    # Whether an optimizer updates it.
    trained: bool

    def record(self, outdated: bool) -> torch.Tensor:
        """A copy of the state. outdated: whether the weight's bytes will be made again before they
        are read."""
        states = list(self._states())
        scales = torch.cat([scale for scale, _ in states])
        made = torch.full_like(scales, OUTDATED)
        noted = self.param.__dict__
        if self.is_unknown:
            made[WEIGHT] = math.nan
        elif NEXT in noted:
            made[WEIGHT] = noted[NEXT][0]
        elif LAST in noted and not outdated:
            made[WEIGHT] = noted[LAST][0]
        histories = torch.cat([history for _, history in states], 1)
        return torch.cat([scales[None], made[None], histories])

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
        noted = self.param.__dict__
        noted.pop(NEXT, None)
        made = float(record[1, WEIGHT])
        if math.isnan(made):
            self.forget()
        elif LAST in noted and made != OUTDATED:
            noted[NEXT] = torch.full_like(scale[:1], made)

    def follow(self) -> None:
        """TE gives a module other quantizers where it changes the length of a history, and to those
        weights that the module shows then; outside of a pass that is not this one."""
        quantizers = self.owner.__dict__.get("quantizers", {}).get("scaling_fwd")
        if LAST in self.param.__dict__ and quantizers:
            number = self.product * DIRECTIONS[0][1] + WEIGHT
            self.param._quantizer = quantizers[number]  # type: ignore[attr-defined]

    @property
    def is_unknown(self) -> bool:
        """True if the weight was loaded, and its scale is still to be found from its values."""
        return isinstance(self.param.__dict__.get(NEXT), int)

    @torch.no_grad()
    def forget(self) -> None:
        """The weight is loaded and nothing is known of its scale, which will come of its values. A
        weight that is not quantized is TE's to measure."""
        noted = self.param.__dict__
        if LAST not in noted:
            return
        _, history = next(self._states())
        history[:, WEIGHT].zero_()
        recipe: Any = self.owner.fp8_meta["recipe"]  # type: ignore[index]
        noted[NEXT] = int(recipe.margin)

    def _states(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The scales (n,) and the history (length, n) of each direction, as views."""
        for name, count in DIRECTIONS:
            state: Any = self.owner.fp8_meta[name]  # type: ignore[index]
            columns = slice(self.product * count, (self.product + 1) * count)
            yield state.scale[columns], state.amax_history[:, columns]


def scaling_of(pair: ParamPair) -> Scaling | None:
    """The scaling of a weight of TE's modules that compute with delayed scaling; None for any
    other."""
    trained = pair.group.key.requires_grad
    for owner, name in pair.managed.slots:
        about = getattr(owner, "param_init_meta", {}).get(name)
        if getattr(about, "fp8_meta_index", None) is None:
            continue
        states = [getattr(owner, "fp8_meta", {}).get(key) for key, _ in DIRECTIONS]
        if all(hasattr(state, "amax_history") for state in states):
            return Scaling(owner, pair.unsharded, _product(about), trained)
    return None


def scalings_of(pairs: Iterable[ParamPair]) -> list[Scaling]:
    """The scalings of those of `pairs` that have one."""
    found = map(scaling_of, pairs)
    return [scaling for scaling in found if scaling is not None]


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
