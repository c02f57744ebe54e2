"""TE's cache of quantized weights under FP8 compute. TE itself: tests/gpu/test_gpu_fp8.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.megatron import units
from megatron_fsdp_adapter.megatron.options import capability
from megatron_fsdp_adapter.megatron.te_weight_cache import switch_off_weight_cache
from megatron_fsdp_adapter.megatron.wgrad_probe import Precision
from tests.distributed.gpt import STRATEGIES, Case, build_model, ddp_config

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23)
DEVICE = torch.device("cpu")


class QuantizingLinear(nn.Linear):
    """What core's TE layers have: the option, copied from the config when they are made. Checked
    against core 0.16.1 and 0.19.2."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.disable_parameter_transpose_cache = False


def test_every_layer_that_caches_is_told_not_to() -> None:
    layers = nn.Sequential(QuantizingLinear(), nn.Sequential(QuantizingLinear()), nn.Linear(3, 3))
    assert switch_off_weight_cache(layers)
    told = [getattr(m, "disable_parameter_transpose_cache", None) for m in layers.modules()]
    assert told == [None, True, None, True, None]
    assert not switch_off_weight_cache(layers)


@pytest.mark.parametrize("fp8", ("hybrid", None))
@pytest.mark.parametrize("fused", (True, False))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_switched_off_and_said_where_weights_are_sharded_or_gradients_fused(
    one_rank: torch.device, strategy: str, fp8: str | None, fused: bool, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(units, "precisions_of", lambda config: (Precision("weights"),))
    monkeypatch.setattr(capability, "reason_against", lambda recipe, device: None)
    model = build_model(CASE, DEVICE)
    layer = model.decoder.layers[0].mlp.extra = QuantizingLinear()  # type: ignore[union-attr]
    model.config.fp8 = fp8  # type: ignore[assignment,union-attr]
    model.config.gradient_accumulation_fusion = fused  # type: ignore[union-attr]
    FullyShardedDataParallel(model.config, ddp_config(CASE, strategy), model)
    off = fused or (strategy == "optim_grads_params" and fp8 is not None)
    assert layer.disable_parameter_transpose_cache is off
    assert ("disable_parameter_transpose_cache=True" in capsys.readouterr().out) is off
