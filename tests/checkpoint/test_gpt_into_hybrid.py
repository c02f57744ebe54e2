"""A GPT checkpoint is loaded into a hybrid model with weights, moments, counts and options.

Around a stand-in for Megatron-LM's reader. Its own scripts:
`tests/integration/test_megatron_lm.py`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from torch import nn
from torch.distributed import checkpoint as dcp

from megatron_fsdp_adapter.checkpoint import training_state
from megatron_fsdp_adapter.tools.models.local_spec import TorchNorm
from tests.lib.checkpoint import drivers
from tests.lib.checkpoint.drivers import asked_state
from tests.lib.gpt import gpt

CHECKS = ("megatron/checkpoint/gpt_into_hybrid.py",)

INTEROP = "megatron.core.dist_checkpointing.gpt_checkpoint_interop"
HAS_INTEROP = importlib.util.find_spec(INTEROP) is not None
pytestmark = pytest.mark.skipif(not HAS_INTEROP, reason="this megatron-core does not do it")

CASE = gpt.Case(
    hidden=12, heads=2, ffn=20, vocab=23, swiglu=True, bias=False, microbatches=1, bf16=True
)
PATTERN = "*-*-"

driver = drivers.driver


def maps_of(pattern: str) -> Any:
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import gpt_compatible_layer_maps

    return gpt_compatible_layer_maps(pattern)


def hybrid_model(case: gpt.Case, device: torch.device) -> nn.Module:
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from tests.lib.gpt.hybrid_stack import stack_of

    torch.manual_seed(case.seed)
    config = gpt.model_config(case)
    config.num_layers = len(PATTERN)
    with mock.patch.object(hybrid_block, "TENorm", TorchNorm):
        model = HybridModel(
            config,
            stack_of(lambda _: gpt.get_gpt_layer_local_spec()),
            vocab_size=case.vocab,
            max_sequence_length=case.seq,
            hybrid_layer_pattern=PATTERN,
            position_embedding_type=case.positions,
        )
    return Float16Module(config, model.to(device))


def in_gpt(name: str) -> str:
    """The name of a hybrid model's parameter in a GPT."""
    for number in range(len(PATTERN)):
        name = name.replace(f"layers.{number}.", f"layers<{number // 2}>.")
    name = name.replace("layers<", "layers.").replace(">.", ".")
    return name.replace("final_norm", "final_layernorm")


def load_as_hybrid(driver: ModuleType, folder: Path, trainer: gpt.Trainer) -> Any:
    args = SimpleNamespace(strict_fsdp_dtensor_load=True)
    state = asked_state(trainer)
    return driver._load_base_checkpoint(
        str(folder), args, sharded_state_dict=state, gpt_compat_layer_maps=maps_of(PATTERN)
    )[0]


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_all_of_a_gpt_is_loaded(
    device: torch.device,
    driver: ModuleType,
    tmp_path: Path,
    strategy: str,
) -> None:
    source = gpt.build_trainer(CASE, "optim_grads_params", device)
    gpt.train_step(source, gpt.batches(CASE, 0, 0, device))
    for group in source.optimizer.param_groups:
        group["lr"] = 0.25
    dcp.save(training_state([source.wrapper], source.optimizer), checkpoint_id=tmp_path / "gpt")

    other = gpt.make_trainer(hybrid_model(CASE, device), CASE, strategy)
    data = gpt.batches(CASE, 1, 0, device)
    gpt.run_passes(other, data, forward_only=True)  # compute weights are gathered
    inner = other.wrapper.module
    with mock.patch.object(inner, "load_state_dict", wraps=inner.load_state_dict) as loads:
        state = load_as_hybrid(driver, tmp_path / "gpt", other)
    loads.assert_called_once()  # it sets scales
    evaluated = [gpt.run_passes(each, data, forward_only=True) for each in (source, other)]
    assert evaluated[0] == evaluated[1]
    other.optimizer.load_state_dict(state["optimizer"])

    weights = gpt.full_weights(source)
    found = gpt.full_weights(other)
    assert {in_gpt(name) for name in found} == set(weights)
    assert all(torch.equal(value, weights[in_gpt(name)]) for name, value in found.items())
    assert {group["lr"] for group in other.optimizer.param_groups} == {0.25}
    moments = gpt.full_all(moments_of(source))
    of_other = gpt.full_all(moments_of(other))
    assert {in_gpt(name) for name in of_other} == set(moments)
    assert all(torch.equal(value, moments[in_gpt(name)]) for name, value in of_other.items())
    for each in (source, other):  # counts and compute weights, too: the next step is the same
        gpt.set_rates(each.optimizer, CASE)
    losses = [gpt.train_step(each, data) for each in (source, other)]
    assert losses[0] == losses[1]
    after = gpt.full_weights(source)
    for name, value in gpt.full_weights(other).items():
        assert torch.equal(value, after[in_gpt(name)]), name


def moments_of(trainer: gpt.Trainer) -> dict[str, Any]:
    state = training_state([trainer.wrapper], trainer.optimizer)["optimizer"]["state"]
    found = {}
    for name, kinds in state.items():
        for kind, value in kinds.items():
            found[f"{name}.{kind}"] = value
    return found


def test_layers_without_counterpart_get_the_options_of_their_group() -> None:
    """They keep their weights and moments."""
    from megatron_fsdp_adapter.megatron.checkpoint.gpt_into_hybrid import as_own, as_stored

    names = ("decoder.layers.0.mixer.D", "decoder.layers.1.self_attention.linear_proj.weight")
    fresh, loaded = names
    wanted = {
        "_model": [],
        "model": {name: f"own {name}" for name in names},
        "optimizer": {
            "state": {name: {"exp_avg": f"own {name}"} for name in names},
            "param_to_group_meta": {name: {"lr": 1.0, "step": 0} for name in names},
        },
    }
    maps = maps_of("M*-")
    asked = as_stored(wanted, maps)
    in_checkpoint = "decoder.layers.0.self_attention.linear_proj.weight"
    assert list(asked["model"]) == list(asked["optimizer"]["state"]) == [in_checkpoint]
    read = {
        "model": {in_checkpoint: "read"},
        "optimizer": {
            "state": {in_checkpoint: {"exp_avg": "read"}},
            "param_to_group_meta": {in_checkpoint: {"lr": 2.0, "step": 7}},
        },
    }
    found = as_own(read, wanted, maps)
    assert found["model"] == {fresh: f"own {fresh}", loaded: "read"}
    assert found["optimizer"]["state"] == {
        fresh: {"exp_avg": f"own {fresh}"},
        loaded: {"exp_avg": "read"},
    }
    options = {"lr": 2.0, "step": 7}
    assert found["optimizer"]["param_to_group_meta"] == {fresh: options, loaded: options}
