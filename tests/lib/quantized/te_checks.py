"""Comparisons, bit for bit, of what this package makes of main weights with what Transformer Engine
makes of them, or the emulated library: on GPUs, and on the host.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from megatron_fsdp_adapter.core.layout.ranges import FlatRange
from megatron_fsdp_adapter.quantized import e4m3
from megatron_fsdp_adapter.quantized.weights import QuantizedWeight
from tests.lib.quantized.emulated import TE_RECIPES, quantize_whole, quantized_parameter, roll
from tests.lib.quantized.te_weights import KNOWS, RECIPES, Case, planes_of, random_case

POISON = 0xAA


def found_in(param: Any) -> dict[str, torch.Tensor]:
    """Scales, and the amax that delayed scaling has noted, by name."""
    found = {f"scale {index}": scale for index, scale in enumerate(KNOWS.scales(param))}
    is_delayed = type(param._quantizer).__name__ == "Float8Quantizer"
    return found | ({"amax": param._quantizer.amax} if is_delayed else {})


class Shards:
    """What the ranks of a domain have of weights: parameter objects, rows, in poisoned memory with
    room around, and quantizers. The weights have the recipes in turn. `whole`: parameters that are
    not sharded, of the emulated library on the host."""

    def __init__(self, case: Case, recipes: list[str], room: int) -> None:
        self.case = case
        self.room = room
        self.recipes = [recipes[index % len(recipes)] for index in range(len(case.mains))]
        self.memory: list[torch.Tensor] = []
        self.whole = [
            self._param(main.cpu() if recipe in RECIPES else main, recipe)
            for main, recipe in zip(case.mains, self.recipes, strict=True)
        ]
        self.weights = [
            [self._weight(index, extent) for index, extent in enumerate(ranges)]
            for ranges in case.ranges
        ]
        self.quantizers = [[one for one, _ in KNOWS.quantizers(own)] for own in self.weights]

    @staticmethod
    def _param(main: torch.Tensor, recipe: str) -> Any:
        made = quantized_parameter(main.bfloat16(), recipe)
        roll(made)
        return made

    def _weight(self, index: int, extent: FlatRange) -> QuantizedWeight:
        main = self.case.mains[index]
        format = RECIPES[self.case.recipe]
        own = main.view(-1)[extent.start : extent.stop].view(-1, main.shape[1])
        planes = {}
        for plane in format.planes:
            numel = plane.numel(own.numel())
            memory = torch.full((numel + 2 * self.room,), POISON, dtype=torch.uint8).to(main.device)
            self.memory.append(memory)
            within = memory[self.room : self.room + numel]
            planes[plane.name] = within.view(plane.shape((len(own), main.shape[1])))
        param = self._param(main, self.recipes[index])
        return QuantizedWeight(param, f"w{index}", format, extent.start, own, True, planes)

    def quantize(self) -> None:
        """All ranks at once, with the MAX over their amaxes between the two passes."""
        for kind in zip(*self.quantizers, strict=True):
            device = self.case.mains[0].device
            amaxes = torch.full((len(kind), kind[0].amax_numel), torch.nan, device=device)
            for quantizer, vector in zip(kind, amaxes, strict=True):
                if vector.numel():
                    quantizer.bind(vector)
                quantizer.begin()
            amaxes.copy_(amaxes.amax(0).expand_as(amaxes).clone())
            for quantizer in kind:
                quantizer.finish()

    def check(self, label: str) -> None:
        """Planes of all rows, scales and amaxes on every rank, against whole weights."""
        for param, main in zip(self.whole, self.case.mains, strict=True):
            quantize_whole(param, main.to(param.device))
        for memory in self.memory:
            around = torch.cat([memory[: self.room], memory[len(memory) - self.room :]])
            assert bool((around == POISON).all()), f"{label}: bytes outside a shard were written"
        for rank, (weights, ranges) in enumerate(zip(self.weights, self.case.ranges, strict=True)):
            for weight, whole, extent in zip(weights, self.whole, ranges, strict=True):
                found = found_in(weight.param)
                expected = found_in(whole)
                fields = KNOWS.fields(whole)
                for plane in weight.format.planes:
                    found[plane.name], held = weight.planes[plane.name], plane.range(extent)
                    expected[plane.name] = fields[plane.name].reshape(-1)[held.start : held.stop]
                same_planes(found, expected, f"{label}, rank {rank}, {weight.name}")

    def roll(self) -> None:
        """What happens to delayed scaling between two steps."""
        for params in (self.whole, *([one.param for one in own] for own in self.weights)):
            for param in params:
                roll(param)


def same(mine: torch.Tensor, other: torch.Tensor, label: str) -> None:
    assert mine.numel() == other.numel(), f"{label}: {mine.shape} and {other.shape}"
    a = _bytes_of(mine)
    b = _bytes_of(other)
    differ = (a != b).nonzero().view(-1)
    if len(differ):
        first = differ[:4]
        raise AssertionError(
            f"{label}: {len(differ)} of {a.numel()} bytes differ, at {first.tolist()}: "
            f"{a[first].tolist()} and {b[first].tolist()}"
        )


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    # A single element is contiguous whatever its stride, and not a view of bytes for all that.
    flat = torch.cat([value.reshape(-1), value.new_empty(0)])
    return flat.view(torch.uint8).cpu()


def same_planes(mine: Any, other: Any, label: str) -> None:
    """Of two quantized weights, or of copies by name."""
    one, two = (it if isinstance(it, dict) else planes_of(it) for it in (mine, other))
    assert one.keys() == two.keys(), (label, one.keys() ^ two.keys())
    for name, value in two.items():
        same(one[name], value, f"{label}, {name}")


def place(rank: int) -> str:
    """The device of a rank. Two can share one."""
    if not torch.cuda.is_available():
        return "cpu"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return "cuda"


def shards_are_the_whole(
    rank: int, world: int, recipe: str, nasty: str, count: int, most: int = 480
) -> str:
    """Step after step; on a GPU with kernels, and with torch. recipe: several, with commas, for
    weights that have them in turn."""
    device = place(rank)
    recipes = recipe.split(", ")
    if device == "cuda":
        ways = [e4m3.kernels_for, lambda device: None]
    else:
        ways = [e4m3.kernels_for]
    empty = 0
    for seed in range(count):
        dtype = torch.bfloat16 if seed % 4 == 3 else torch.float32
        kind = TE_RECIPES.get(recipes[0], recipes[0])
        case = random_case(kind, 1000 * rank + seed, dtype, nasty, device, most)
        for way in ways:
            with mock.patch.object(e4m3, "kernels_for", way):
                shards = Shards(case, recipes, 64 if seed % 3 else 5)
                for step in range(2):
                    shards.quantize()
                    shards.check(f"{recipe}, {nasty}, seed {seed}, step {step}")
                    shards.roll()
                    for main in case.mains:
                        main.mul_(1.5)  # saturates, if the scale is that of the step before
        empty += sum(extent.empty for own in case.ranges for extent in own)
    assert empty or count < 10, "every rank has rows of every weight"
    return f"{count} cases"


def nothing_waits(rank: int, world: int, recipe: str) -> str:
    """No pass synchronizes, once tables are there."""
    case = random_case(recipe, 3, torch.float32, device=place(rank))
    shards = Shards(case, [recipe], 64)
    shards.quantize()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        shards.quantize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"{len(case.mains)} weights over {case.shards} ranks"
