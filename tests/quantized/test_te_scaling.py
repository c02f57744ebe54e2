"""What Transformer Engine's modules do with state of delayed scaling that was loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.quantized.scaling import Scaling, begin_scaling, scaling_of
from tests.quantized.te_base import computing, make_linear
from tests.quantized.te_extension import FOLDERS, standing_in

pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
)


def scaling(linear: Any) -> Scaling:
    key = SimpleNamespace(requires_grad=True)
    pair: Any = SimpleNamespace(
        managed=SimpleNamespace(slots=((linear, "weight"),)), raw=linear.weight,
        group=SimpleNamespace(key=key),
    )  # fmt: skip
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
        state, quantizers = linear.fp8_meta["scaling_fwd"], linear.quantizers["scaling_fwd"]
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
        found, before = scaling(linear), linear.quantizers["scaling_fwd"][1]
        linear.weight._quantizer = before
        linear.weight._fsdp_last_scale = before.scale.view(1)
        linear.adjust_amax_history_length(6)
        found.follow()
        history = linear.fp8_meta["scaling_fwd"].amax_history
        assert linear.weight._quantizer.amax.data_ptr() == history[0, 1].data_ptr()
        assert before.amax.data_ptr() != history[0, 1].data_ptr()
