"""Weights in Transformer Engine's classes, and what its functions make of their main weights."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter.core.layout import ParamSpec, plan_group
from megatron_fsdp_adapter.quantized import TransformerEngineParams
from tests.distributed.gather_full import plain_name

KNOWS = TransformerEngineParams()
RECIPES = ("current", "delayed", "blockwise", "mxfp8")
ROWS = {"current": 1, "delayed": 1, "blockwise": 16, "mxfp8": 32}
"""Rows that no shard boundary cuts."""
STEPS = {"current": (1, 16), "delayed": (1, 16), "blockwise": (16, 16), "mxfp8": (32, 32)}
"""Rows and columns of the random shapes below are multiples of these."""
POISON = 0xAA


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
    if recipe == "blockwise":
        return Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True)
    return MXFP8Quantizer(e4m3)


def te_params(recipe: str, shapes: Sequence[tuple[int, int]], slots: torch.Tensor) -> list[Any]:
    """One parameter object for each shape, its bytes poisoned. slots: (weights, 2)."""
    found = []
    for shape, slot in zip(shapes, slots, strict=True):
        made = quantizer(recipe, slot).make_empty(shape, dtype=torch.bfloat16, device=slots.device)
        data_of(made).fill_(POISON)
        found.append(made)
    return found


def data_of(param: Any) -> torch.Tensor:
    data = getattr(param, "_data", None)
    return param._rowwise_data if data is None else data


def scales_of(param: Any) -> torch.Tensor:
    found = getattr(param, "_scale_inv", None)
    return param._rowwise_scale_inv if found is None else found


def te_quantize(
    params: Sequence[Any],
    mains: Sequence[torch.Tensor],
    starts: Sequence[int] | None = None,
    group: Any = None,
    shards: Sequence[Any] | None = None,
) -> None:
    """TE's function over all weights, by default whole ones of this rank alone; an empty main
    weight is given as it wants it, as None.
    """
    from transformer_engine.pytorch.tensor import utils

    function = getattr(utils, "quantize_master_weights", None) or utils.cast_master_weights_to_fp8
    given = [main.reshape(-1) if main.numel() else None for main in mains]
    starts = [0] * len(given) if starts is None else list(starts)
    group = alone() if group is None else group
    function(
        list(params), given, starts, group, None if shards is None else list(shards),
        manual_post_all_gather_processing=True,
    )  # fmt: skip


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
    found: Any = nn.Parameter(wants.make_empty(value.shape, dtype=value.dtype, device="cpu"))
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
    return weight._transpose if hasattr(weight, "_transpose") else weight._columnwise_data


def check_padded(weight: Any) -> None:
    """Scales of MXFP8 have the shapes that TE's matrix products want."""
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


def te_needs_rows(recipe: str) -> bool:
    """Whether TE's function fails on a rank that has no rows of any weight, as it did for MXFP8 up
    to 2.18: it takes the dtype of its amaxes from the main weights alone then."""
    from transformer_engine.pytorch.tensor import utils

    function = utils._cast_master_weights_to_fp8_mxfp8_scaling
    return recipe == "mxfp8" and "params[0][0].dtype" not in inspect.getsource(function)


@dataclass(frozen=True)
class Case:
    """Random weights and how they are cut."""

    recipe: str
    mains: list[torch.Tensor]
    shards: int
    ranges: list[list[tuple[int, int]]]
    """Of each shard, of each weight: start and stop of the elements it holds."""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return [(main.shape[0], main.shape[1]) for main in self.mains]


def cut(
    recipe: str, shapes: Sequence[tuple[int, int]], shards: int, whole: Sequence[int] = ()
) -> list[list[tuple[int, int]]]:
    """Start and stop, of each shard and weight, by the planner; weights in `whole` are not cut."""
    specs = []
    for index, shape in enumerate(shapes):
        uncut = index in whole or shape[0] % ROWS[recipe]
        rows = shape[0] if uncut else ROWS[recipe]
        specs.append(ParamSpec(index, (f"w{index}",), shape, torch.bfloat16, True, rows * shape[1]))
    layout = plan_group(specs, shards, align=512)
    held = [[layout.shard_range(i, r) for i in range(len(shapes))] for r in range(shards)]
    return [[(one.start, one.stop) for one in of_shard] for of_shard in held]


def random_case(
    recipe: str, seed: int, dtype: torch.dtype, nasty: str = "", device: str = "cuda"
) -> Case:
    """One to four weights over one to five shards. nasty: what is strewn into the values."""
    rnd, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    down, across = STEPS[recipe]
    shapes = [
        (down * rnd.randint(1, 480 // down), across * rnd.randint(1, 480 // across))
        for _ in range(rnd.randint(1, 4))
    ]
    shards = rnd.randint(1, 5)
    whole = [index for index in range(len(shapes)) if rnd.random() < 0.25]
    mains = []
    for shape in shapes:
        main = torch.randn(shape, device=device, generator=generator) * 10 ** rnd.uniform(-4, 1)
        main[: shape[0] // 3] *= 1e-3
        main.view(-1)[:: rnd.randint(50, 200)] *= 30
        strew(main, nasty, rnd)
        mains.append(main.to(dtype))
    return Case(recipe, mains, shards, cut(recipe, shapes, shards, whole))


NASTY = {
    "": (),
    "zeros and denormals": (0.0, -0.0, 1e-40, -3e-39, 6e-8),
    "infinite": (3e38, -3.4e38, float("inf"), float("-inf")),
    "NaN": (float("nan"), -float("nan")),
}


def strew(main: torch.Tensor, nasty: str, rnd: random.Random) -> None:
    for value in NASTY[nasty]:
        for _ in range(3):
            main.view(-1)[rnd.randrange(main.numel())] = value
    if nasty:
        main[rnd.randrange(len(main))] = NASTY[nasty][0]
    if nasty == "zeros and denormals" and rnd.random() < 0.3:
        main.zero_()
