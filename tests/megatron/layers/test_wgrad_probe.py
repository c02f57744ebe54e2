"""What a probe sees of modules that fuse weight gradients, whatever they do with `main_grad`.

Transformer Engine's own classes: tests/gpu/test_gpu_wgrad.py.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.partition import ManagedParam
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.megatron.layers import wgrad_probe
from megatron_fsdp_adapter.megatron.layers.fused_wgrad import grad_writer
from megatron_fsdp_adapter.megatron.layers.wgrad_probe import (
    SIZE,
    UNKNOWN,
    Maker,
    Observed,
    ProbedPrecision,
    maker_name,
    observe,
    observed,
    read_by_operations,
)
from tests.lib.engine.fused_linear import FusedProduct

CHECKS = ("megatron/layers/wgrad_probe.py", "megatron/layers/fused_wgrad.py")

CPU = torch.device("cpu")


class Fusing(nn.Module):
    """A norm, and a weight of each habit; while one is `forced`, all have that."""

    forced: str | None = None

    def __init__(self, *habits: str) -> None:
        super().__init__()
        self.habits = habits
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(SIZE, SIZE)) for _ in habits)
        self.norm = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, habit in zip(self.weights, self.habits, strict=True):
            x = FusedProduct.apply(x, weight, self.forced or habit)
        return x * self.norm


ADDS = Observed(adds=True)
DEAF = Observed(True, True, ignores_flag_under_hooks=True)
SEEN = {
    ("asks in backward",): Observed(adds=True, overwrites_in_backward=True),
    ("asks what it saved",): DEAF,
    ("asks in forward",): Observed(adds=True, overwrites_in_forward=True),
    ("asks for the flag in forward",): ADDS,
    ("asks the quantized weight",): ADDS,
    ("adds",): ADDS,
    ("always overwrites",): Observed(adds=False, overwrites_in_forward=True),
    ("writes nothing",): Observed(adds=False),
    # A class is as good as its worst weight.
    ("asks in backward", "adds"): ADDS,
    ("asks in backward", "asks what it saved"): DEAF,
}


def _maker(*habits: str) -> Maker:
    return Maker(lambda **options: Fusing(*habits))


@pytest.mark.parametrize("habits", SEEN, ids=" and ".join)
def test_each_protocol_is_seen_for_what_it_is(habits: tuple[str, ...]) -> None:
    """And to look draws no random numbers."""
    before = torch.get_rng_state()
    seen = observe(_maker(*habits), ProbedPrecision("weights"), torch.float32, torch.float32, CPU)
    assert seen == SEEN[habits]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("nested", [False, True])
def test_histories_of_transformer_engine_are_as_before(
    monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """In both of the forms that its tables have had."""
    tables = SimpleNamespace(
        global_amax_buffer={"key": [1]}, autocast_depth=3, fp8_tensors_recompute_buffer=[2]
    )
    before = copy.deepcopy(tables)
    if nested:
        manager = SimpleNamespace(quantization_state=tables)
    else:
        manager = tables
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    fp8 = SimpleNamespace(FP8GlobalStateManager=manager)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", fp8)
    with wgrad_probe._te_histories_kept():
        tables.global_amax_buffer["key"].append(7)
        tables.global_amax_buffer["other"] = [8]
        tables.fp8_tensors_recompute_buffer.append(9)
    assert tables == before


def test_a_recipe_reduces_nothing_while_looking() -> None:
    given = SimpleNamespace(margin=3, reduce_amax=True)
    alone = wgrad_probe.without_reductions(given)
    assert (alone.margin, alone.reduce_amax, given.reduce_amax) == (3, False, True)
    tensorwise = SimpleNamespace(margin=1)
    assert wgrad_probe.without_reductions(tensorwise) is tensorwise


_Base = type(
    "LayerNormLinear",
    (nn.Module,),
    {"__module__": "transformer_engine.pytorch.module.layernorm_linear"},
)


class ColumnParallel(_Base):  # type: ignore[misc, valid-type]
    fuse_wgrad_accumulation = True


def test_a_subclass_is_looked_at_as_its_nearest_known_base() -> None:
    assert maker_name(ColumnParallel) == "transformer_engine.LayerNormLinear"
    assert maker_name(nn.Linear) is None


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Maker]:
    """Rows for classes of this file, and of what was seen before nothing is known."""
    anew = functools.cache(wgrad_probe.observed_once.__wrapped__)
    monkeypatch.setattr(wgrad_probe, "observed_once", anew)
    monkeypatch.setattr(wgrad_probe, "MAKERS", {})
    return wgrad_probe.MAKERS


NAME = "transformer_engine.LayerNormLinear"


def observer(
    *precisions: ProbedPrecision, dtype: torch.dtype = torch.float32, **options: Any
) -> Callable[..., Observed]:
    return functools.partial(
        observed,
        precisions=precisions or (ProbedPrecision("weights"),),
        main_dtype=dtype,
        device=CPU,
        **options,
    )


def test_each_class_is_run_once_in_each_precision(makers: dict[str, Maker]) -> None:
    make = mock.Mock(side_effect=lambda **options: Fusing("adds"))
    makers[NAME] = Maker(make)
    looks = observer(ProbedPrecision("weights"), ProbedPrecision("FP8"))
    assert looks(ColumnParallel(), torch.float32) == ADDS
    runs = make.call_count
    assert looks(ColumnParallel(), torch.float32) == ADDS
    assert make.call_count == runs > 0
    assert runs % 2 == 0


def test_what_holds_in_one_precision_only_does_not_hold(makers: dict[str, Maker]) -> None:
    """As with Transformer Engine 2.11: in FP8 the flag is looked for on the quantized weight."""
    makers[NAME] = _maker("asks in backward")
    fp8 = ProbedPrecision("FP8", lambda: mock.patch.object(Fusing, "forced", "adds"))
    one = observer()
    both = observer(ProbedPrecision("weights"), fp8)
    assert one(ColumnParallel(), torch.float32).overwrites_in_backward
    assert both(ColumnParallel(), torch.float32) == Observed(adds=True)


@pytest.mark.parametrize(
    ("hooks_inside", "expected"),
    [(False, WgradProtocol.OVERWRITES_UNHOOKED), (True, WgradProtocol.ACCUMULATES)],
)
def test_hooks_inside_of_units_are_reckoned_with_from_the_start(
    makers: dict[str, Maker], hooks_inside: bool, expected: WgradProtocol
) -> None:
    """Such hooks no engine sees, and so nothing would clear the bucket when they are on."""
    makers[NAME] = _maker("asks what it saved")
    looks = observer(hooks_inside=hooks_inside)
    assert grad_writer(_managed(ColumnParallel()), looks) is expected


def test_a_layer_whose_weights_an_operation_reads_is_taken_to_add(
    makers: dict[str, Maker],
) -> None:
    makers[NAME] = _maker("asks in backward")
    layer = ColumnParallel()
    for fused, expected in ((True, UNKNOWN), (False, SEEN["asks in backward",])):
        holder: Any = nn.Sequential(layer)
        holder._with_fused_impl = fused
        looks = observer(by_operations=read_by_operations(holder))
        assert looks(layer, torch.float32) == expected


def test_modules_of_quantized_weights_are_made_with_such_weights(makers: dict[str, Maker]) -> None:
    """Transformer Engine 2.11 looks for the flag on the weight that it computes with: where that is
    the parameter itself, it is there."""
    inside: dict[str, bool] = {}
    makers[NAME] = Maker(
        lambda **options: Fusing("asks in backward" if [*inside] == ["made"] else "adds")
    )
    made, computed = (
        functools.partial(mock.patch.dict, inside, {name: True}) for name in ("made", "computed")
    )
    looks = observer(quantized=ProbedPrecision("FP8", computed, made))
    assert looks(ColumnParallel(), torch.float32, True).overwrites_in_backward
    assert looks(ColumnParallel(), torch.float32) == Observed(adds=True)
    assert observer()(ColumnParallel(), torch.float32, True) == UNKNOWN
    assert not inside


def test_what_cannot_be_run_is_said_and_cleared_first(makers: dict[str, Maker]) -> None:
    makers[NAME] = Maker(mock.Mock(side_effect=RuntimeError("no kernel for this")))
    with pytest.warns(RuntimeWarning, match="could not be probed .no kernel for this"):
        assert observer()(ColumnParallel(), torch.float32) == UNKNOWN


def test_products_that_no_kernel_writes_are_refused(makers: dict[str, Maker]) -> None:
    makers[NAME] = _maker("adds")
    looks = observer(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="weights in torch.float16, .* Leave megatron_fsdp_grad"):
        looks(ColumnParallel(), torch.float16)
    assert looks(nn.Linear(2, 2), torch.float16) == UNKNOWN


OWNER = SimpleNamespace(fuse_wgrad_accumulation=True)


def _managed(*owners: Any, frozen: bool = False, ndim: int = 2) -> ManagedParam:
    param = nn.Parameter(torch.zeros((2,) * ndim), requires_grad=not frozen)
    return ManagedParam(param, ("weight",), tuple((owner, "weight") for owner in owners))


@pytest.mark.parametrize(("seen", "expected"), [
    ([Observed(True, True, True)], WgradProtocol.OVERWRITES),
    ([Observed(True, True, False, True)], WgradProtocol.OVERWRITES_UNHOOKED),
    ([Observed(True, False, True)], WgradProtocol.OVERWRITES_EARLY),
    ([ADDS], WgradProtocol.ACCUMULATES),
    # A weight of two kinds of modules.
    ([Observed(True, True, True), Observed(True, False, True)], WgradProtocol.ACCUMULATES),
])  # fmt: skip
def test_what_was_not_seen_to_overwrite_is_cleared_first(
    seen: list[Observed], expected: WgradProtocol
) -> None:
    owners = [SimpleNamespace(fuse_wgrad_accumulation=True, seen=one) for one in seen]
    assert grad_writer(_managed(*owners), lambda owner, *asked: owner.seen) is expected


@pytest.mark.parametrize("seen", [Observed(False), Observed(False, False, True)])
def test_who_neither_adds_nor_overwrites_is_refused(seen: Observed) -> None:
    with pytest.raises(ValueError, match="SimpleNamespace neither adds .* Set gradient_accum"):
        grad_writer(_managed(OWNER), lambda *asked: seen)


@pytest.mark.parametrize(
    ("owner", "options"),
    [
        (SimpleNamespace(), {}),
        (OWNER, {"frozen": True}),
        (OWNER, {"ndim": 1}),
        (SimpleNamespace(fuse_wgrad_accumulation=False), {}),
    ],
)
def test_only_trained_matrices_of_fusing_modules_are_theirs_to_write(
    owner: Any, options: dict[str, Any]
) -> None:
    looks = mock.Mock()
    assert grad_writer(_managed(owner, **options), looks) is WgradProtocol.AUTOGRAD
    looks.assert_not_called()
