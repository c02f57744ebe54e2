"""Options and calls of core that would change weights or gradients without a word: each works, or
is one early error. Those that a row of a table tells are in test_options.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import muon
from megatron.core.pipeline_parallel import fine_grained_activation_offload
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import experts
from torch import nn

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.lib.gpt.gpt import build_trainer, forward_backward, optimizer_config
from tests.lib.gpt.one_layer import CASE, DEVICE, data, wrapped

CHECKS = (
    "megatron/wrapper/problems.py",
    "megatron/optimizer/emerging.py",
    "megatron/layers/fused_wgrad.py",
)

# Experts in one tensor.


class GroupedMLP(nn.Module):
    """Stands for core's of up to 0.17."""

    def __init__(self, num_local_experts: int, config: Any, groups: Any) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(config.hidden_size, num_local_experts * 8))


def test_experts_in_one_tensor_are_refused_however_they_were_asked_for(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Core takes this class for `moe_grouped_gemm` with its own layers, whatever else is set. From
    0.18 on it has none, and a class of that name is a user's."""
    available = SimpleNamespace(assert_grouped_gemm_is_available=lambda: None)
    monkeypatch.setattr(experts, "gg", available, raising=False)

    def change(model: Any) -> None:
        model.config.moe_ffn_hidden_size = 8
        model.config.moe_latent_size = None
        groups = ProcessGroupCollection.use_mpu_process_groups()
        cls = getattr(experts, "GroupedMLP", GroupedMLP)
        model.decoder.layers[0].mlp = cls(2, model.config, groups)

    with pytest.raises(ValueError, match=r"module decoder\.layers\.0\.mlp .*one tensor.*moe_group"):
        wrapped("no_shard", CASE.but(bias=False), change)


# Optimizers that need whole matrices, or move weights.


def test_core_makes_no_muon_on_shards(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 0.17 it has a function of its own, and calls itself 'adam'."""
    if not hasattr(muon, "TensorParallelMuon"):
        pytest.skip("this release makes Muon as other optimizers, see the next test")
    made: list[Any] = []
    monkeypatch.setattr(muon, "HAVE_EMERGING_OPTIMIZERS", True)
    monkeypatch.setattr(muon, "TensorParallelMuon", lambda *args, **kwargs: made.append(args))
    wrapper = build_trainer(CASE, "optim_grads_params", one_rank).wrapper
    config = optimizer_config(CASE, use_distributed_optimizer=False, optimizer="muon")
    with pytest.raises(ValueError, match=r"get_megatron_muon_optimizer needs whole matrices"):
        muon.get_megatron_muon_optimizer(config, [wrapper], use_gloo_process_groups=False)
    assert not made


@pytest.mark.parametrize("name", ["dist_muon", "soap"])
def test_core_asks_for_parameter_groups_of_every_optimizer_where_others_are_refused(
    one_rank: torch.device, name: str
) -> None:
    """From 0.18 on all of them begin with this function, and some with no other that we replace."""
    trainers = [build_trainer(CASE, strategy, one_rank) for strategy in ("optim", None)]
    config = optimizer_config(CASE)
    config.optimizer = name
    ours, stock = (trainer.wrapper for trainer in trainers)
    with pytest.raises(ValueError, match=rf"optimizer='{name}'.*sharded weights support"):
        core_optimizer._get_param_groups([ours], config, None)
    config.optimizer = "adam"
    assert core_optimizer._get_param_groups([stock], config, None)


# Gradient hooks of a user on fused weights.


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_hook_on_a_fused_weight_is_refused_by_name_and_gets_the_gradient_without_fusion(
    one_rank: torch.device, kind: str, strategy: str
) -> None:
    """The fused module writes past autograd: the hook would have been called with None."""
    patches.install(FUSED_WGRAD)
    seen: list[Any] = []
    name = "decoder.layers.0.mlp.linear_fc1.weight"

    def hook(model: Any) -> None:
        getattr(model.get_parameter(name), kind)(
            lambda value: seen.append((value.grad if "accumulate" in kind else value).clone())
        )

    with pytest.raises(ValueError, match=f"parameter {name}: it has a gradient hook"):
        wrapped(strategy, CASE.but(fused=True), hook)
    trainer = build_trainer(CASE.but(microbatches=1), strategy, DEVICE, hook)
    forward_backward(trainer, data()[:1])
    [gradient] = seen
    assert gradient.shape == (CASE.ffn, CASE.hidden)
    assert gradient.abs().sum() > 0


def test_a_hook_on_a_weight_that_no_module_writes_stays(one_rank: torch.device) -> None:
    patches.install(FUSED_WGRAD)
    wrapped(
        "optim",
        CASE.but(fused=True),
        lambda model: model.decoder.final_layernorm.weight.register_hook(lambda value: value),
    )


# Options of activation offload.


def test_offload_of_layers_is_accepted_where_core_has_it(one_rank: torch.device) -> None:
    for weights in (False, True):
        options = {
            "cpu_offloading": True,
            "cpu_offloading_num_layers": 1,
            "cpu_offloading_weights": weights,
            "cpu_offloading_double_buffering": True,
        }
        wrapped(change=lambda model, options=options: vars(model.config).update(options))


def test_core_asks_us_of_each_tensor(one_rank: torch.device) -> None:
    """Of a view of a gathered weight as well, whatever its size."""
    wrapper = wrapped()
    wrapper.engine.sync_weights(wait=True)
    weight = wrapper.module.module.output_layer.weight
    handler = fine_grained_activation_offload.ChunkOffloadHandler
    asked = SimpleNamespace(
        min_offloaded_tensor_size=1, _can_manage_tensor_for_offload=lambda tensor: True
    )
    for tensor, goes in (
        (weight.detach().t(), False),
        (weight.view(-1), False),
        (torch.ones(3), True),
    ):
        assert handler.tensor_need_offloading_checker(asked, tensor) is goes
