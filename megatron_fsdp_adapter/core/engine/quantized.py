"""The protocol between the engine and the library of quantized weights.

A quantized parameter is a tensor whose nominal shape and dtype are those of the weight, and whose
values are in fields: one tensor for each plane of its `WeightFormat`, in the plane's shape, and
scales that every rank has. The engine points the fields at views of its flat buffers once, keeps
and gathers bytes, and reports when they are read and when they are old. It never looks inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class QuantizedWeights(Protocol):
    """The quantized weights of one engine. `param` is always one of them, and not guarded unless
    stated.

    Attributes:
        at_once: whether changed weights are quantized at once and not when they are needed.
        unnotified: whether main weights may be written without a notification: those that are
            trained count as changed at any time.
    """

    at_once: bool
    unnotified: bool

    # Construction.

    def share(self, param: nn.Parameter, broadcast: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Gives all ranks of a domain the first rank's fields, with `broadcast`; returns what main
        weights begin as, in the weight's shape."""

    def move(self, param: nn.Parameter, views: Mapping[str, torch.Tensor]) -> None:
        """Moves the planes into `views`, one for each by name, which are their fields for life."""

    def guard_class(self, original: type) -> type:
        """The class of a parameter of class `original` while its planes are not there: a subclass
        that refuses to read fields, by `params.resharded_class`."""

    def made(self, groups: Any, gather: Any) -> QuantizedWeights | None:
        """All units are built: the engine's groups, and its `GatherPipeline`. Sets `write_planes`
        of groups whose planes are written at every gather. Returns itself, and None if none of the
        groups is quantized."""

    # Weights come and go.

    def prepare(self, param: nn.Parameter) -> None:
        """The planes are there, and a pass reads them next. Nothing that only backward reads should
        be derived in a forward."""

    def drop_derived(self, param: nn.Parameter) -> None:
        """Forgets what was derived from planes (transposes): they change, or are given back.
        `param` may be guarded: fields can be assigned, not read."""

    # Main weights change.

    def changed(self, loaded: bool, needed: bool) -> None:
        """Main weights were written; with `loaded` also those of frozen parameters. needed: raw
        parameters are shown, as they are computed with."""

    def is_pending(self, trained: bool) -> bool:
        """True if something has changed that is not made up for."""

    def catch_up(self) -> None:
        """Quantizes what has changed. On the compute stream, behind all gathers of the old bytes;
        later gathers have to follow it. Collective."""
