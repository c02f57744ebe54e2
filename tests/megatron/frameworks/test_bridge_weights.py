"""What is wrapped of Megatron-Bridge's conversion, around a stand-in for its methods.

The code itself, unmodified, is run by `tests/integration/test_bridge_conversion.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter import release_memory, return_memory
from megatron_fsdp_adapter.megatron.checkpoint import checkpoint_drivers
from megatron_fsdp_adapter.megatron.compat.table import BRIDGE
from tests.lib.gpt.gpt import Case, Trainer
from tests.lib.megatron.bridge_stand_in import Task, standing_in

CHECKS = ("megatron/frameworks/bridge_weights.py",)

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, swiglu=True)


@dataclass(frozen=True)
class _Adapter:
    linear_in_task: Any
    linear_out_task: Any


@pytest.fixture
def bridge() -> Iterator[ModuleType]:
    with standing_in() as module:
        yield module


def _forward(trainer: Trainer) -> torch.Tensor:
    tokens = torch.arange(CASE.seq)[None] % CASE.vocab
    with torch.no_grad():
        return trainer.wrapper(tokens, torch.arange(CASE.seq)[None], None)


def _zeros(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.zeros(shape)


GIVEN = {
    "wrapper": lambda wrapper: [wrapper],
    "inner": lambda wrapper: [wrapper.module],
    "model": lambda wrapper: [wrapper.module.module],
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_load_after_a_forward_reaches_main_weights_and_the_next_forward(
    bridge: ModuleType, trainer: Trainer, given: str
) -> None:
    before = _forward(trainer)
    bridge.MegatronModelBridge().load_weights_hf_to_megatron(_zeros, GIVEN[given](trainer.wrapper))
    assert before.abs().max() > 0
    assert not _forward(trainer).any()


@pytest.mark.parametrize("given", GIVEN)
def test_what_is_exported_after_a_forward_are_main_weights(
    bridge: ModuleType, trainer: Trainer, given: str
) -> None:
    """Of tasks that are built for the export, or were before."""
    made = bridge.MegatronModelBridge()
    models = GIVEN[given](trainer.wrapper)
    wanted = trainer.wrapper.module.full_state_dict()
    _forward(trainer)
    tasks = made.build_conversion_tasks(None, models)
    for asked in ({}, {"conversion_tasks": tasks}, {"weight_dtype": torch.float32}):
        _forward(trainer)
        found = dict(made.stream_weights_megatron_to_hf(models, None, **asked))
        assert len(found) == len(tasks)
        for name, value in found.items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, wanted[name]), name


def test_between_exported_weights_the_model_may_be_saved(
    bridge: ModuleType, trainer: Trainer
) -> None:
    """Which shows sharded parameters; after an export that was given up they are shown too."""
    made = bridge.MegatronModelBridge()
    stream = made.stream_weights_megatron_to_hf([trainer.wrapper], None)
    for _ in range(3):
        assert not isinstance(next(stream)[1], DTensor)
        for value in trainer.wrapper.parameters():
            assert not isinstance(value, DTensor)
        trainer.wrapper.state_dict()
        for value in trainer.wrapper.parameters():
            assert isinstance(value, DTensor)
    stream.close()
    for value in trainer.wrapper.parameters():
        assert isinstance(value, DTensor)


def test_a_value_of_another_shape_is_an_error(bridge: ModuleType, trainer: Trainer) -> None:
    made = bridge.MegatronModelBridge()
    with pytest.raises(ValueError, match=r"parameter .*weight has shape .*, not \(3, 5\)"):
        made.load_weights_hf_to_megatron(lambda *_: torch.zeros(3, 5), [trainer.wrapper])
    assert "build_conversion_tasks" not in vars(made)


def test_weights_whose_memory_was_released_are_an_error(
    bridge: ModuleType, trainer: Trainer
) -> None:
    made = bridge.MegatronModelBridge()
    optimizer = trainer.optimizer
    tasks = made.build_conversion_tasks(None, [trainer.wrapper])
    release_memory(trainer.wrapper, optimizer)
    for use in (
        lambda: made.load_weights_hf_to_megatron(_zeros, [trainer.wrapper]),
        lambda: next(made.stream_weights_megatron_to_hf([trainer.wrapper], None, tasks)),
        lambda: made.materialize_adapter_weights([_Adapter(tasks[0], tasks[1])]),
    ):
        with pytest.raises(RuntimeError, match="return_memory"):
            use()
    return_memory(trainer.wrapper, optimizer)
    assert dict(made.stream_weights_megatron_to_hf([trainer.wrapper], None, tasks))


def test_adapters_are_made_whole(bridge: ModuleType, trainer: Trainer) -> None:
    params = list(trainer.wrapper.parameters())[:2]
    parts = [Task("adapter", param) for param in params]
    [found] = bridge.MegatronModelBridge().materialize_adapter_weights([_Adapter(*parts)])
    for part, param in zip((found.linear_in_task, found.linear_out_task), params, strict=True):
        assert type(part.param_weight) is torch.Tensor
        assert part.param_weight.shape == param.shape


def test_models_that_are_not_sharded_are_left_to_bridge(bridge: ModuleType) -> None:
    plain = torch.nn.Linear(2, 2)
    bridge.MegatronModelBridge().load_weights_hf_to_megatron(_zeros, [plain])
    assert not plain.weight.any()
    [weight, _] = bridge.MegatronModelBridge().build_conversion_tasks(None, [plain])
    assert weight.param_weight is plain.weight


def test_bytes_of_sharded_fp8_weights_are_not_exported(
    bridge: ModuleType, trainer: Trainer
) -> None:
    made = bridge.MegatronModelBridge()
    assert made.build_export_fp8_tasks(None, [torch.nn.Linear(2, 2)]) == "its own"
    with pytest.raises(RuntimeError, match="Leave it at 'bf16'"):
        made.build_export_fp8_tasks(None, [trainer.wrapper])


def test_both_wrappers_show_whether_gradients_are_decoupled(trainer: Trainer) -> None:
    """Megatron-Bridge's own tests look there."""
    wrapper = trainer.wrapper
    assert wrapper.module.param_and_grad_buffer is wrapper.param_and_grad_buffer
    assert wrapper.param_and_grad_buffer.use_decoupled_grad is False


def test_the_folder_of_a_load_is_what_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks that keep checkpoints elsewhere name the folder itself, and no iteration."""
    module = SimpleNamespace(get_checkpoint_name=lambda folder, step, release: f"{folder}/{step}")
    monkeypatch.setitem(sys.modules, BRIDGE, module)
    call = {"load_dir": "x", "iteration": None, "release": False, "ckpt_cfg": None}
    given = {**call, "checkpoint_path_override": "y/step"}
    assert checkpoint_drivers._of_bridge(given).folder == Path("y/step")
    assert checkpoint_drivers._of_bridge({**call, "iteration": 3}).folder == Path("x/3")
