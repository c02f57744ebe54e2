"""The protocol between the engine and the library of quantized weights.

A quantized parameter is a tensor whose nominal shape and dtype are those of the weight, and whose
values are in fields: one tensor for each plane of its `WeightFormat`, in the plane's shape, and
scales that every rank has. The engine points the fields at views of its flat buffers once. It keeps
and gathers their bytes, and reports when those are read and when they are old. It never looks
inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class QuantizedWeights(Protocol):
    """The quantized weights of one engine. `param` is always one of them. It is not guarded
    (`guard_class`) unless that is stated."""

    # Construction.

    def share(self, param: nn.Parameter, broadcast: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Gives all ranks of a domain the first rank's fields, by `broadcast`. Returns the first
        main weight, in the weight's shape."""

    def move(self, param: nn.Parameter, views: Mapping[str, torch.Tensor]) -> None:
        """Moves the planes into `views`, by name of plane. These are the fields for life."""

    def guard_class(self, original: type) -> type:
        """The class of a parameter of class `original` while its planes are not there: a subclass
        that refuses to read fields, by `params.resharded_class`."""

    def made(self, groups: Any, gather: Any) -> QuantizedWeights | None:
        """This library, or None if no group is quantized. Called when all units are built.

        Calls `cast_planes_by` of groups whose planes are written at every gather. groups: all of
        the engine's; gather: its `GatherPipeline`."""

    # Weights come and go.

    def prepare(self, param: nn.Parameter) -> None:
        """Prepares the planes, which are there, for a pass that reads them next. In a forward,
        nothing should be derived that only backward reads."""

    def keep_padded(self, param: nn.Parameter, kept: bool) -> None:
        """Keeps the addresses of what `prepare` copies, from the next time on, or no longer: CUDA
        graphs read it. `param` may be guarded."""

    def drop_derived(self, param: nn.Parameter) -> None:
        """Forgets what was derived from planes (transposes): these change, or are given back.
        `param` may be guarded: its fields can be assigned and not read."""

    # Main weights change.

    def expect_writes(self) -> None:
        """Expects that main weights are written without a notification: from now on those that are
        trained count as changed at any time."""

    def quantize_at_once(self) -> None:
        """From now on quantizes changed weights at once, and not when they are needed."""

    def changed(self, loaded: bool, needed: bool) -> None:
        """Notes that main weights were written. loaded: also those of frozen parameters. needed:
        modules show unsharded parameters, so that quantized weights may be read at once."""

    def is_pending(self, trained: bool) -> bool:
        """True if main weights have changed, or may have, and `catch_up` has not run since.
        trained: asks about weights that are trained, and otherwise about frozen ones."""

    def catch_up(self) -> None:
        """Quantizes what has changed. Collective. Runs on the compute stream, behind all gathers of
        the old bytes. Later gathers have to follow it."""
