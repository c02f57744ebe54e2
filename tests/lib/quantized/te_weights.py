"""Weights in Transformer Engine's classes, and what its functions make of their main weights."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter.core.layout import (
    BLOCK128,
    MXFP8,
    PER_TENSOR,
    ParamSpec,
    WeightFormat,
    plan_group,
)
from megatron_fsdp_adapter.core.layout.ranges import FlatRange
from megatron_fsdp_adapter.quantized import TransformerEngineParams
from tests.lib.gpt.gather_full import plain_name

KNOWS = TransformerEngineParams()
RECIPES: Mapping[str, WeightFormat] = {
    "current": PER_TENSOR,
    "delayed": PER_TENSOR,
    "block128": BLOCK128,
    "mxfp8": MXFP8,
}
"""How scales come about: "current" and "delayed" scaling have one format."""
STEPS = {"current": (1, 16), "delayed": (1, 16), "block128": (8, 16), "mxfp8": (32, 32)}
"""Rows and columns of the random shapes below are multiples of these."""


def quantizer(recipe: str, slots: torch.Tensor) -> Any:
    """As a module makes it for a weight. slots: (2,) scale and amax, for delayed scaling."""
    import transformer_engine.pytorch  # noqa: F401  finds the extension for the next one
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor import float8_tensor
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    e4m3 = tex.DType.kFloat8E4M3
    if recipe == "delayed":
        return float8_tensor.Float8Quantizer(slots[:1], slots[1:], e4m3)
    if recipe == "current":
        return float8_tensor.Float8CurrentScalingQuantizer(e4m3, slots.device)
    if recipe == "block128":
        return Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True)
    return MXFP8Quantizer(e4m3)


def te_quantize(params: Sequence[Any], mains: Sequence[torch.Tensor]) -> None:
    """TE's function over whole weights, on this rank alone."""
    from transformer_engine.pytorch.tensor import utils

    function = getattr(utils, "quantize_master_weights", None) or utils.cast_master_weights_to_fp8
    given = [main.reshape(-1) for main in mains]
    function(
        list(params),
        given,
        [0] * len(given),
        alone(),
        None,
        manual_post_all_gather_processing=True,
    )


def alone() -> Any:
    """A group of this rank alone; collective in the first call."""
    return _alone(dist.group.WORLD)


@functools.cache
def _alone(world: Any) -> Any:
    return [dist.new_group([number]) for number in range(world.size())][world.rank()]


def te_whole(recipe: str, main: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What TE's function makes of a whole main weight."""
    slots = torch.tensor([100.0, 0.0])
    found = quantizer(recipe, slots).make_empty(main.shape, dtype=dtype, device="cpu")
    te_quantize([found], [main])
    return found


def te_parameter(param: torch.Tensor, wants: Any) -> Any:
    """A parameter quantized by `wants` in the place of `param`, as TE makes it."""
    value = param.detach().clone()
    found: Any = nn.Parameter(wants.make_empty(value.shape, dtype=value.dtype, device=value.device))
    te_quantize([found], [value])
    found.__dict__.update(param.__dict__)
    found._high_precision_init_val = value
    return found


def gathered(engine: Any) -> Iterator[tuple[str, Any]]:
    """Name and parameter of every quantized weight, while its unit is gathered."""
    engine.to_unsharded()
    for unit in engine.units:
        engine.gather.unshard(unit)
        for group in unit.groups:
            for entry in group.managed if group.key.quantized else ():
                yield plain_name(entry.fqns[0]), entry.param
        engine.gather.reshard(unit)


def derived(weight: Any) -> Any:
    """What is derived of rows, or None."""
    if type(weight).__name__ == "MXFP8Tensor":
        return None
    if hasattr(weight, "_transpose"):
        return weight._transpose
    return weight._columnwise_data


def check_padded(weight: Any) -> None:
    """Scales of MXFP8 have the shapes that TE's GEMMs want."""
    if type(weight).__name__ == "MXFP8Tensor":
        m, k = weight.shape
        rows = -(-m // 128) * 128, -(-k // 32 // 4) * 4
        columns = -(-m // 32 // 4) * 4, -(-k // 128) * 128
        found = weight._rowwise_scale_inv.shape, weight._columnwise_scale_inv.shape
        assert tuple(map(tuple, found)) == (rows, columns), found


def planes_of(param: Any) -> dict[str, torch.Tensor]:
    """Planes and scales, copied, by name."""
    scales = {f"scale {index}": scale for index, scale in enumerate(KNOWS.scales(param))}
    return {name: value.clone() for name, value in {**KNOWS.fields(param), **scales}.items()}


@dataclass(frozen=True)
class Case:
    """Weights that `shards` ranks share."""

    recipe: str
    mains: list[torch.Tensor]
    shards: int

    @property
    def ranges(self) -> list[list[FlatRange]]:
        """Of each shard, of each weight: the elements it holds."""
        format = RECIPES[self.recipe]
        specs = []
        for index, main in enumerate(self.mains):
            shape = (main.shape[0], main.shape[1])
            name = (f"w{index}",)
            granule = format.granularity(shape)
            specs.append(ParamSpec(index, name, shape, torch.bfloat16, True, granule, format))
        layout = plan_group(specs, self.shards)
        return [
            [layout.shard_range(index, rank) for index in range(len(specs))]
            for rank in range(self.shards)
        ]


def random_case(
    recipe: str,
    seed: int,
    dtype: torch.dtype,
    nasty: str = "",
    device: str = "cuda",
    most: int = 480,
) -> Case:
    """One to four weights, of at most so many rows and columns, over one to five shards. nasty:
    what is strewn into the values."""
    rnd = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    down, across = STEPS[recipe]
    shapes = [
        (down * rnd.randint(1, most // down), across * rnd.randint(1, most // across))
        for _ in range(rnd.randint(1, 4))
    ]
    mains = []
    for shape in shapes:
        main = torch.randn(shape, device=device, generator=generator) * 10 ** rnd.uniform(-4, 1)
        main[: shape[0] // 3] *= 1e-3
        main.view(-1)[:: rnd.randint(50, 200)] *= 30
        strew(main, nasty, rnd)
        mains.append(main.to(dtype))
    return Case(recipe, mains, rnd.randint(1, 5))


NASTY = {
    "": (),
    "zeros and denormals": (0.0, -0.0, 1e-40, -3e-39, 6e-8),
    "infinite": (3e38, -3.4e38, float("inf"), float("-inf")),
    "NaN": (float("nan"), -float("nan")),
}


TINY = "tiny"
"""All of a weight: of its largest value a float32 has no inverse."""


def strew(main: torch.Tensor, nasty: str, rnd: random.Random) -> None:
    values = NASTY.get(nasty, ())
    for value in values * 3:
        main.view(-1)[rnd.randrange(main.numel())] = value
    if values:
        main[rnd.randrange(len(main))] = values[0]
    if nasty == TINY:
        main.mul_(1e-40)
    if nasty == "zeros and denormals" and rnd.random() < 0.3:
        main.zero_()
