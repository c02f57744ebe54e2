"""What is wrapped of Megatron-LM's checkpoint code, around a stand-in for its two functions.

The code itself, unmodified, is run by `tests/integration/test_megatron_lm.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch.distributed import checkpoint as dcp

from megatron_fsdp_adapter.checkpoint import training_state
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import DRIVERS, LM
from tests.distributed.gpt import Case, Trainer, build_trainer, init_megatron

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, swiglu=True)


def preprocess_fsdp_dtensor_state_dict(args: Any, raw_state_dict: Any, model: Any) -> Any:
    state = dict(raw_state_dict)
    assert isinstance(state["model"], dict)  # as the real one, which looks for no other key
    return state


def _load_base_checkpoint(
    load_dir: str, args: Any, rank0: bool = False, sharded_state_dict: Any = None
) -> Any:
    state = sharded_state_dict
    optimizer = dict(state["optimizer"]) if "optimizer" in state else None
    model = dict(state["model"]) if "model" in state else None
    chunks = state.pop("_model")
    state = sys.modules[LM].preprocess_fsdp_dtensor_state_dict(args, state, chunks[0])
    planner = dcp.DefaultLoadPlanner(allow_partial_load=not args.strict_fsdp_dtensor_load)
    dcp.load(state, checkpoint_id=load_dir, planner=planner)
    kept = {"optimizer": optimizer, "model": model}
    return {**state, **{k: v for k, v in kept.items() if v is not None}}, load_dir, False, "type"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType(LM)
    module.preprocess_fsdp_dtensor_state_dict = preprocess_fsdp_dtensor_state_dict
    module._load_base_checkpoint = _load_base_checkpoint
    module.get_load_checkpoint_path_by_args = lambda args: args.load
    monkeypatch.setitem(sys.modules, LM, module)
    patches.install(DRIVERS)
    yield module
    patches.uninstall(DRIVERS)


@pytest.fixture
def trainer(one_rank: None) -> Iterator[Trainer]:
    yield build_trainer(CASE, "optim_grads_params", init_megatron())
    parallel_state.destroy_model_parallel()


def _saved(trainer: Trainer, folder: Path, **more: Any) -> Path:
    dcp.save({**training_state([trainer.wrapper], trainer.optimizer), **more}, checkpoint_id=folder)
    return folder


def _asked(trainer: Trainer, **more: Any) -> dict[str, Any]:
    state = training_state([trainer.wrapper], trainer.optimizer, is_loading=True)
    return {**state, "_model": [trainer.wrapper.module], **more}


def _in_chunks(state: dict[str, Any]) -> dict[str, Any]:
    """As two model chunks of a rank would have it: a layer each."""
    model = state.pop("model")
    for chunk in (0, 1):
        state[f"model{chunk}"] = {
            key: value for key, value in model.items() if ("layers.1." in key) == bool(chunk)
        }
    return state


def _load(driver: ModuleType, folder: Path, state: dict[str, Any], strict: bool = True) -> Any:
    args = SimpleNamespace(strict_fsdp_dtensor_load=strict)
    return driver._load_base_checkpoint(str(folder), args, sharded_state_dict=state)[0]


def _poison(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What was there before."""
    params = dict(trainer.wrapper.named_parameters())
    before = {name: param._local_tensor.clone() for name, param in params.items()}
    with torch.no_grad():
        for param in params.values():
            param._local_tensor.fill_(77)
    return before


def _assert_weights(trainer: Trainer, expected: dict[str, torch.Tensor]) -> None:
    for name, param in trainer.wrapper.named_parameters():
        assert torch.equal(param._local_tensor, expected[name]), name


def test_model_chunks_are_merged_for_a_save(driver: ModuleType, trainer: Trainer) -> None:
    state = training_state([trainer.wrapper], trainer.optimizer)
    keys = set(state["model"])
    ready = driver.preprocess_fsdp_dtensor_state_dict(None, _in_chunks(state), None)
    assert set(ready["model"]) == keys
    assert not [key for key in ready if key in ("model0", "model1")]


def test_model_chunks_that_share_a_key_are_refused(driver: ModuleType) -> None:
    state = {"model0": {"a": 1, "b": 1}, "model1": {"b": 2, "c": 2}}
    with pytest.raises(ValueError, match=r"model1 .* have b \(1 keys\)"):
        driver.preprocess_fsdp_dtensor_state_dict(None, state, None)


def test_model_chunks_are_loaded_and_taken_apart_again(
    driver: ModuleType, trainer: Trainer, tmp_path: Path
) -> None:
    folder = _saved(trainer, tmp_path / "saved")
    expected = _poison(trainer)
    asked = _in_chunks(_asked(trainer))
    chunks = {key: asked[key] for key in ("model0", "model1")}
    state = _load(driver, folder, asked)
    _assert_weights(trainer, expected)
    assert "model" not in state
    assert all(state[key] is chunks[key] for key in chunks)


def test_generators_of_another_split_are_left_as_they_are(
    driver: ModuleType, trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = {"(0, 0)": [{"torch_rng_state": torch.ones(3)}]}
    folder = _saved(trainer, tmp_path / "saved", rng_state=stored)
    own = {"(0, 0)": [{"torch_rng_state": torch.zeros(3)}]}
    state = _load(driver, folder, _asked(trainer, rng_state=own))
    assert torch.equal(state["rng_state"]["(0, 0)"][0]["torch_rng_state"], torch.ones(3))
    assert "generator" not in capsys.readouterr().out
    other = {"(0, 1)": [{"torch_rng_state": torch.zeros(3)}]}
    state = _load(driver, folder, _asked(trainer, rng_state=other))
    assert state["rng_state"] is other
    assert not other["(0, 1)"][0]["torch_rng_state"].any()
    assert "generators stay as it seeded them" in capsys.readouterr().out


def test_generators_that_nobody_asks_for_are_not_read(
    driver: ModuleType, trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Megatron-Bridge from 0.6 on does under another split: it has None in their place."""
    stored = {"(0, 0)": [{"torch_rng_state": torch.ones(3)}]}
    folder = _saved(trainer, tmp_path / "saved", rng_state=stored)
    expected = _poison(trainer)
    state = _load(driver, folder, _asked(trainer, rng_state=None))
    _assert_weights(trainer, expected)
    assert state["rng_state"] is None and "generator" not in capsys.readouterr().out


def test_generators_of_another_number_of_data_parallel_ranks_are_left_as_they_are(
    driver: ModuleType, trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `data_parallel_random_init` there is one for each; otherwise one for all of them."""

    def states(count: int, value: float) -> dict[str, Any]:
        return {"(0, 0)": [{"torch_rng_state": torch.full((3,), value)} for _ in range(count)]}

    folder = _saved(trainer, tmp_path / "saved", rng_state=states(4, 1.0))
    for count in (1, 2, 8, 4):
        own = states(count, 0.0)
        state = _load(driver, folder, _asked(trainer, rng_state=own))
        told = capsys.readouterr().out
        if count == 4:
            assert all(one["torch_rng_state"].all() for one in state["rng_state"]["(0, 0)"])
            assert "generator" not in told
            continue
        assert state["rng_state"] is own
        assert not any(one["torch_rng_state"].any() for one in own["(0, 0)"])
        assert "generators stay as it seeded them" in told


def test_options_of_parameter_groups_are_those_that_were_read(
    driver: ModuleType, trainer: Trainer, tmp_path: Path
) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.25
    folder = _saved(trainer, tmp_path / "saved")
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.5
    state = _load(driver, folder, _asked(trainer))
    assert {meta["lr"] for meta in state["optimizer"]["param_to_group_meta"].values()} == {0.25}
    trainer.optimizer.load_state_dict(state["optimizer"])
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.25}


def test_padding_of_the_vocabulary_follows_the_tokenizer(
    driver: ModuleType, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _saved(trainer, tmp_path / "saved")
    wider = build_trainer(CASE.but(vocab=32), "optim_grads_params", torch.device("cpu"))
    expected = {name: p._local_tensor.clone() for name, p in trainer.wrapper.named_parameters()}
    with pytest.raises(ValueError, match=r"stored with shape \(23, 12\), wanted with \(32, 12\)"):
        _load(driver, folder, _asked(wider))
    monkeypatch.setitem(
        sys.modules,
        "megatron.training.global_vars",
        SimpleNamespace(_GLOBAL_TOKENIZER=SimpleNamespace(vocab_size=22)),
    )
    state = _load(driver, folder, _asked(wider))
    wider.wrapper.load_state_dict(state["model"])  # of its own shapes
    for name, param in wider.wrapper.named_parameters():
        assert torch.equal(param._local_tensor[: len(expected[name])], expected[name]), name


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_missing_is_one_error_or_if_allowed_one_message(
    driver: ModuleType, trainer: Trainer, tmp_path: Path, strict: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    state = training_state([trainer.wrapper], trainer.optimizer)
    lost = [key for key in state["model"] if "layers.1.mlp" in key]
    for key in lost:
        del state["model"][key]
    folder = tmp_path / "saved"
    dcp.save(state, checkpoint_id=folder)
    capsys.readouterr()
    if strict:
        with pytest.raises(ValueError, match="the model does not fit") as caught:
            _load(driver, folder, _asked(trainer), strict)
        told = str(caught.value)
    else:
        _load(driver, folder, _asked(trainer), strict)
        told = capsys.readouterr().out
        assert f"{len(lost)} keys" in told
    assert all(f"model.{key}" in told for key in lost)


def test_other_wrappers_and_first_looks_pass_unchanged(driver: ModuleType, tmp_path: Path) -> None:
    state = {"model": {"a": torch.zeros(2)}, "_model": [torch.nn.Linear(1, 1)]}
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    loaded = _load(driver, tmp_path / "saved", state)
    assert torch.equal(loaded["model"]["a"], torch.ones(2))
