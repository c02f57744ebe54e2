"""Parameters in Transformer Engine's own classes, as the engine handles them: guards, formats, and
what is refused. What becomes of their bytes: test_formats.py, test_quantized_ranks.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.construction import broadcast_weights
from megatron_fsdp_adapter.core.engine.partition import GroupKey, ManagedParam
from megatron_fsdp_adapter.core.engine.unit import set_classes
from megatron_fsdp_adapter.quantized import format_of
from tests.lib.quantized.te_extension import FOLDERS, WITHOUT, standing_in
from tests.lib.quantized.te_linear import Linear
from tests.lib.quantized.te_weights import KNOWS, RECIPES, quantizer

CHECKS = ("quantized/params.py", "quantized/checks.py", "core/engine/params.py")

SHAPE = (128, 256)

pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def te(request: pytest.FixtureRequest) -> Iterator[None]:
    with standing_in(request.param):
        yield


def make(recipe: str, shape: tuple[int, int] = SHAPE) -> Any:
    wants = quantizer(recipe, torch.tensor([300.0, 0.0]))
    return nn.Parameter(wants.make_empty(shape, dtype=torch.bfloat16, device="cpu"))


def managed(param: Any, *slots: Any) -> ManagedParam:
    return ManagedParam(param, ("layer.weight",), slots)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_guarded_parameter_refuses_its_fields_and_knows_its_shape(te: None, recipe: str) -> None:
    param = make(recipe)
    original = type(param)
    set_classes([(param, KNOWS.guard_class(original))])
    assert tuple(param.shape) == SHAPE
    assert param.dtype == torch.bfloat16
    assert param.requires_grad
    assert param.device.type == "cpu"
    assert param.numel() == SHAPE[0] * SHAPE[1]
    assert tuple(param.size()) == SHAPE
    assert param.size(1) == SHAPE[1]
    assert param.dim() == 2
    assert format_of(managed(param)) is RECIPES[recipe]
    field = "_data" if recipe in ("current", "delayed") else "_rowwise_data"
    for read in (lambda: getattr(param, field), lambda: param.dequantize(), lambda: param + 1):
        with pytest.raises(RuntimeError, match="not gathered"):
            read()
    KNOWS.drop_derived(param)
    set_classes([(param, original)])
    assert type(param) is original
    assert getattr(param, field) is not None


def test_scales_that_are_part_of_padded_ones_are_broadcast_in_one_piece(te: None) -> None:
    """NCCL refuses others."""
    param = make("mxfp8", (96, 160))
    axis = mock.MagicMock()
    axis.broadcast.side_effect = lambda tensor: tensor.fill_(7)
    param._high_precision_init_val = torch.zeros(96, 160)
    key = GroupKey("dense", torch.bfloat16, True, RECIPES["mxfp8"])
    plan: Any = SimpleNamespace(groups={key: [managed(param)]}, name="layer")
    broadcast_weights(plan, KNOWS, {"dense": axis})
    assert all(call.args[0].is_contiguous() for call in axis.broadcast.call_args_list)
    for name, field in KNOWS.fields(param).items():
        assert torch.equal(field, torch.full_like(field, 7)), name


def test_a_parameter_that_will_not_be_quantized_has_no_format(te: None) -> None:
    module = Linear("current", SHAPE, "meta")
    slot = (module, "weight")
    assert format_of(managed(module.weight, slot)) is RECIPES["current"]
    assert format_of(managed(module.weight, (nn.Module(), "weight"))) is None
    assert format_of(managed(nn.Parameter(torch.empty(SHAPE)), slot)) is None
    module.primary_weights_in_fp8 = False
    assert format_of(managed(module.weight, slot)) is None
    module.primary_weights_in_fp8 = True
    module.param_init_meta["weight"].fp8_meta_index = None
    assert format_of(managed(module.weight, slot)) is None


REFUSED = {
    "block_scaling_dim=1.*w_block_scaling_dim=2": ("block128", "block_scaling_dim", 1),
    "Use enable_2d_quantization=False": ("mxfp8", "with_2d_quantization", 1),
    "is quantized to kFloat8E5M2.*must be kFloat8E4M3": (
        "mxfp8", "dtype", SimpleNamespace(name="kFloat8E5M2"),
    ),
    "order of GEMMs.*optimize_for_gemm": ("mxfp8", "_with_gemm_swizzled_scales", True),
}  # fmt: skip
"""By message: a recipe, and what its quantizer, or a weight, is set to."""


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_represented_is_an_early_error(te: None, message: str) -> None:
    recipe, name, value = REFUSED[message]
    param = make(recipe)
    setattr(param if name.startswith("_") else param._quantizer, name, value)
    with pytest.raises(NotImplementedError, match=f"layer.weight.*{message}"):
        format_of(managed(param))


OPTIONS = {
    "w_block_scaling_dim": ("block128", 1),
    "enable_2d_quantization": ("mxfp8", True),
    "backward_override": ("mxfp8", "dequantized"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_recipes_that_weights_cannot_have(te: None, option: str) -> None:
    """Of weights that are there and of those that are made later; others may be set."""
    recipe, value = OPTIONS[option]
    module = Linear(recipe, SHAPE, "meta")
    object.__setattr__(module.fp8_meta["recipe"], option, value)
    for param in (module.weight, make(recipe)):
        with pytest.raises(NotImplementedError, match=f"{option}={value!r} of recipe .*. Use"):
            format_of(managed(param, (module, "weight")))
