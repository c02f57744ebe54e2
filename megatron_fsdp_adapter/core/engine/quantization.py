"""When scales of quantized weights are made from main weights: once after each change of those.

    compute stream   step | begin  maxima over ranks  finish | forward ...
    gather stream                                            casts, gathers of bytes

The bytes are written then too where they are kept; where they are not, a gather casts this rank's
main weights with those scales, as it does for compute weights in another dtype. Scales of every
gather would not be those of the step where they depend on what was seen so far (delayed scaling),
and would cost a reduction a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_fsdp_adapter.core.runtime.comm import Communicator
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, Runtime

from .gather import GatherPipeline
from .group import ParamGroup, by_domain
from .launches import AGREED, LaunchComparison
from .quantized import QuantizedParams, QuantizedWeight, Quantizer


@dataclass(frozen=True)
class _Domain:
    """The quantized groups of one domain that change together. amaxes: one vector for all of their
    quantizers; axes: over which it is reduced."""

    groups: list[ParamGroup]
    quantizers: list[Quantizer]
    amaxes: torch.Tensor
    axes: list[Communicator]


class Quantization:
    """Quantizes weights again, lazily, after their main weights have changed.

    Args:
        trained, frozen: the domains of parameters that the optimizer writes, and of others, which
            only a load does.

    Attributes:
        at_once: whether changed weights are quantized at once and not when they are needed: once
            a CUDA graph computes, none of our code runs then.
        unnotified: whether main weights may be written without a notification: those that are
            trained count as changed at any time.
    """

    def __init__(
        self, trained: list[_Domain], frozen: list[_Domain], runtime: Runtime,
        launches: LaunchComparison,
    ) -> None:
        self._trained, self._frozen = trained, frozen
        self._runtime, self._launches = runtime, launches
        # Bytes that are not kept are given back where a unit has been built, with what had made
        # them: scales are computed again.
        self._changed = any(group.write_planes for domain in trained for group in domain.groups)
        self._loaded = self.at_once = self.unnotified = False

    def changed(self, loaded: bool, needed: bool) -> None:
        """Main weights were written; with `loaded` also those of frozen parameters. needed: raw
        parameters are shown, as they are computed with."""
        self._changed = True
        self._loaded |= loaded
        if needed or self.at_once:
            self.catch_up()

    def is_pending(self, trained: bool) -> bool:
        """Whether something has changed that is not made up for."""
        return self._changed or self.unnotified if trained else self._loaded

    @torch.no_grad()
    def catch_up(self) -> None:
        """Quantizes what has changed. On the compute stream, behind all gathers of the old bytes;
        later gathers have to follow it."""
        domains = list(self._trained) if self.is_pending(trained=True) else []
        domains += self._frozen if self.is_pending(trained=False) else []
        self._changed = self._loaded = False
        if not domains:
            return
        self._runtime.wait(COMPUTE, self._runtime.record(GATHER))
        quantizers = [quantizer for domain in domains for quantizer in domain.quantizers]
        reductions = [
            partial(self._reduce, domain, axis)
            for domain in domains if domain.amaxes.numel() for axis in domain.axes
        ]
        self._runtime.submit(
            COMPUTE,
            *(quantizer.begin for quantizer in quantizers),
            *reductions,
            *(quantizer.finish for quantizer in quantizers),
        )

    def _reduce(self, domain: _Domain, axis: Communicator) -> list[object]:
        self._launches.note(AGREED, domain.groups[:1], axis)
        return axis.all_reduce_max(domain.amaxes)


def make_quantization(
    groups: Sequence[ParamGroup], knows: QuantizedParams | None, gather: GatherPipeline
) -> Quantization | None:
    """Of the groups that are quantized; None if there are none. Maxima are reduced on the
    communicators of gathers, all of whose work the compute stream is behind by then: those of
    reductions may be in use."""
    runtime, config = gather.runtime, gather.config
    quantized = [group for group in groups if group.key.quantized]
    if not quantized or knows is None:
        return None
    frozen = [group for group in quantized if not group.key.requires_grad]
    trained = [group for group in quantized if group.key.requires_grad]

    def made(chosen: list[ParamGroup]) -> list[_Domain]:
        return [
            _Domain(members, *_quantizers(members, knows, runtime.device), axes_of(name, members))
            for name, members in by_domain(chosen).items()
        ]

    def axes_of(name: str, members: list[ParamGroup]) -> list[Communicator]:
        axes = [gather.communicators[name]] if config.strategy.shard_main else []
        return [*axes, gather.outer[name]] if members[0].splits_outer else axes

    return Quantization(made(trained), made(frozen), runtime, gather.launches)


def _quantizers(
    groups: Sequence[ParamGroup], knows: QuantizedParams, device: torch.device
) -> tuple[list[Quantizer], torch.Tensor]:
    """One for each format, with the vector that they share."""
    weights: dict[str, list[QuantizedWeight]] = {}
    own = [(group, group.quantized_weights({})) for group in groups]
    for group, each in own:
        weights.setdefault(group.key.format.name, []).extend(each)
    made = {name: knows.quantizer(each[0].format, each) for name, each in weights.items()}
    quantizers = list(made.values())
    counts = [quantizer.amax_numel for quantizer in quantizers]
    amaxes = torch.zeros(sum(counts), device=device)
    for quantizer, part in zip(quantizers, amaxes.split(counts), strict=True):
        if part.numel():
            quantizer.bind(part)
    for group, each in own:
        if not all(weight.kept for weight in each):
            group.cast_at_gathers(made[group.key.format.name].writer)
    return quantizers, amaxes
