"""What is wrapped of Megatron-Bridge's conversion, around a stand-in for its four methods.

The code itself, unmodified, is run by `tests/integration/test_bridge_conversion.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.launch import installation
from megatron_fsdp_adapter.megatron.checkpoint import bridge_weights, checkpoint_drivers
from tests.distributed.gpt import Case, Trainer, build_trainer, init_megatron

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, swiglu=True)


@dataclass(frozen=True)
class _Part:
    param_weight: Any
    mapping: Any


@dataclass(frozen=True)
class _Task:
    linear_in_task: Any
    linear_out_task: Any
    requires_expert_splits: bool = False
    global_base_prefix: str = "decoder.layers.0.mlp"


class Adapters:
    def materialize_adapter_weights(self, adapter_tasks: Any) -> Any:
        return adapter_tasks


class MegatronModelBridge(Adapters):
    """As the real one: it takes what the modules hold, and writes into DTensors' local rows."""

    def load_weights_hf_to_megatron(self, hf_pretrained: Any, megatron_model: Any) -> Any:
        for _, _, param in self.build_conversion_tasks(hf_pretrained, megatron_model):
            assert isinstance(param, DTensor)
            param._local_tensor.fill_(hf_pretrained)

    def build_conversion_tasks(self, hf_pretrained: Any, megatron_model: Any) -> Any:
        return [(model, n, p) for model in megatron_model for n, p in model.named_parameters()]

    def stream_weights_megatron_to_hf(self, megatron_model: Any, hf_pretrained: Any) -> Any:
        for _, name, param in self.build_conversion_tasks(hf_pretrained, megatron_model):
            yield name, type(param)


@pytest.fixture
def bridge() -> Iterator[ModuleType]:
    module = ModuleType(bridge_weights.MODULE)
    module.MegatronModelBridge = type("Bridge", (MegatronModelBridge,), {})
    for name in ("load_weights_hf_to_megatron", "build_conversion_tasks",
                 "stream_weights_megatron_to_hf"):  # fmt: skip
        setattr(module.MegatronModelBridge, name, getattr(MegatronModelBridge, name))
    module.DTensor = DTensor
    before = sys.modules.get(bridge_weights.MODULE)
    sys.modules[bridge_weights.MODULE] = module
    bridge_weights.install()
    yield module
    bridge_weights.uninstall()
    sys.modules.pop(bridge_weights.MODULE)
    if before is not None:
        sys.modules[bridge_weights.MODULE] = before


@pytest.fixture(params=("optim_grads_params", "optim"))
def trainer(one_rank: None, request: Any) -> Iterator[Trainer]:
    yield build_trainer(CASE, request.param, init_megatron())
    parallel_state.destroy_model_parallel()


def _forward(trainer: Trainer) -> torch.Tensor:
    tokens = torch.arange(CASE.seq)[None] % CASE.vocab
    with torch.no_grad():
        return trainer.wrapper(tokens, torch.arange(CASE.seq)[None], None)


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
    bridge.MegatronModelBridge().load_weights_hf_to_megatron(0.0, GIVEN[given](trainer.wrapper))
    assert before.abs().max() > 0 and not _forward(trainer).any()


@pytest.mark.parametrize("given", GIVEN)
def test_what_is_exported_after_a_forward_are_main_weights(
    bridge: ModuleType, trainer: Trainer, given: str
) -> None:
    _forward(trainer)
    made = bridge.MegatronModelBridge()
    tasks = made.build_conversion_tasks(None, GIVEN[given](trainer.wrapper))
    assert tasks and all(isinstance(param, DTensor) for *_, param in tasks)
    _forward(trainer)
    found = list(made.stream_weights_megatron_to_hf(GIVEN[given](trainer.wrapper), None))
    assert found and all(issubclass(kind, DTensor) for _, kind in found)


def test_adapters_are_made_whole(bridge: ModuleType, trainer: Trainer) -> None:
    trainer.wrapper.engine.show_optimizer_params()
    params = list(trainer.wrapper.parameters())[:2]
    parts = [_Part(param, SimpleNamespace(tp_size=1)) for param in params]
    [found] = bridge.MegatronModelBridge().materialize_adapter_weights([_Task(*parts)])
    for part, param in zip((found.linear_in_task, found.linear_out_task), params, strict=True):
        assert type(part.param_weight) is torch.Tensor and part.param_weight.shape == param.shape


def test_adapters_of_split_experts_are_refused(bridge: ModuleType, trainer: Trainer) -> None:
    trainer.wrapper.engine.show_optimizer_params()
    part = _Part(next(iter(trainer.wrapper.parameters())), SimpleNamespace(tp_size=2))
    with pytest.raises(RuntimeError, match="expert_tensor_parallel_size=1"):
        bridge.MegatronModelBridge().materialize_adapter_weights([_Task(part, part, True)])


def test_a_release_that_knows_no_sharded_weights_is_an_error(
    bridge: ModuleType, trainer: Trainer
) -> None:
    del bridge.DTensor
    with pytest.raises(RuntimeError, match=r"does not know sharded weights, which 0\.6"):
        bridge.MegatronModelBridge().load_weights_hf_to_megatron(0.0, [trainer.wrapper])
    plain = torch.nn.Linear(2, 2)
    assert bridge.MegatronModelBridge().build_conversion_tasks(None, [plain])


def test_uninstall_gives_the_methods_back(bridge: ModuleType) -> None:
    owner = bridge.MegatronModelBridge
    assert owner.build_conversion_tasks is not MegatronModelBridge.build_conversion_tasks
    bridge_weights.uninstall()
    for name in bridge_weights._WRAPPERS:
        assert getattr(owner, name) is getattr(MegatronModelBridge, name)
    assert "materialize_adapter_weights" not in vars(owner)


def test_a_bridge_without_one_of_the_methods_is_an_error(bridge: ModuleType) -> None:
    bridge_weights.uninstall()
    del bridge.MegatronModelBridge.build_conversion_tasks
    bridge.MegatronModelBridge.__bases__ = (Adapters,)
    with pytest.raises(RuntimeError, match=r"MegatronModelBridge\.build_conversion_tasks"):
        installation.install()


def test_both_wrappers_show_whether_gradients_are_decoupled(trainer: Trainer) -> None:
    """Megatron-Bridge's own tests look there."""
    wrapper = trainer.wrapper
    assert wrapper.module.param_and_grad_buffer is wrapper.param_and_grad_buffer
    assert wrapper.param_and_grad_buffer.use_decoupled_grad is False


def test_the_folder_of_a_load_is_what_overrides_it() -> None:
    """Frameworks that keep checkpoints elsewhere name the folder itself, and no iteration."""
    module = SimpleNamespace(get_checkpoint_name=lambda folder, step, release: f"{folder}/{step}")
    call = {"load_dir": "x", "iteration": None, "release": False}
    assert checkpoint_drivers._bridge_folder(
        module, {**call, "checkpoint_path_override": "y/step"}
    ) == "y/step"  # fmt: skip
    assert checkpoint_drivers._bridge_folder(module, {**call, "iteration": 3}) == "x/3"
