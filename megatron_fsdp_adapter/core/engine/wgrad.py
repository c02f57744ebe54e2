"""Weight gradients that a module's backward writes straight into the reduce bucket.

Autograd would make each weight gradient in the compute dtype, to be copied into the bucket. A
module with a fused weight gradient (Transformer Engine, Megatron's own linear layers) lets its
GEMM write or add in the bucket's dtype instead: no temporary, no copy, no rounding.
`param.main_grad` is a view of the bucket for life; the bucket has storage from the unit's first
gradient on. Three protocols are spoken:

    OVERWRITES         asks `param.get_main_grad()` in each backward, then overwrites where
                       `param.overwrite_main_grad` is set and adds where it is not: the first write
                       of a bucket needs no zeroes.
    OVERWRITES_EARLY   reads `param.overwrite_main_grad`, and takes `param.get_main_grad`, in
                       forward, when it is not known yet which write will be the first. In a fresh
                       bucket each write overwrites. In a bucket that is kept over microbatches
                       those of the first forward overwrite. Others add, to zeroes if they come
                       first. What an overwriting module finds in the bucket is put aside, and added
                       at the end.
    ACCUMULATES        adds to `param.main_grad`, which must hold zeroes first.

OVERWRITES_UNHOOKED is OVERWRITES of a module that looks for the flag on the weight that it has
saved for backward. Where there are hooks on saved tensors (`hooks.py`), torch returns another
tensor, without attributes, and the module adds: OVERWRITES_UNHOOKED is ACCUMULATES then.

A CUDA graph does the same in every replay. One that is replayed for several microbatches adds to
kept gradients: the bucket is zeroed once a step, and all modules add to it (`write_by_graphs`).

No protocol returns a gradient to autograd. `grad_added_to_main_grad` is left unset: it would make
modules return a placeholder the size of the weight, and nothing here waits for autograd.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn


class WgradProtocol(enum.Enum):
    """The way in which a parameter's gradient gets into the bucket: the engine copies `.grad`, or
    the module writes it, in one of these ways."""

    AUTOGRAD = "autograd"
    OVERWRITES = "overwrites"
    OVERWRITES_UNHOOKED = "overwrites_unhooked"
    OVERWRITES_EARLY = "overwrites_early"
    ACCUMULATES = "accumulates"


class FusedWgrad:
    """The directly written gradients of one flat buffer.

    Args:
        params: unsharded parameters.
        writers: how each one's gradient is written.
        views: each one's part of the bucket, in full size.
        label: names the buffer in errors.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        writers: Sequence[WgradProtocol],
        views: Sequence[torch.Tensor],
        label: str,
    ) -> None:
        self.label = label  # names the buffer in errors
        self._params: list[Any] = list(params)  # unsharded ones
        self._views = list(views)  # their parts of the bucket
        # Whether modules write any gradient by themselves.
        self._by_modules = any(writer is not WgradProtocol.AUTOGRAD for writer in writers)
        # Whether modules or CUDA graphs do.
        self.any = self._by_modules
        # Whether the unit's backward runs, so that modules may write.
        self.is_open = False
        # Whether hooks were on what autograd saved in some forward; for good, as a backward may be
        # that of several forwards.
        self.hooked = False
        # Whether modules that decide in forward overwrite now. False so that `expect(True)` below
        # is a change.
        self._overwrites = False
        # Whether all that is written is added, to zeroes if nothing is there yet.
        self._always_adds = False
        # The parameters whose part of the bucket holds a gradient, or zeroes to add to.
        self.written: set[int] = set()
        # Views that were overwritten, and what was in them.
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        of: dict[WgradProtocol, list[int]] = {protocol: [] for protocol in WgradProtocol}
        for index, writer in enumerate(writers):
            of[writer].append(index)
        # Indices of the parameters whose modules add to what is there.
        self._adding = of[WgradProtocol.ACCUMULATES]
        # Of those whose modules add if there are hooks on saved tensors.
        self._adding_hooked = [*self._adding, *of[WgradProtocol.OVERWRITES_UNHOOKED]]
        # Of those whose modules decide in forward.
        self._early = of[WgradProtocol.OVERWRITES_EARLY]
        ref = weakref.ref(self)
        # `get_main_grad` of `_early` where they add. Made once: thousands of them a step would make
        # Python collect garbage more often.
        self._to_add = {i: functools.partial(_write, ref, i, False) for i in self._early}
        # The same where they overwrite.
        self._to_overwrite = {i: functools.partial(_write, ref, i, True) for i in self._early}
        for index, (param, writer) in enumerate(zip(self._params, writers, strict=True)):
            if writer is not WgradProtocol.AUTOGRAD:
                param.main_grad = self._views[index]
                if writer is not WgradProtocol.ACCUMULATES:
                    param.__fsdp_param__ = True
                    param.get_main_grad = functools.partial(_write, ref, index)
        self.expect(True)

    def write_by_graphs(self, written: bool, adds: bool) -> None:
        """Sets whether CUDA graphs write gradients, and whether they and modules add all of them.
        Must be called while the bucket holds none."""
        self.any = written or self._by_modules
        self._always_adds = adds
        self.expect(True)

    def expect(self, overwrites: bool) -> None:
        """From now on, modules that decide in forward overwrite what is there, or add to it."""
        overwrites = overwrites and not self._always_adds
        if overwrites is self._overwrites:
            return
        self._overwrites = overwrites
        decided = self._to_overwrite if overwrites else self._to_add
        for index in self._early:
            self._params[index].overwrite_main_grad = overwrites
            self._params[index].get_main_grad = decided[index]

    def open(self, empty: bool) -> None:
        """Lets modules write: the unit's backward begins. The bucket must have storage. empty: it
        holds no gradients yet. Otherwise all that is written is added to what it holds."""
        if self.is_open:
            return
        self.is_open = True
        every = range(len(self._params))
        adding = self._adding_hooked if self.hooked else self._adding
        if self._always_adds:
            adding = list(every)
        self.written = set(adding) if empty else set(every)
        if empty and adding:
            torch._foreach_zero_([self._views[index] for index in adding])

    def close(self) -> set[int]:
        """Ends the writing: backward is over. Returns the indices of parameters whose part of the
        bucket holds a gradient, or zeroes."""
        written = self.written
        self.written = set()
        self.is_open = False
        self.settle()
        return written

    def note_written(self, indices: Iterable[int]) -> None:
        """Notes that a CUDA graph has written the gradients of the parameters at `indices`."""
        self.written.update(indices)

    def settle(self) -> None:
        """Adds what was put aside to what was written in its place."""
        for view, earlier in self._aside:
            view.add_(earlier)
        self._aside = []

    def write(self, index: int, overwrites: bool | None = None) -> torch.Tensor:
        """The part of the bucket for the gradient of parameter `index`, which a module is about to
        write. Prepares it for that.

        overwrites: whether the module will overwrite what is there. None: it decides that next, by
            `overwrite_main_grad`.
        """
        if not self.is_open:
            raise RuntimeError(
                f"{self.label}: a module asked for main_grad outside of its unit's backward. Call "
                "the model through its wrapper, and run backward on what it returned"
            )
        view = self._views[index]
        is_first = index not in self.written
        if overwrites is None:
            self._params[index].overwrite_main_grad = is_first
        elif overwrites and not is_first:
            self._aside.append((view, view.clone()))
        elif is_first and not overwrites:
            view.zero_()
        self.written.add(index)
        return view


def _write(
    grads: Callable[[], FusedWgrad | None], index: int, overwrites: bool | None = None
) -> torch.Tensor:
    """`get_main_grad` of one parameter. grads: a weak reference, or there would be a cycle."""
    alive = grads()
    if alive is None:
        raise RuntimeError("main_grad of a parameter whose wrapper has been deleted")
    return alive.write(index, overwrites)
