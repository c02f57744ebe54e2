"""NVFP4 and MXFP8 on one device: what this package's kernels write, and what those of Transformer
Engine write as far as they run, bit for bit against float64. On GPUs, and on the host with torch in
the place of kernels and a stand-in for TE's extension.

TE's cast to E2M1 is an instruction of Blackwell GPUs (on others the kernel stops the device), as
are all of TE's matrix products of both formats, and its quantisation of whole tensors.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron_fsdp_adapter.core.layout.format import Use
from megatron_fsdp_adapter.quantised.e2m1 import TileCast
from megatron_fsdp_adapter.quantised.e4m3 import MxCast
from tests.quantised import float64
from tests.quantised.te_checks import ROUNDED, Shard, own_group, place, quantise, same, te_whole
from tests.quantised.te_modules import FORMATS, KNOWS, weights_of
from tests.quantised.te_weights import Case, cut, random_case, te_casts, te_params, te_quantise

WIDTHS = {"nvfp4": 16, "mxfp8": 32}
FIELDS = {
    "nvfp4": {"rowwise": "bytes", "rowwise_scales": "scales"},
    "mxfp8": {
        "rowwise": "bytes", "rowwise_scales": "row_scales", "columnwise": "columns",
        "columnwise_scales": "column_scales",
    },
}  # fmt: skip
ABSENT = "this release of TE does not have it"


def check(case: Case) -> int:
    """The planes of all shards, put together, are those of whole weights; how many bytes."""
    shards, count = [Shard(case, number, 64) for number in range(case.shards)], 0
    bits = quantise(case.recipe, shards)
    for shard in shards:
        shard.check_untouched()
    for index, main in enumerate(case.mains):
        expected = getattr(float64, case.recipe)(main.to(ROUNDED))
        rows, label = [shard.rows[index] for shard in shards], f"weight {index}, {main.shape}"
        if case.recipe == "nvfp4":
            same(bits["amaxes"][index].cpu(), expected.pop("amax"), f"amax of {label}")
        for name, plane in expected.items():
            parts = [getattr(own, FIELDS[case.recipe][name]) for own in rows if own.numel]
            same(torch.cat(parts).cpu(), plane, f"{name} of {label}")
            count += plane.numel()
    return count


def kernels_are_the_definition(rank: int, world: int, recipe: str, nasty: str, count: int) -> str:
    device, found = place(rank), 0
    for seed in range(count):
        dtype = torch.bfloat16 if seed % 4 == 3 else torch.float32
        seed += 1000 * rank
        found += check(random_case(recipe, seed, dtype, nasty, device, WIDTHS[recipe]))
    return f"{count} cases, {found} bytes"


def wide_weights_are_the_definition(rank: int, world: int, recipe: str) -> str:
    """Of the shapes of a layer, in half their size, over eight shards."""
    device = place(rank)
    size = 2 if device == "cuda" else 16
    shapes = [(4096 // size, 14336 // size), (6144 // size, 4096 // size), (96, 14336 // size)]
    mains = [torch.randn(shape, device=device) * 0.02 for shape in shapes]
    return f"{check(Case(recipe, mains, 8, cut(recipe, shapes, 8)))} bytes"


def quantisers_are_the_definition(rank: int, world: int, recipe: str) -> str:
    """Of parameter objects in TE's class, step after step, over three ranks of which the last has
    no rows, in shapes whose scales are padded."""
    device, shapes, steps = place(rank), [(96, 64), (128, 256), (32, 192)], 3
    mains = [torch.randn(shape, device=device) * 0.1 for shape in shapes]
    ranges = [*cut(recipe, shapes, 2), [(0, 0)] * len(shapes)]
    slots = torch.zeros(len(shapes), 2, device=device)
    weights = [weights_of(recipe, te_params(recipe, shapes, slots), mains, own) for own in ranges]
    made = [KNOWS.quantiser(FORMATS[recipe], each) for each in weights]
    amaxes = torch.full((len(made), made[0].amax_numel), 9.0, device=device)
    for one, vector in zip(made, amaxes, strict=True):
        if one.amax_numel:
            one.bind(vector)
    for step in range(steps):
        for main in mains:
            main.add_(torch.randn_like(main) * 0.02)
        for one in made:
            one.begin()
        if amaxes.numel():
            amaxes.copy_(amaxes.amax(0).expand_as(amaxes).clone())
        for one in made:
            one.finish()
        for index, main in enumerate(mains):
            expected, label = getattr(float64, recipe)(main.to(ROUNDED)), f"{step}, {shapes[index]}"
            scale = expected.pop("amax", None)
            for each in weights if scale is not None else ():
                same(KNOWS.scales(each[index].param)[0].cpu(), scale, f"amax of step {label}")
            for name, plane in expected.items():
                found = torch.cat([each[index].planes[name].flatten() for each in weights])
                same(found.cpu(), plane, f"{name} of step {label}")
    return f"{steps} steps of {len(made)} ranks"


def passes_find_what_they_read(rank: int, world: int, recipe: str) -> str:
    """Padded scales in TE's fields, and the columns of NVFP4, by TE's kernels where it has some."""
    device, shape = place(rank), (48, 80) if recipe == "nvfp4" else (96, 160)
    value = torch.randn(shape, device=device).to(ROUNDED)
    expected = getattr(float64, recipe)(value)
    param: Any = te_params(recipe, [shape], torch.zeros(1, 2, device=device))[0]
    if recipe == "nvfp4":
        param._amax_rowwise.copy_(expected.pop("amax"))
    padded = tuple(param._rowwise_scale_inv.shape)
    KNOWS.point(param, {name: plane.to(device) for name, plane in expected.items()})
    KNOWS.prepare(param, Use.FORWARD)
    scales = param._rowwise_scale_inv
    assert tuple(scales.shape) == padded, (tuple(scales.shape), padded)
    rows = expected["rowwise_scales"]
    same(scales[: rows.shape[0], : rows.shape[1]].cpu(), rows, "scales of rows")
    KNOWS.prepare(param, Use.BACKWARD)
    param.update_usage(columnwise_usage=True)
    turned = float64.nvfp4(value.t()) if recipe == "nvfp4" else {}
    data = turned.get("rowwise", expected.get("columnwise"))
    columns = turned.get("rowwise_scales", expected.get("columnwise_scales"))
    assert data is not None and columns is not None
    same(param._columnwise_data.cpu(), data, "columns")
    found = param._columnwise_scale_inv
    same(found[: columns.shape[0], : columns.shape[1]].cpu(), columns, "scales of columns")
    if recipe == "nvfp4":
        same(param._amax_columnwise.cpu(), turned["amax"], "amax of columns")
    own = "TE's kernels" if hasattr(type(param), "_create_columnwise") else "operations of ours"
    return f"columns by {own}" if recipe == "nvfp4" else "columns as gathered"


def te_is_the_definition(rank: int, world: int, recipe: str, nasty: str, count: int) -> str:
    """What TE's function over main weights makes of whole ones."""
    te_params(recipe, [(32, 64)], torch.zeros(1, 2, device=place(rank)))  # finds the extension
    if not te_casts(recipe):
        return ABSENT
    if place(rank) == "cuda" and recipe == "nvfp4":
        major = torch.cuda.get_device_capability()[0]
        if major < 10:
            return f"not run: the cast needs compute capability 10, this device has {major}"
    for seed in range(count):
        case = random_case(recipe, seed, torch.float32, nasty, place(rank))
        params, _ = te_whole(case, own_group(rank, world))
        for index, (param, main) in enumerate(zip(params, case.mains, strict=True)):
            expected = getattr(float64, recipe)(main.to(ROUNDED))
            for name, field in KNOWS.fields(param).items():  # type: ignore[arg-type]
                same(field.cpu(), expected[name], f"{name} of weight {index}, seed {seed}")
    return f"{count} cases"


def te_scales_are_the_definition(rank: int, world: int, nasty: str, count: int) -> str:
    """NVFP4's kernels that run everywhere: amaxes of tiles of shards and of weights, the scale of a
    weight, scales of tiles; as its function over main weights calls them."""
    device = place(rank)
    import transformer_engine.pytorch  # noqa: F401  finds the extension for the next one
    import transformer_engine_torch as tex

    if not hasattr(tex, "nvfp4_multi_tensor_fused_scale"):
        return ABSENT
    for seed in range(count):
        case = random_case("nvfp4", seed, torch.float32, nasty, device)
        for index, main in enumerate(case.mains):
            _check_te_scales(tex, main, [own[index] for own in case.ranges])
    return f"{count} cases"


def _check_te_scales(tex: Any, main: torch.Tensor, ranges: list[tuple[int, int]]) -> None:
    (m, k), device = main.shape, main.device
    rounded = main.to(ROUNDED).view(-1)
    tiles, wholes = [], []
    for start, stop in ranges:
        if stop > start:
            tile, whole = torch.zeros(m // 16, k // 16, device=device), main.new_zeros(1)
            tex.nvfp4_multi_tensor_compute_partial_amax(
                [rounded[start:stop]], [tile], [whole], [m], [k], [start], 16
            )
            tiles.append(tile)
            wholes.append(whole)
    tile, whole = torch.stack(tiles).amax(0), torch.stack(wholes).amax(0)
    scale, amax, encode = torch.zeros_like(tile), torch.zeros_like(whole), torch.zeros_like(whole)
    padded = -(-m // 128) * 128
    target = torch.full((padded, k // 16), 0xAA, dtype=torch.uint8, device=device)
    tex.nvfp4_compute_global_scale(whole, encode)
    tex.nvfp4_multi_tensor_fused_scale(
        [tile], [whole], [scale], [target], [amax], [m // 16], [k // 16], [padded], 16
    )
    expected = float64.nvfp4(main.to(ROUNDED))
    same(amax.cpu(), expected["amax"], "amax")
    same(target[:m].cpu(), expected["rowwise_scales"], "scales")
    most = expected["amax"].item()
    wanted = min(2688 / max(most, float64.TINY), float64.LARGEST) if most > 0 else 1.0
    same(encode.cpu(), torch.tensor([wanted], dtype=torch.float64).float(), "scale of the weight")


def rates(rank: int, world: int, recipe: str) -> str:
    """Of each pass over the main weights of four layers of Llama-3 8B, as read from memory."""
    device = place(rank)
    shapes, size = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], 1
    if device == "cpu":
        size = 64
    shapes = [(-(-m // size // 32) * 32, k // size) for m, k in shapes]
    mains = [torch.randn(shape, device=device) * 0.02 for shape in shapes]
    case = Case(recipe, mains, 1, cut(recipe, shapes, 1))
    rows: Any = Shard(case, 0, 64).rows
    amaxes, nbytes = torch.zeros(len(rows), device=device), 4 * sum(m.numel() for m in mains)
    if recipe == "nvfp4":
        tiles = TileCast(rows, ROUNDED)
        steps = {"amaxes": lambda: tiles.begin(amaxes), "cast": lambda: tiles.finish(amaxes)}
    else:
        steps = {"cast": MxCast(rows, ROUNDED).cast}
    found = []
    for name, step in steps.items():
        step()
        _wait(device)
        started, repeats = time.perf_counter(), 10 if device == "cuda" else 1
        for _ in range(repeats):
            step()
        _wait(device)
        seconds = (time.perf_counter() - started) / repeats
        found.append(f"{name} {seconds * 1e3:.3f} ms, {nbytes / seconds / 1e12:.2f} TB/s")
    return "; ".join(found)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def passes_do_not_wait(rank: int, world: int, recipe: str) -> str:
    """No pass synchronises with the host, once tables are there."""
    device = place(rank)
    case = random_case(recipe, 3, torch.float32, "", device)
    rows: Any = [row for n in range(case.shards) for row in Shard(case, n, 64).rows if row.numel]
    amaxes = torch.zeros(len(rows), device=device)
    cast: Any = (TileCast if recipe == "nvfp4" else MxCast)(rows, ROUNDED)
    for strict in (False, True):
        _wait(device)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            if recipe == "nvfp4":
                amaxes.zero_()
                cast.begin(amaxes)
                cast.finish(amaxes)
            else:
                cast.cast()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return f"{len(cast.table().work)} programs"


def te_quantises_shards(rank: int, world: int) -> str:
    """TE's function for MXFP8 over a shard, of a weight whose scales are padded."""
    device, shape = place(rank), (96, 160)
    main = torch.randn(shape, device=device)
    param = te_params("mxfp8", [shape], torch.zeros(1, 2, device=device))[0]
    te_quantise([param], [main.view(-1)], [0], own_group(rank, world))
    for name, field in KNOWS.fields(param).items():
        same(field.cpu(), float64.mxfp8(main.to(ROUNDED))[name], name)
    return f"{tuple(param._rowwise_scale_inv.shape)} of scales"
