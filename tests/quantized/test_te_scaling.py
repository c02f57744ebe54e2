"""What Transformer Engine's modules do with state of delayed scaling that was loaded.

Modules have the state of its own, by the methods of its base class that make and keep what delayed
scaling knows; the class itself cannot be imported without a GPU's parts. Checked against
`module/base.py` of 2.11 and 2.20, whose methods run unmodified.
"""

from __future__ import annotations
import __future__

import ast
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.quantized.scaling import Scaling, begin_scaling, scaling_of
from tests.lib.quantized.te_extension import FOLDERS, WITHOUT, standing_in

CHECKS = ("quantized/scaling.py",)

METHODS = (
    "adjust_amax_history_length", "set_meta_tensor", "init_fp8_meta_tensors", "init_fp8_metadata",
    "_update_weight_quantizers", "fast_setattr", "get_quantizer_roles",
)  # fmt: skip


def base_class(folder: Path) -> type:
    """With the methods of the release in `folder`."""
    import transformer_engine.pytorch.tensor.float8_tensor  # noqa: F401  TE's imports go in a ring
    from transformer_engine.pytorch import quantization
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    source = (folder / "transformer_engine/pytorch/module/base.py").read_text()
    found = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "TransformerEngineBaseModule"
    )
    found.bases = [ast.Name("Module", ast.Load())]
    found.decorator_list = []
    found.body = [
        node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in METHODS
    ]
    names = dict(vars(quantization))
    names |= {"Module": nn.Module, "F": nn.functional, "warnings": warnings}
    names |= {"QuantizedTensorStorage": QuantizedTensorStorage}
    flags = __future__.annotations.compiler_flag
    tree = ast.fix_missing_locations(ast.Module([found], []))
    exec(compile(tree, "base.py", "exec", flags, True), names)
    return names["TransformerEngineBaseModule"]  # type: ignore[no-any-return]


class Index:
    """Of a weight among what its module quantizes, as TE 2.11 has it: an enumeration of C++."""

    def __index__(self) -> int:
        return 1


def make_linear(folder: Path) -> Any:
    """A linear layer in bf16 as it is after its construction."""
    made = base_class(folder)()
    made.weight = nn.Parameter(torch.randn(32, 32).bfloat16())
    made.param_init_meta = {"weight": SimpleNamespace(fp8_meta_index=Index())}
    made.fp8_meta = {"fp8_checkpoint": False}
    made.fp8 = False
    made.fp8_parameters = False
    made.fp8_calibration = False
    made.fp8_initialized = False
    made.fp8_meta_tensors_initialized = False
    made.quantizers = {"scaling_fwd": {}, "scaling_bwd": {}}
    made._fp8_workspaces = {}
    made._get_weight_tensors = lambda: [made.weight]
    made._get_weight_quantizers = lambda: [made.quantizers["scaling_fwd"][1]]
    return made


@contextmanager
def computing(recipe: Any, parameters: bool) -> Iterator[None]:
    """As in a forward under `autocast`, or, with `parameters`, where modules are made with
    quantized weights."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState

    answers = {
        "is_fp8_enabled": not parameters, "with_fp8_parameters": parameters,
        "is_fp8_calibration": False, "get_fp8_recipe": recipe, "get_fp8_group": None,
    }  # fmt: skip
    create = functools.partial(RecipeState.create, device="cpu")
    with (
        mock.patch.multiple(
            FP8GlobalStateManager,
            **{name: staticmethod(lambda value=value: value) for name, value in answers.items()},
        ),
        mock.patch.object(RecipeState, "create", staticmethod(create)),
    ):
        yield


pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)


def scaling(linear: Any) -> Scaling:
    key = SimpleNamespace(requires_grad=True)
    pair: Any = SimpleNamespace(
        managed=SimpleNamespace(slots=((linear, "weight"),)),
        unsharded=linear.weight,
        group=SimpleNamespace(key=key),
    )
    found = scaling_of(pair)
    assert found is not None
    return found


@pytest.mark.parametrize("lengths", [(4, 4), (4, 6), (6, 4)])
@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_first_forward_keeps_what_was_loaded(
    folder: Path, parameters: bool, lengths: tuple[int, int]
) -> None:
    """Made by us where weights are not quantized, by TE where they are; the forward's recipe may
    have a history of another length."""
    with standing_in(folder):
        from transformer_engine.common.recipe import DelayedScaling

        first, later = (DelayedScaling(amax_history_len=length) for length in lengths)
        linear = make_linear(folder)
        with computing(first, parameters=True):
            if parameters:
                linear.init_fp8_metadata(num_gemms=1)
            else:
                begin_scaling(torch.nn.ModuleList([linear]), first)
        record = torch.rand(2 + lengths[0], 5) + 0.5
        record[1] = 0
        scaling(linear).load(record)
        torch.testing.assert_close(scaling(linear).record(False), record, rtol=0, atol=0)
        with computing(later, parameters=False):
            linear.init_fp8_metadata(num_gemms=1)
        rows = 2 + min(lengths)
        found = scaling(linear).record(False)
        assert len(found) == 2 + lengths[1]
        torch.testing.assert_close(found[:rows], record[:rows], rtol=0, atol=0)
        assert not found[rows:].any()
        state = linear.fp8_meta["scaling_fwd"]
        quantizers = linear.quantizers["scaling_fwd"]
        for number, quantizer in enumerate(quantizers):
            assert quantizer.scale.data_ptr() == state.scale[number].data_ptr()
            assert quantizer.amax.data_ptr() == state.amax_history[0, number].data_ptr()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_weight_that_the_module_does_not_show_gets_the_quantizer_of_a_longer_history(
    folder: Path,
) -> None:
    """As when TE's own state, of a run with another length, is loaded between passes."""
    with standing_in(folder):
        from transformer_engine.common.recipe import DelayedScaling

        linear = make_linear(folder)
        with computing(DelayedScaling(amax_history_len=4), parameters=True):
            linear.init_fp8_metadata(num_gemms=1)
        found = scaling(linear)
        before = linear.quantizers["scaling_fwd"][1]
        linear.weight._quantizer = before
        linear.weight._fsdp_last_scale = before.scale.view(1)
        linear.adjust_amax_history_length(6)
        found.follow()
        history = linear.fp8_meta["scaling_fwd"].amax_history
        assert linear.weight._quantizer.amax.data_ptr() == history[0, 1].data_ptr()
        assert before.amax.data_ptr() != history[0, 1].data_ptr()
