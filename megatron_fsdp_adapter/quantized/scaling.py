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
"""Column of the weight."""
OUTDATED = 0.0
"""Stands for the scale of bytes that will be made with the next one."""
HEAD = 2
"""Rows before the history."""
LAST = "_fsdp_last_scale"
"""Attribute of a quantized parameter: the scale of its bytes, (1,) float32."""
NEXT = "_fsdp_next_cast"
"""Attribute of a quantized parameter: how its bytes are made from main weights after a load. If it
is a tensor, with this scale; the history is as it was saved then. If it is an integer, with the
scale of the main weights' amax, divided by 2 to the power of it."""


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
        """A copy of the state, as the module's docstring describes a record.

        outdated: whether the weight's bytes will be made again before they are read."""
        states = list(self._states())
        scales = torch.cat([scale for scale, _ in states])
        made = torch.full_like(scales, OUTDATED)
        fields = self.param.__dict__
        if self.is_unknown:
            made[WEIGHT] = math.nan
        elif NEXT in fields:
            made[WEIGHT] = fields[NEXT][0]
        elif LAST in fields and not outdated:
            made[WEIGHT] = fields[LAST][0]
        histories = torch.cat([history for _, history in states], 1)
        return torch.cat([scales[None], made[None], histories])

    def problems(self, name: str, record: Any) -> list[str]:
        """Problems of a `record` that is to be loaded, in words; none if there are none."""
        width = sum(count for _, count in DIRECTIONS)
        if not isinstance(record, torch.Tensor):
            return [f"{name}: a {type(record).__name__}, expected a tensor"]
        if record.dim() != 2 or record.shape[0] <= HEAD or record.shape[1] != width:
            return [f"{name}: shape {tuple(record.shape)}, expected (more than {HEAD}, {width})"]
        return []

    @torch.no_grad()
    def load(self, record: torch.Tensor) -> None:
        """Copies a record into TE's state, and notes how the weight's bytes are to be made. A
        history of another length is cut, or filled up with zeros."""
        first = 0
        for scale, history in self._states():
            columns = record[:, first : first + scale.numel()]
            rows = min(len(history), len(record) - HEAD)
            scale.copy_(columns[0])
            history.zero_()
            history[:rows].copy_(columns[HEAD : HEAD + rows])
            first += scale.numel()
        fields = self.param.__dict__
        fields.pop(NEXT, None)
        made = float(record[1, WEIGHT])  # how the weight's bytes were made
        if math.isnan(made):
            self.forget()
        elif LAST in fields and made != OUTDATED:
            fields[NEXT] = torch.full_like(scale[:1], made)

    def follow(self) -> None:
        """Gives the weight the quantizer that its module has now. When TE changes the length of a
        history, it makes new quantizers, and gives them to the weights that the module shows.
        Outside of a pass that is not this weight."""
        quantizers = self.owner.__dict__.get("quantizers", {}).get("scaling_fwd")
        if LAST in self.param.__dict__ and quantizers:
            number = self.product * DIRECTIONS[0][1] + WEIGHT
            self.param._quantizer = quantizers[number]  # type: ignore[attr-defined]

    @property
    def is_unknown(self) -> bool:
        """True if the weight was loaded, and its scale is still to be made of its values."""
        return isinstance(self.param.__dict__.get(NEXT), int)

    @torch.no_grad()
    def forget(self) -> None:
        """Notes that the weight was loaded without a scale, which will be made of its values. A
        weight that is not quantized is left to TE, which measures it."""
        fields = self.param.__dict__
        if LAST not in fields:
            return
        _, history = next(self._states())
        history[:, WEIGHT].zero_()
        recipe: Any = self.owner.fp8_meta["recipe"]  # type: ignore[index]
        fields[NEXT] = int(recipe.margin)

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
        init_meta = getattr(owner, "param_init_meta", {}).get(name)
        if getattr(init_meta, "fp8_meta_index", None) is None:
            continue
        states = [getattr(owner, "fp8_meta", {}).get(key) for key, _ in DIRECTIONS]
        if all(hasattr(state, "amax_history") for state in states):
            return Scaling(owner, pair.unsharded, _product(init_meta), trained)
    return None


def scalings_of(pairs: Iterable[ParamPair]) -> list[Scaling]:
    """The scalings of those of `pairs` that have one."""
    found = map(scaling_of, pairs)
    return [scaling for scaling in found if scaling is not None]


def _product(init_meta: Any) -> int:
    """The number of a weight's product in its module. TE's index may be of a type without
    arithmetic, so it becomes an int."""
    return int(init_meta.fp8_meta_index) // DIRECTIONS[0][1]


def begin_scaling(module: nn.Module, recipe: Any) -> None:
    """Makes the state of delayed scaling of TE's modules that have none, so that a load can write
    into it. Their first forward would make it, and keeps what is there."""
    child: Any
    for child in module.modules():
        init_metas = getattr(child, "param_init_meta", {}).values()
        products = [_product(each) for each in init_metas if each.fp8_meta_index is not None]
        if products and not getattr(child, "fp8_meta_tensors_initialized", True):
            child.fp8_meta |= {"recipe": recipe, "num_gemms": max(products) + 1}
            child.init_fp8_meta_tensors(recipe)
