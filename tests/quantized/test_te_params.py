"""Parameters in Transformer Engine's own classes, as the engine handles them; and what this package
makes of main weights, which is what TE's own functions make of them. Without the compiled
extension, for which a stand-in computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.construction import broadcast_weights
from megatron_fsdp_adapter.core.engine.guard import set_classes
from megatron_fsdp_adapter.core.engine.partition import GroupKey, ManagedParam
from megatron_fsdp_adapter.core.layout.format import MXFP8
from megatron_fsdp_adapter.quantized import format_of
from megatron_fsdp_adapter.quantized.params import KINDS
from tests.quantized import te_checks
from tests.quantized.te_extension import FOLDERS, WITHOUT, run_te, standing_in
from tests.quantized.te_modules import FORMATS, check_rank, quantizers_are_te, weights_of
from tests.quantized.te_weights import KNOWS, NASTY, RECIPES, te_params, te_quantize

SHAPE = (128, 256)
FIELDS = KINDS["MXFP8Tensor"].planes
METHODS = {
    "current": "Float8CurrentScaling", "delayed": "DelayedScaling",
    "blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling",
}  # fmt: skip

pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def te(request: pytest.FixtureRequest) -> Iterator[Path]:
    with standing_in(request.param):
        yield request.param


def make(recipe: str, shape: tuple[int, int] = SHAPE) -> Any:
    param = nn.Parameter(te_params(recipe, [shape], torch.tensor([[300.0, 0.0]]))[0])
    for field in KNOWS.fields(param).values():
        field.copy_(torch.randint(0, 100, field.shape))
    return param


def managed(param: Any, *slots: Any) -> ManagedParam:
    return ManagedParam(param, ("layer.weight",), slots)


def pointed(param: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Its planes in one flat buffer; the buffer, and what was in them."""
    fields = {name: field.clone() for name, field in KNOWS.fields(param).items()}
    flat = torch.cat([field.view(-1) for field in fields.values()])
    parts = flat.split([field.numel() for field in fields.values()])
    views = [part.view(field.shape) for part, field in zip(parts, fields.values(), strict=True)]
    KNOWS.point(param, dict(zip(fields, views, strict=True)))
    return flat, fields


@pytest.mark.parametrize("recipe", RECIPES)
def test_fields_are_planes_and_follow_memory_that_comes_and_goes(te: Path, recipe: str) -> None:
    param = make(recipe)
    fields = KNOWS.fields(param)
    assert {p.name: p.shape(SHAPE) for p in FORMATS[recipe].planes} == {
        name: tuple(field.shape) for name, field in fields.items()
    }
    flat, before = pointed(param)
    storage, nbytes = flat.untyped_storage(), flat.nbytes
    kept = flat.clone()
    storage.resize_(0)
    storage.resize_(nbytes)
    flat.copy_(kept)
    for name, field in KNOWS.fields(param).items():
        assert torch.equal(field, before[name])
        assert field.untyped_storage().data_ptr() == storage.data_ptr()
    assert format_of(managed(param)) is FORMATS[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_guarded_parameter_refuses_its_fields_and_knows_its_shape(te: Path, recipe: str) -> None:
    param = make(recipe)
    original = type(param)
    set_classes([(param, KNOWS.guard_class(original))])
    assert tuple(param.shape) == SHAPE and param.dtype == torch.bfloat16 and param.requires_grad
    assert param.device.type == "cpu" and param.numel() == SHAPE[0] * SHAPE[1]
    assert tuple(param.size()) == SHAPE and param.size(1) == SHAPE[1] and param.dim() == 2
    assert format_of(managed(param)) is FORMATS[recipe]
    field = "_data" if recipe in ("current", "delayed") else "_rowwise_data"
    for read in (lambda: getattr(param, field), lambda: param.dequantize(), lambda: param + 1):
        with pytest.raises(RuntimeError, match="not gathered"):
            read()
    KNOWS.drop_derived(param)
    set_classes([(param, original)])
    assert type(param) is original and getattr(param, field) is not None


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_what_te_derives_is_dropped_and_not_asked_for_in_forward(te: Path, recipe: str) -> None:
    param = make(recipe)
    derived = "_transpose" if recipe in ("current", "delayed") else "_columnwise_data"
    assert getattr(param, derived) is not None
    KNOWS.drop_derived(param)
    assert getattr(param, derived) is None
    assert derived == "_columnwise_data" or param._transpose_invalid
    param._quantizer.set_usage(rowwise=True, columnwise=True)
    KNOWS.prepare(param)
    assert param._quantizer.rowwise_usage and not param._quantizer.columnwise_usage


def test_the_value_before_quantization_is_taken_once(te: Path) -> None:
    param, value = make("current"), torch.randn(SHAPE)
    param._high_precision_init_val = value
    param.get_high_precision_init_val = param.clear_high_precision_init_val = lambda: None
    assert KNOWS.high_precision(param) is value
    assert KNOWS.high_precision(param) is None
    assert not [name for name in param.__dict__ if "high_precision" in name]


def owner(recipe: str, index: int | None, quantized: bool = True, **options: Any) -> Any:
    """A module whose weight is made later; `options` of its recipe."""
    from transformer_engine.common import recipe as recipes

    module, chosen = nn.Module(), getattr(recipes, METHODS[recipe])()
    for option, value in options.items():
        object.__setattr__(chosen, option, value)
    module.param_init_meta = {"weight": SimpleNamespace(fp8_meta_index=index)}
    module.primary_weights_in_fp8, module.fp8_meta = quantized, {"recipe": chosen}
    return module


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_format_of_a_parameter_that_is_made_later(te: Path, recipe: str) -> None:
    param, made = (nn.Parameter(torch.empty(SHAPE, device=d)) for d in ("meta", "cpu"))
    quantized = (owner(recipe, 1), "weight")
    assert format_of(managed(param, quantized)) is FORMATS[recipe]
    assert format_of(managed(param, (owner(recipe, None), "weight"))) is None
    assert format_of(managed(param, (owner(recipe, 1, quantized=False), "weight"))) is None
    assert format_of(managed(param, (nn.Module(), "weight"))) is None
    assert format_of(managed(made, quantized)) is None


REFUSED = {
    "block_scaling_dim=1.*w_block_scaling_dim=2": ("blockwise", "block_scaling_dim", 1),
    "Use enable_2d_quantization=False": ("mxfp8", "with_2d_quantization", 1),
    "is quantized to kFloat8E5M2.*must be kFloat8E4M3": (
        "mxfp8", "dtype", SimpleNamespace(name="kFloat8E5M2"),
    ),
    "order of GEMMs.*optimize_for_gemm": ("mxfp8", "_with_gemm_swizzled_scales", True),
}  # fmt: skip
"""By message: a recipe, and what its quantizer, or a weight, is set to."""


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_represented_is_an_early_error(te: Path, message: str) -> None:
    recipe, name, value = REFUSED[message]
    param = make(recipe)
    setattr(param if name.startswith("_") else param._quantizer, name, value)
    with pytest.raises(NotImplementedError, match=f"layer.weight.*{message}"):
        format_of(managed(param))


OPTIONS = {
    "blockwise": {"w_block_scaling_dim": 1},
    "mxfp8": {"enable_2d_quantization": True, "backward_override": "dequantized"},
}


@pytest.mark.parametrize(
    ("recipe", "option"), [(recipe, option) for recipe in OPTIONS for option in OPTIONS[recipe]]
)
def test_options_of_recipes_that_weights_cannot_have(te: Path, recipe: str, option: str) -> None:
    """Of weights that are there and of those that are made later; others may be set."""
    value = OPTIONS[recipe][option]
    module = owner(recipe, 1, **{option: value})
    later = nn.Parameter(torch.empty(SHAPE, device="meta"))
    for param in (later, make(recipe)):
        with pytest.raises(NotImplementedError, match=f"{option}={value!r} of recipe .*. Use"):
            format_of(managed(param, (module, "weight")))


PADDED = (96, 160)


def test_scales_of_any_whole_blocks_are_padded_as_te_has_them(te: Path) -> None:
    """In the fields that a pass reads. What is gathered stays compact."""
    param = make("mxfp8", PADDED)
    scales = [plane.name for plane in MXFP8.planes if "scales" in plane.name]
    theirs = {name: tuple(getattr(param, FIELDS[name]).shape) for name in scales}
    _, before = pointed(param)
    compact = {name: tuple(field.shape) for name, field in before.items()}
    assert compact == {p.name: p.shape(PADDED) for p in MXFP8.planes}
    assert all(compact[name] != theirs[name] for name in scales)
    for _ in range(2):
        KNOWS.prepare(param)
        for name in scales:
            found = getattr(param, FIELDS[name])
            assert tuple(found.shape) == theirs[name]
            assert torch.equal(found[tuple(map(slice, compact[name]))], before[name])
            assert int(found.long().sum()) == int(before[name].long().sum())
        param.update_usage(rowwise_usage=True, columnwise_usage=True)
        for name, field in KNOWS.fields(param).items():
            assert torch.equal(field, before[name])
        KNOWS.drop_derived(param)
        for name in scales:
            assert tuple(getattr(param, FIELDS[name]).shape) == compact[name]


def test_scales_that_are_part_of_padded_ones_are_broadcast_in_one_piece(te: Path) -> None:
    """NCCL refuses others."""
    param = make("mxfp8", PADDED)
    seen = []

    class Axis:
        carries = ""

        def broadcast(self, tensor: torch.Tensor) -> None:
            seen.append(tensor.is_contiguous())
            tensor.fill_(7)

    param._high_precision_init_val = torch.zeros(PADDED)
    key = GroupKey("dense", torch.bfloat16, True, FORMATS["mxfp8"])
    plan = SimpleNamespace(groups={key: [managed(param)]}, name="layer")
    broadcast_weights(plan, KNOWS, {"dense": Axis()})  # type: ignore[arg-type, dict-item]
    assert seen and all(seen)
    for name, field in KNOWS.fields(param).items():
        assert torch.equal(field, torch.full_like(field, 7)), name


def test_columns_that_te_leaves_out_without_gradients_are_made(te: Path, alone: Any) -> None:
    value = (torch.randn(96, 160) * 0.02).bfloat16()
    whole = te_params("mxfp8", [(96, 160)], torch.zeros(1, 2))[0]
    te_quantize([whole], [value.float()])
    param = make("mxfp8", (96, 160))
    param._columnwise_data = param._columnwise_scale_inv = None
    with pytest.raises(ValueError, match="without columns.*preserve_high_precision_init_val=True"):
        KNOWS.fields(param)
    param._high_precision_init_val = value
    fields, expected = KNOWS.fields(param), KNOWS.fields(whole)
    for name in ("columnwise", "columnwise_scales"):
        assert torch.equal(fields[name], expected[name]), name
    KNOWS.high_precision(param)
    assert torch.equal(KNOWS.fields(param)["columnwise"], expected["columnwise"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantizer_over_ranks_gives_what_te_gives_step_after_step(
    te: Path, alone: Any, recipe: str
) -> None:
    quantizers_are_te(0, 1, recipe)


def test_weights_of_several_recipes_are_quantized_together(te: Path, alone: Any) -> None:
    mains = [torch.randn(32, 64), torch.randn(16, 64), torch.randn(48, 64)]
    recipes = ["current", "delayed", "current"]
    slots = torch.tensor([[300.0, 0.0]])
    params, theirs = (
        [te_params(r, [tuple(m.shape)], slots.clone())[0]
         for r, m in zip(recipes, mains, strict=True)]
        for _ in range(2)
    )  # fmt: skip
    params[2]._quantizer.force_pow_2_scales = theirs[2]._quantizer.force_pow_2_scales = True
    whole = [[(0, main.numel()) for main in mains]]
    weights = weights_of("current", params, mains, whole[0])
    made = KNOWS.quantizers(weights)
    assert [len(own) for _, own in made] == [1, 1, 1]
    for quantizer, _ in made:
        quantizer.bind(torch.zeros(quantizer.amax_numel))
        quantizer.begin()
        quantizer.finish()
    for index, main in enumerate(mains):
        te_quantize([theirs[index]], [main])
        one = slice(index, index + 1)
        check_rank("current", weights[one], theirs[one], whole[0][one])


def _on_rank(rank: int, world: int) -> None:
    for recipe in RECIPES:
        for nasty in NASTY:
            te_checks.shards_are_the_whole(rank, world, recipe, nasty, 2)
        for kind in ("cut", "first rank only"):
            te_checks.ranks_are_te(rank, world, recipe, kind)


@pytest.mark.parametrize("folder", FOLDERS)
def test_bytes_and_scales_of_shards_are_those_of_te(folder: Path) -> None:
    run_te(folder, _on_rank, 2)
