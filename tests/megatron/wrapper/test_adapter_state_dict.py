"""State dicts of the wrapper and of what is below it. One rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.core.dtensor.uneven import chunks_of
from tests.lib.gpt.gpt import Trainer, build_trainer, forward_backward, train_step
from tests.lib.gpt.one_layer import CASE, DEVICE, data, wrapped

CHECKS = ("megatron/inner_module.py", "state/sharded_state_dict.py", "state/model_state.py")

pytestmark = pytest.mark.usefixtures("one_rank")


def values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The full values of a state dict on one rank, copied."""
    found = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[key] = getattr(value, "_local_tensor", value).clone()
    return found


def evaluation_loss(trainer: Trainer) -> float:
    with torch.no_grad():
        return forward_backward(trainer, data(77), forward_only=True)


@pytest.mark.parametrize("bf16", (False, True))
def test_keys_and_names(bf16: bool) -> None:
    """Megatron joins state-dict keys to parameter names by these depths."""
    wrapper = wrapped(case=CASE.but(bf16=bf16))
    inner = wrapper.module
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    assert f"module.{name}" in inner.state_dict()
    plain = [key for key in wrapper.state_dict() if not key.endswith("_extra_state")]
    assert list(inner.state_dict_for_save_checkpoint()) == plain
    assert f"before.module.{name}" in inner.state_dict(prefix="before.")
    level = "module.module." if bf16 else "module."
    assert f"module.{level}{name}" in dict(wrapper.named_parameters())
    param = inner.get_parameter(f"{level}{name}")
    assert param is dict(wrapper.named_parameters())[f"module.{level}{name}"]
    assert isinstance(inner.module, Float16Module) == bf16


def test_values_are_dtensors_over_the_main_weights(trainer: Trainer) -> None:
    """Those of the moment (trap C2: a state dict made at construction was saved for the rest of the
    run). A load in place writes through them; they know their place in a checkpoint."""
    train_step(trainer, data())
    state = trainer.wrapper.state_dict()
    params = dict(trainer.wrapper.module.named_parameters())
    for name, param in params.items():
        value = state[name]
        assert isinstance(value, DTensor)
        assert not isinstance(value, nn.Parameter)
        assert value._local_tensor.data_ptr() == param._local_tensor.data_ptr()
        assert chunks_of(value) is not None, name
    kept = trainer.wrapper.state_dict(keep_vars=True)
    assert all(kept[name] is param for name, param in params.items())


def test_state_dict_of_any_module_below_shows_optimizer_parameters(trainer: Trainer) -> None:
    """Trap C1: with a hook on the wrapper only, a submodule's held raw weights, resharded."""
    forward_backward(trainer, data())
    model = get_attr_wrapped_model(trainer.wrapper, "decoder", return_model_obj=True)
    for module in (model, model.decoder, model.decoder.layers[0].mlp.linear_fc1):
        trainer.wrapper.start_param_sync()
        state = module.state_dict()
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        assert tensors
        for value in tensors:
            assert isinstance(value, DTensor)


DEPTHS: dict[str, Callable[[str], str]] = {
    "as saved": lambda key: key,
    "one level shorter": lambda key: key.removeprefix("module."),
    "one level longer": lambda key: f"module.{key}",
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("level", "full"), [("wrapper", False), ("inner", True)])
def test_load(trainer: Trainer, depth: str, level: str, full: bool) -> None:
    """Both levels take keys one "module." off (trap C10: they were silently lost), DTensors and
    whole plain tensors, and refresh the compute weights (trap C9: the first step was taken with
    random weights)."""
    source = build_trainer(CASE.but(seed=99), trainer.strategy, DEVICE)
    train_step(source, data())
    expected, loss = values(source.wrapper.state_dict()), evaluation_loss(source)
    state = source.wrapper.state_dict()
    given = {DEPTHS[depth](key): value for key, value in state.items()}
    if full:
        given = {key: getattr(value, "_local_tensor", value) for key, value in given.items()}
    trainer.wrapper.start_param_sync()
    if level == "wrapper":
        assert trainer.wrapper.load_state_dict(given) is None
    else:
        trainer.wrapper.module.load_state_dict(given)
    found = values(trainer.wrapper.state_dict())
    for key in expected:
        assert torch.equal(found[key], expected[key])
    assert evaluation_loss(trainer) == loss
    assert train_step(trainer, data(1))[0] == train_step(source, data(1))[0]


BAD_STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (
        lambda state: state.pop("module.output_layer.weight"),
        "missing: module.output_layer.weight",
    ),
    "unexpected": (
        lambda state: state.update({"module.other": torch.ones(1)}),
        "unexpected: module.other",
    ),
    "another shape": (
        lambda state: state.update({"module.output_layer.weight": torch.ones(3, 2)}),
        r"module.output_layer.weight: shape \(3, 2\), expected \(23, 12\)",
    ),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_bad_state_is_refused_before_anything_is_written(trainer: Trainer, name: str) -> None:
    spoil, message = BAD_STATES[name]
    before = values(trainer.wrapper.state_dict())
    state = {key: value + 1 for key, value in before.items()}
    spoil(state)
    with pytest.raises(ValueError, match=message):
        trainer.wrapper.load_state_dict(state)
    after = values(trainer.wrapper.state_dict())
    for key in before:
        assert torch.equal(after[key], before[key])


def test_load_by_assignment_is_refused(trainer: Trainer) -> None:
    """Trap I6: it would detach the sharded parameters."""
    state = trainer.wrapper.module.state_dict()
    with pytest.raises(ValueError, match=r"assign=True.*Use assign=False"):
        trainer.wrapper.module.load_state_dict(state, assign=True)


def test_other_checkpoint_formats_are_refused(trainer: Trainer) -> None:
    """`sharded_state_dict` is for torch_dist."""
    for module in (trainer.wrapper, trainer.wrapper.module):
        with pytest.raises(RuntimeError, match="ckpt_format='fsdp_dtensor'"):
            module.sharded_state_dict()


@pytest.mark.parametrize("bf16", (False, True))
def test_buffers_are_loaded_whatever_levels_are_between(bf16: bool) -> None:
    """Plain tensors of the state. A Float16Module is a level in the tree of modules and none in
    keys. No key is reported as missing or unexpected."""

    def change(model: Any) -> None:
        layer = (model.module if bf16 else model).decoder.layers[0]
        layer.register_buffer("persistent", torch.zeros(3))

    inner = wrapped("optim", CASE.but(bf16=bf16), change).module
    key = "module.decoder.layers.0.persistent"
    before = inner.state_dict()
    given = {}
    for k, v in values(before).items():
        given[k] = v.view(before[k].shape)
    result = inner.load_state_dict({**given, key: torch.ones(3)})
    assert torch.equal(inner.state_dict()[key], torch.ones(3))
    assert not result.missing_keys, result
    assert not result.unexpected_keys, result
