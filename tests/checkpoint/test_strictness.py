"""State that only one side has, a checkpoint or the model, by `--dist-ckpt-strictness`: through the
wrapped reader of Megatron-LM, around a stand-in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron_fsdp_adapter.checkpoint import training_state
from megatron_fsdp_adapter.megatron.checkpoint import checkpoint_drivers, strictness
from tests.lib.checkpoint import drivers
from tests.lib.checkpoint.drivers import CASE, asked_state, load_by_driver
from tests.lib.gpt.gpt import Trainer, build_trainer
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("megatron/checkpoint/strictness.py", "megatron/checkpoint/checkpoint_drivers.py")

driver = drivers.driver

LAYER = "layers.1."
BIAS = "linear_fc2.bias"
MOMENTS = "exp_avg"
VALUES = (None, *strictness.STRICTNESS)


@pytest.fixture
def trainer(device: torch.device) -> Trainer:
    return build_trainer(CASE, "optim_grads_params", device)


@pytest.fixture
def folder(trainer: Trainer, tmp_path: Path) -> Path:
    """A checkpoint of everything that the trainer has."""
    state = training_state([trainer.wrapper], trainer.optimizer)
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def _without(state: Any, part: str) -> Any:
    """A nested state without the keys that have `part` in them."""
    if not isinstance(state, dict):
        return state
    return {key: _without(value, part) for key, value in state.items() if part not in key}


def _no_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "optimizer"}


Change = Callable[[dict[str, Any]], dict[str, Any]]

CHANGES: dict[str, Change] = {
    "a layer": lambda state: _without(state, LAYER),
    "a layer, weights alone": lambda state: _no_optimizer(_without(state, LAYER)),
    "a parameter": lambda state: _without(state, BIAS),
    "moments": lambda state: {**state, "optimizer": _without(state["optimizer"], MOMENTS)},
    "the optimizer": _no_optimizer,
    "nothing": lambda state: state,
}
"""What a run does not ask for, of a checkpoint that has it."""
ONLY_ERRORS: dict[str, set[str | None]] = {
    "a layer": {*VALUES} - {"log_all", "ignore_all"},
    "a layer, weights alone": {*VALUES} - {"log_all", "ignore_all"},
    "a parameter": {"raise_all"},
    "moments": {"raise_all"},
    "the optimizer": set(),
    "nothing": set(),
}
SILENT = ("the optimizer", "nothing")
"""Left out as a whole, as under --finetune and --no-load-optim."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_no_rank_asks_for_is_what_the_option_says(
    driver: ModuleType,
    trainer: Trainer,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
) -> None:
    named = {"a layer": LAYER, "a parameter": BIAS, "moments": MOMENTS}.get(change.split(",")[0])
    for value in VALUES:
        asked = CHANGES[change](asked_state(trainer))
        options = {} if value is None else {"dist_ckpt_strictness": value}
        if value in ONLY_ERRORS[change]:
            with pytest.raises(ValueError, match=r"the checkpoint but not in the state") as caught:
                load_by_driver(driver, folder, asked, **options)
            assert "dist_ckpt_strictness='log_all'" in str(caught.value)
            assert str(named) in str(caught.value)
            continue
        capsys.readouterr()
        load_by_driver(driver, folder, asked, **options)
        is_told = "are not loaded: " in capsys.readouterr().out
        assert is_told is (change not in SILENT and value != "ignore_all"), value


def test_what_the_checkpoint_lacks_is_an_error_by_either_option(
    driver: ModuleType,
    trainer: Trainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = _without(training_state([trainer.wrapper], trainer.optimizer), BIAS)
    dcp.save(state, checkpoint_id=tmp_path / "saved")

    def load(value: str | None, strict: bool) -> str:
        options = {} if value is None else {"dist_ckpt_strictness": value}
        capsys.readouterr()
        load_by_driver(driver, tmp_path / "saved", asked_state(trainer), strict, **options)
        return capsys.readouterr().out

    for value in VALUES:
        with pytest.raises(ValueError, match=r"strict_fsdp_dtensor_load=False"):
            load(value, True)
        if value in ("raise_unexpected", "raise_all"):
            with pytest.raises(ValueError, match=r"missing in the checkpoint"):
                load(value, False)
        else:
            is_told = "keep their initial values" in load(value, False)
            assert is_told is (value != "ignore_all"), value


def test_an_unknown_value_is_an_error(driver: ModuleType, trainer: Trainer, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"dist_ckpt_strictness='return_all': use one of"):
        load_by_driver(driver, folder, asked_state(trainer), dist_ckpt_strictness="return_all")


@pytest.mark.parametrize(
    ("stored", "dropped"),
    [
        ("model.decoder.layers.2.norm.weight", True),
        ("model.decoder.layers.1.mlp.experts.local_experts.2.weight", True),
        ("model.decoder.layers.1.norm.bias", False),
        ("model.output_layer.weight", False),
        # A whole stack that the model does not have: heads of multi-token prediction.
        ("model.mtp.layers.0.norm.weight", False),
        # Of layers that are frozen now.
        ("optimizer.state.decoder.layers.2.norm.weight.exp_avg", False),
    ],
)
def test_a_layer_is_dropped_if_the_model_has_others_of_its_list(stored: str, dropped: bool) -> None:
    asked = {
        "model.decoder.layers.0.norm.weight",
        "model.decoder.layers.1.norm.weight",
        "model.decoder.layers.1.mlp.experts.local_experts.0.weight",
        "optimizer.state.decoder.layers.1.norm.weight.exp_avg",
    }
    assert strictness.dropped_layers([stored], asked) == ((stored,) if dropped else ())


@on_ranks(2)
def test_layers_of_other_stages_are_not_dropped_ones(rank: int, root: Path) -> None:
    """One rank asks for one layer. The third, which none asks for, is one error on both."""
    keys = [f"decoder.layers.{number}.weight" for number in range(3)]
    for name, count in (("two", 2), ("three", 3)):
        dcp.save(
            {"model": {key: torch.ones(2) for key in [*keys[:count], "norm"]}},
            checkpoint_id=root / name,
        )
    wanted = {"model": {keys[rank]: torch.zeros(2), "norm": torch.zeros(2)}}
    by = strictness.strictness_of(None)
    asked = checkpoint_drivers.Asked(root / "two", True, by, None, None)
    prepared, _ = checkpoint_drivers.agreed(wanted, asked)
    assert prepared["model"].keys() == wanted["model"].keys()
    asked = replace(asked, folder=root / "three")
    with pytest.raises(ValueError, match=r"not in the state \(1\)") as caught:
        checkpoint_drivers.agreed(wanted, asked)
    assert keys[2] in str(caught.value)
    assert not any(key in str(caught.value) for key in keys[:2])
