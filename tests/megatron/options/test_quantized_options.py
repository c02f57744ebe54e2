"""The options that make quantized weights and compute: what follows from them, what they ask of the
device, what is printed, and TE's cache of weights. Training with them: tests/quantized, and on GPUs
tests/gpu/test_gpu_fp8.py and test_gpu_fp8_params.py."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.optimizer import get_megatron_optimizer
from torch import nn

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.megatron.layers.wgrad_probe import ProbedPrecision
from megatron_fsdp_adapter.megatron.options import capability, ddp_options
from megatron_fsdp_adapter.megatron.options.support import FP4_RECIPES, FP8_RECIPES
from megatron_fsdp_adapter.megatron.wrapper import units
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    build_model,
    build_trainer,
    ddp_config,
    optimizer_config,
)

CHECKS = (
    "megatron/options/capability.py",
    "megatron/options/settings.py",
    "megatron/layers/te_weight_cache.py",
    "quantized/checks.py",
    "megatron/wrapper/announcement.py",
)

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23)
GPU = torch.device("cuda", 0)
NAMES = {
    "delayed": "fp8", "tensorwise": "fp8", "blockwise": "fp8_block_scaling", "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}  # fmt: skip
"""What TE calls what a recipe needs."""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def asks(recipe: str = "delayed") -> SimpleNamespace:
    """Fields as core's configs have them, whose recipes are members of its enums too."""
    if recipe in FP4_RECIPES:
        return SimpleNamespace(fp8=None, fp4="e2m1", fp4_recipe=Fp4Recipe(recipe))
    return SimpleNamespace(fp8="hybrid", fp8_recipe=Fp8Recipe(recipe), fp4=None)


def pretend_te(monkeypatch: pytest.MonkeyPatch, able: bool = False) -> list[str]:
    """A Transformer Engine that is asked. Returns what it was asked about. Checked against
    pytorch/quantization.py of 2.11, whose reason has to be asked for."""
    asked: list[str] = []
    package = ModuleType("transformer_engine.pytorch")

    def is_available(question: str, return_reason: bool = False) -> Any:
        asked.append(question)
        reason = "" if able else f"no {question} before compute capability 10.0"
        return (able, reason) if return_reason else able

    for question in set(NAMES.values()):
        setattr(package, f"is_{question}_available", functools.partial(is_available, question))
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    return asked


@pytest.mark.parametrize("recipe", NAMES)
def test_what_the_device_cannot_compute_names_it_the_recipe_and_the_reason(
    recipe: str, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pretend_te(monkeypatch)
    option, value = ("fp4", "e2m1") if recipe == "nvfp4" else ("fp8", "hybrid")
    assert capability.device_problems(asks(recipe), GPU) == [
        f"{option}={value!r} with {option}_recipe={recipe!r}: NVIDIA H200 (compute capability 9.0) "
        f"does not support it: no {NAMES[recipe]} before compute capability 10.0. Use another "
        f"recipe, or leave {option} unset"
    ]
    assert asked == [NAMES[recipe]]


def test_what_it_can_compute_is_no_problem(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend_te(monkeypatch, able=True)
    assert capability.device_problems(asks(), GPU) == []
    assert asked == ["fp8"]
    assert capability.device_problems(SimpleNamespace(), GPU) == []
    assert len(asked) == 1
    assert capability.device_problems(asks("custom"), GPU) == [], "refused by a rule"


def test_a_release_that_cannot_be_asked_and_none_at_all_are_named(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_te(monkeypatch)
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "is_mxfp8_available")
    [line] = capability.device_problems(asks("mxfp8"), GPU)
    assert "no capability check" in line
    assert "is_mxfp8_available" in line
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    [line] = capability.device_problems(asks(), GPU)
    assert "Transformer Engine has no capability check" in line


@pytest.mark.parametrize("recipe", NAMES)
def test_without_a_gpu_it_is_one_early_error(one_rank: torch.device, recipe: str) -> None:
    model = build_model(CASE, one_rank)
    vars(model.config).update(vars(asks(recipe)))
    with pytest.raises(ValueError) as caught:
        FullyShardedDataParallel(model.config, ddp_config(CASE, "optim_grads_params"), model)
    lines = str(caught.value).split("\n")[1:]
    assert len(lines) == 1
    assert f"_recipe={recipe!r}: device cpu does not support it" in lines[0]


def test_all_of_cores_recipes_but_the_users_own_are_accepted() -> None:
    assert {recipe.value for recipe in Fp8Recipe} - {"custom"} == set(FP8_RECIPES)
    assert {recipe.value for recipe in Fp4Recipe} - {"custom"} == set(FP4_RECIPES)
    assert set(capability.QUESTIONS) == {*FP8_RECIPES, *FP4_RECIPES} == set(NAMES)


# Options that follow from others.


def wrapped(
    one_rank: torch.device,
    strategy: str,
    monkeypatch: pytest.MonkeyPatch,
    param: bool = True,
    **ddp: Any,
) -> tuple[Any, FullyShardedDataParallel]:
    """The DDP config and a wrapper over a model whose config says that weights are quantized; none
    of its layers' are, as on a pipeline stage whose layers all stay in bf16."""
    monkeypatch.setattr(capability, "reason_against", lambda recipe, device: None)
    model = build_model(CASE, one_rank)
    options = ddp_config(CASE, strategy, ddp)
    vars(model.config).update(vars(asks()), fp8_param=param)
    return options, FullyShardedDataParallel(model.config, options, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_option_asks_for_quantized_weights(
    strategy: str, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    options, _ = wrapped(one_rank, strategy, monkeypatch)
    assert options.fp8_param_gather
    said = capsys.readouterr().out
    assert said.count("fp8_param_gather=True") == 1
    assert "(0 of them quantized)" in said, "layers that are not TE's make none"


def test_gathers_of_quantized_weights_that_are_not_quantized_are_refused(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = "fp8_param_gather=True: .* Make the model with fp8_param=True"
    with pytest.raises(ValueError, match=refused):
        wrapped(one_rank, "optim", monkeypatch, False, fp8_param_gather=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transposes_are_kept_where_weights_are(
    strategy: str, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    options, wrapper = wrapped(one_rank, strategy, monkeypatch, keep_fp8_transpose_cache=True)
    kept = strategy != "optim_grads_params"
    assert wrapper.engine.config.keep_derived is kept is options.keep_fp8_transpose_cache
    assert ("keep_fp8_transpose_cache=False" in capsys.readouterr().out) is not kept
    plain = ddp_config(CASE, strategy)
    assert ddp_options.engine_config(plain).keep_derived is False


def test_there_is_no_buffer_that_mxfp8_weights_share_with_gradients(
    one_rank: torch.device, capsys: Any
) -> None:
    """Core's optimizer would fill that, and never tell the wrapper that weights have changed."""
    name = "reuse_grad_buf_for_mxfp8_param_ag"
    trainer = build_trainer(CASE, "optim_grads_params", one_rank, ddp={name: True})
    assert f"{name}=False" in capsys.readouterr().out
    assert not getattr(trainer.wrapper.ddp_config, name)
    config = optimizer_config(CASE)
    setattr(config, name, True)
    get_megatron_optimizer(config, [trainer.wrapper], use_gloo_process_groups=False)
    assert not getattr(config, name)
    said = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert said == [
        f"Megatron's optimizer with FullyShardedDataParallel: enabled automatically: {name}=False"
    ]


# TE's cache of quantized weights under FP8 compute.


CPU = torch.device("cpu")


class QuantizingLinear(nn.Linear):
    """What core's TE layers have: the option, copied from the config when they are made. Checked
    against core 0.16.1 and 0.19.2."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.disable_parameter_transpose_cache = False


@pytest.mark.parametrize("fp8", ("hybrid", None))
@pytest.mark.parametrize("fused", (True, False))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_switched_off_and_said_where_weights_are_sharded_or_gradients_fused(
    one_rank: torch.device,
    strategy: str,
    fp8: str | None,
    fused: bool,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(units, "precisions_of", lambda config: (ProbedPrecision("weights"),))
    monkeypatch.setattr(capability, "reason_against", lambda recipe, device: None)
    model = build_model(CASE, CPU)
    layer = model.decoder.layers[0].mlp.extra = QuantizingLinear()  # type: ignore[union-attr]
    model.config.fp8 = fp8  # type: ignore[assignment,union-attr]
    model.config.gradient_accumulation_fusion = fused  # type: ignore[union-attr]
    FullyShardedDataParallel(model.config, ddp_config(CASE, strategy), model)
    off = fused or (strategy == "optim_grads_params" and fp8 is not None)
    assert layer.disable_parameter_transpose_cache is off
    assert ("disable_parameter_transpose_cache=True" in capsys.readouterr().out) is off
