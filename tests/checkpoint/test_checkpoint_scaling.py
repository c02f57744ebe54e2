"""State of FP8's delayed scaling in checkpoints, of layers that are like Transformer Engine's: it
is loaded where it is, missing in no load, and left out by converters. One rank."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.checkpoint.convert import convert
from megatron_fsdp_adapter.state.names import FP8_SCALING
from megatron_fsdp_adapter.tools.inspection import describe
from tests.lib.checkpoint import drivers as drivers
from tests.lib.checkpoint.convert_cases import Model, fsdp_state, save_fsdp
from tests.lib.gpt.checkpoints import loaded, saved
from tests.lib.gpt.gpt import Trainer, build_trainer

CHECKS = (
    "state/scaling_records.py",
    "state/names.py",
    "checkpoint/convert/training_state.py",
    "tools/inspection.py",
)

driver = drivers.driver
LENGTH = 3


def scaled(length: int) -> Any:
    """Gives the linear layers of a GPT state with a history of `length` steps, and values that
    differ from layer to layer."""

    def change(model: torch.nn.Module) -> None:
        linears = [m for name, m in model.named_modules() if ".linear_" in name]
        for number, module in enumerate(linears):
            states = {}
            for key, n in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                states[key] = SimpleNamespace(
                    scale=torch.full((n,), 1.0 + number),
                    amax_history=torch.full((length, n), 100.0 + number),
                )
            module.fp8_meta = states  # type: ignore[assignment]
            module.param_init_meta = {"weight": SimpleNamespace(fp8_meta_index=1)}  # type: ignore

    return change


def made(device: torch.device, length: int | None) -> Trainer:
    if length is None:
        change = {}
    else:
        change = {"change": scaled(length)}
    return build_trainer(drivers.CASE, "optim_grads_params", device, **change)


def records(state: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if key.endswith(FP8_SCALING)}


def own(trainer: Trainer) -> dict[str, torch.Tensor]:
    return records(trainer.wrapper.state_dict_for_save_checkpoint())


def reset(trainer: Trainer) -> None:
    for module in trainer.wrapper.modules():
        for state in getattr(module, "fp8_meta", {}).values():
            state.scale.fill_(1)
            state.amax_history.zero_()


@pytest.fixture(params=("by us", "by Megatron"))
def load(request: pytest.FixtureRequest, driver: ModuleType) -> Any:
    def by_us(trainer: Trainer, folder: Path) -> None:
        loaded(trainer, folder.parent)

    def by_megatron(trainer: Trainer, folder: Path) -> None:
        """Its function, with strict loading, whose state goes to the wrapper."""
        state = drivers.load_by_driver(driver, folder, drivers.asked_state(trainer), strict=True)
        trainer.wrapper.load_state_dict(state["model"])

    return {"by us": by_us, "by Megatron": by_megatron}[request.param]


def test_a_load_takes_what_is_there_with_the_history_that_fits(
    device: torch.device, load: Any, tmp_path: Path
) -> None:
    trainer = made(device, LENGTH)
    folder = tmp_path / "saved" / "iter_0000001"
    saved(trainer, folder.parent)
    expected = own(trainer)
    assert len(expected) == 4 * drivers.CASE.num_layers
    assert all(value.shape == (2 + LENGTH, 5) for value in expected.values())
    for length in (LENGTH, LENGTH - 1, LENGTH + 2):
        other = made(device, length)
        reset(other)
        load(other, folder)
        for name, value in own(other).items():
            rows = 2 + min(length, LENGTH)
            assert torch.equal(value[:rows], expected[name][:rows]), (length, name)
            assert not value[rows:].any(), (length, name)


def test_neither_a_model_nor_a_checkpoint_has_to_have_any(
    device: torch.device, load: Any, tmp_path: Path
) -> None:
    with_state, without = made(device, LENGTH), made(device, None)
    has, has_not = (tmp_path / name / "iter_0000001" for name in ("has", "has not"))
    saved(with_state, has.parent)
    saved(without, has_not.parent)
    load(without, has)
    before = own(with_state)
    load(with_state, has_not)  # of weights that are not quantized: Transformer Engine measures
    for name, value in own(with_state).items():
        assert torch.equal(value, before[name])


def test_a_record_of_another_kind_is_an_error_before_anything_is_written(
    device: torch.device,
) -> None:
    trainer = made(device, LENGTH)
    state = trainer.wrapper.state_dict_for_save_checkpoint()
    name = next(iter(records(state)))
    for wrong in (torch.ones(2, 5), torch.ones(7, 4), [1.0]):
        with pytest.raises(ValueError, match=r"fp8_scaling: (shape|a list)"):
            trainer.wrapper.load_state_dict({**state, name: wrong})


def test_converters_leave_it_out_and_say_so(tmp_path: Path) -> None:
    state = fsdp_state(Model(te=True))
    key = f"module.decoder.layers.0.self_attention.linear_proj.weight{FP8_SCALING}"
    state["model"][key] = torch.rand(6, 5)
    source = save_fsdp(tmp_path / "saved", state)
    report = convert(source, tmp_path / "out", "torch_dist")
    assert f"model.{key}" in report["dropped"]
    parts = {entry["key"]: entry["part"] for entry in describe(source)["entries"]}
    assert parts[f"model.{key}"] == "other"
