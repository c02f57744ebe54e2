"""What is wrapped of Megatron-LM's checkpoint code, around a stand-in for its two functions.

The code itself, unmodified, is run by `tests/integration/test_megatron_lm.py`.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron_fsdp_adapter.checkpoint import training_state
from megatron_fsdp_adapter.megatron.checkpoint.checkpoint_drivers import wrapped_to_evaluate
from megatron_fsdp_adapter.megatron.optimizer.group_options import (
    NEITHER,
    OVERRIDE,
    USE_CHECKPOINT,
)
from tests.lib.checkpoint import drivers
from tests.lib.checkpoint.checkpoint_cases import same
from tests.lib.checkpoint.drivers import CASE, asked_state, load_by_driver
from tests.lib.gpt.gpt import Trainer, build_trainer

CHECKS = ("megatron/checkpoint/checkpoint_drivers.py",)

driver = drivers.driver


@pytest.fixture
def trainer(device: torch.device) -> Trainer:
    return build_trainer(CASE, "optim_grads_params", device)


def _saved(trainer: Trainer, folder: Path, **more: Any) -> Path:
    state = training_state([trainer.wrapper], trainer.optimizer)
    dcp.save({**state, **more}, checkpoint_id=folder)
    return folder


def _in_chunks(state: dict[str, Any]) -> dict[str, Any]:
    """As two model chunks of a rank would have it: a layer each."""
    model = state.pop("model")
    chunks = ({}, {})
    for key, value in model.items():
        chunk = 1 if "layers.1." in key else 0
        chunks[chunk][key] = value
    state["model0"], state["model1"] = chunks
    return state


def test_model_chunks_are_merged_for_a_save(driver: ModuleType, trainer: Trainer) -> None:
    state = training_state([trainer.wrapper], trainer.optimizer)
    keys = set(state["model"])
    ready = driver.preprocess_fsdp_dtensor_state_dict(None, _in_chunks(state), None)
    assert set(ready["model"]) == keys
    assert "model0" not in ready
    assert "model1" not in ready


def test_model_chunks_are_loaded_and_taken_apart_again(
    driver: ModuleType, trainer: Trainer, tmp_path: Path
) -> None:
    folder = _saved(trainer, tmp_path / "saved")
    held = [param._local_tensor for param in trainer.wrapper.parameters()]
    expected = [value.clone() for value in held]
    for value in held:
        value.detach().fill_(77)
    asked = _in_chunks(asked_state(trainer))
    chunks = {key: asked[key] for key in ("model0", "model1")}
    state = load_by_driver(driver, folder, asked)
    assert all(map(torch.equal, held, expected))
    assert "model" not in state
    for key in chunks:
        assert state[key] is chunks[key]


def _generators(value: float, count: int = 4, key: str = "(0, 0)") -> dict[str, Any]:
    """With `data_parallel_random_init` there is one for each data-parallel rank; otherwise one for
    all of them."""
    return {key: [{"torch_rng_state": torch.full((3,), value)} for _ in range(count)]}


ONE_SPLIT = _generators(1.0)
TWO_STAGES = {**_generators(1.0), **_generators(2.0, key="(1, 0)")}


@pytest.mark.parametrize(
    ("stored", "own", "are_read", "is_printed"),
    [
        pytest.param(ONE_SPLIT, _generators(0.0), True, False, id="the same split"),
        pytest.param(ONE_SPLIT, _generators(0.0, key="(0, 1)"), False, True, id="another split"),
        pytest.param(TWO_STAGES, _generators(0.0), False, True, id="fewer pipeline stages"),
        pytest.param(ONE_SPLIT, _generators(0.0, 1), False, True, id="1 data-parallel ranks"),
        pytest.param(ONE_SPLIT, _generators(0.0, 2), False, True, id="2 data-parallel ranks"),
        pytest.param(ONE_SPLIT, _generators(0.0, 8), False, True, id="8 data-parallel ranks"),
        # As Megatron-Bridge from 0.6 on does under another split.
        pytest.param(ONE_SPLIT, None, False, False, id="not asked for"),
    ],
)
def test_generators_are_read_under_the_same_split_alone(
    driver: ModuleType,
    trainer: Trainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stored: Any,
    own: Any,
    are_read: bool,
    is_printed: bool,
) -> None:
    folder = _saved(trainer, tmp_path / "saved", rng_state=stored)
    before = copy.deepcopy(own)
    state = load_by_driver(driver, folder, asked_state(trainer, rng_state=own))
    found = state["rng_state"]
    printed = capsys.readouterr().out

    if are_read:
        assert same(found, _generators(1.0))
    else:
        assert found is own
        assert same(found, before)
    assert ("generators keep their seeds" in printed) is is_printed


def test_options_of_parameter_groups_are_those_that_were_read(
    driver: ModuleType, trainer: Trainer, tmp_path: Path
) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.25
    folder = _saved(trainer, tmp_path / "saved")
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.5
    state = load_by_driver(driver, folder, asked_state(trainer))
    metas = state["optimizer"]["param_to_group_meta"].values()
    assert {meta["lr"] for meta in metas} == {0.25}
    trainer.optimizer.load_state_dict(state["optimizer"])
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.25}


def test_padding_of_the_vocabulary_follows_the_tokenizer(
    driver: ModuleType, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _saved(trainer, tmp_path / "saved")
    wider = build_trainer(CASE.but(vocab=32), "optim_grads_params", torch.device("cpu"))
    expected = {name: p._local_tensor.clone() for name, p in trainer.wrapper.named_parameters()}
    with pytest.raises(ValueError, match=r"stored with shape \(23, 12\), wanted with \(32, 12\)"):
        load_by_driver(driver, folder, asked_state(wider))
    tokenizer = SimpleNamespace(vocab_size=22)
    variables = SimpleNamespace(_GLOBAL_TOKENIZER=tokenizer)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    state = load_by_driver(driver, folder, asked_state(wider))
    wider.wrapper.load_state_dict(state["model"])  # of its own shapes
    for name, param in wider.wrapper.named_parameters():
        saved = expected[name]
        assert torch.equal(param._local_tensor[: len(saved)], saved), name


def test_what_is_missing_is_one_error_or_if_allowed_one_message(
    driver: ModuleType, trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = training_state([trainer.wrapper])["model"]
    lost = [key for key in model if "layers.1.mlp" in key]
    kept = {key: value for key, value in model.items() if key not in lost}
    folder = _saved(trainer, tmp_path / "saved", model=kept)
    with pytest.raises(ValueError, match="the model does not fit") as caught:
        load_by_driver(driver, folder, asked_state(trainer))
    capsys.readouterr()
    load_by_driver(driver, folder, asked_state(trainer), strict=False)
    printed = capsys.readouterr().out
    assert f"{len(lost)} keys" in printed
    for key in lost:
        for told in (str(caught.value), printed):
            assert f"model.{key}" in told


@pytest.mark.parametrize(
    ("options", "name", "is_refused"),
    [
        ({"no_save_optim": True}, "saved", True),
        ({"no_save_optim": True, "no_load_optim": True}, "saved", False),
        ({"no_save_optim": True, "skip_train": True}, "saved", False),
        ({"no_save_optim": True, "finetune": True}, "saved", False),
        ({"no_save_optim": True}, "release", False),
        ({}, "saved", False),
    ],
)
def test_an_optimizer_that_is_not_asked_for_is_an_error_if_it_will_be_loaded(
    driver: ModuleType,
    trainer: Trainer,
    tmp_path: Path,
    options: dict[str, bool],
    name: str,
    is_refused: bool,
) -> None:
    folder = _saved(trainer, tmp_path / name)
    state = asked_state(trainer)
    del state["optimizer"]
    if is_refused:
        with pytest.raises(ValueError, match=r"no_save_optim=True .* or add --no-load-optim"):
            load_by_driver(driver, folder, state, **options)
    else:
        assert "model" in load_by_driver(driver, folder, state, **options)


def test_a_checkpoint_without_an_optimizer_is_one_short_error(
    driver: ModuleType, trainer: Trainer, tmp_path: Path
) -> None:
    state = training_state([trainer.wrapper])
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    with pytest.raises(ValueError, match="has no optimizer state.*Add --no-load-optim"):
        load_by_driver(driver, tmp_path / "saved", asked_state(trainer))


SAVED_SCHEDULE = {"max_lr": 1e-3, "min_lr": 1e-4, "lr_decay_steps": 40, "num_steps": 8}


@pytest.mark.parametrize("flag", [NEITHER, OVERRIDE, USE_CHECKPOINT])
def test_another_rate_and_schedule_are_one_error_without_a_flag(
    driver: ModuleType, trainer: Trainer, tmp_path: Path, flag: str
) -> None:
    folder = _saved(trainer, tmp_path / "saved", opt_param_scheduler=SAVED_SCHEDULE)
    own = SAVED_SCHEDULE | {"max_lr": 5e-3, "lr_decay_steps": 80, "num_steps": 0}
    state = asked_state(trainer, opt_param_scheduler=own)
    if flag:
        found = load_by_driver(driver, folder, state, **{flag: True})
        assert found["opt_param_scheduler"] == SAVED_SCHEDULE
        return
    with pytest.raises(ValueError, match="The checkpoint's schedule") as caught:
        load_by_driver(driver, folder, state)
    _, *lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "  - max_lr=0.005 (--lr)",
        "  - lr_decay_steps=80 (--lr-decay-iters, --train-iters, --global-batch-size)",
    ]


def test_other_wrappers_and_first_looks_pass_unchanged(driver: ModuleType, tmp_path: Path) -> None:
    state = {"model": {"a": torch.zeros(2)}, "_model": [torch.nn.Linear(1, 1)]}
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    loaded = load_by_driver(driver, tmp_path / "saved", state)
    assert torch.equal(loaded["model"]["a"], torch.ones(2))


@pytest.mark.parametrize(
    ("given", "wraps"),
    [
        ({}, True),
        ({"ckpt_format": "torch_dist"}, False),
        ({"skip_train": False}, False),
        ({"use_megatron_fsdp": False}, False),
    ],
)
def test_a_model_is_wrapped_for_an_evaluation_from_such_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], wraps: bool
) -> None:
    run = {"use_megatron_fsdp": True, "skip_train": True, "ckpt_format": "fsdp_dtensor", **given}
    variables = SimpleNamespace(get_args=lambda: SimpleNamespace(**run))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    assert wrapped_to_evaluate(lambda wrap_with_ddp: wrap_with_ddp, False) is wraps
