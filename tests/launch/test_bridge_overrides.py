"""apply_fsdp_overrides sets a recipe right, says so, and refuses what it cannot set right."""

from __future__ import annotations

import importlib.util
import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from megatron_fsdp_adapter import apply_fsdp_overrides
from megatron_fsdp_adapter.launch import installation
from megatron_fsdp_adapter.megatron.options import validation
from tests.lib.megatron.launch_cases import recipe

CHECKS = ("launch/bridge.py", "megatron/options/validation.py")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_is_installed() -> Any:
    """These tests are of the recipe; tests/integration is of the names."""
    with mock.patch.object(installation, "install") as install:
        yield install


def test_a_recipe_is_set_right(nothing_is_installed: mock.Mock, capsys: Any) -> None:
    cfg = recipe()
    environment = dict[str, str]()
    changes = apply_fsdp_overrides(cfg, environment=environment)
    assert cfg.dist.use_megatron_fsdp
    assert cfg.ddp.use_megatron_fsdp
    assert cfg.ddp.data_parallel_sharding_strategy == "optim_grads_params"
    assert cfg.checkpoint.ckpt_format == "fsdp_dtensor"
    assert not cfg.ddp.average_in_collective
    assert cfg.model.gradient_accumulation_fusion, "Bridge switches it off where it does not allow"
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert validation.bridge_problems(cfg, environment) == []
    printed = capsys.readouterr().out
    assert printed.startswith("apply_fsdp_overrides sets\n")
    for change in changes:
        assert f"  {change.option} " in printed
    assert len(changes) == 6
    nothing_is_installed.assert_called_once_with()
    assert apply_fsdp_overrides(cfg, environment=environment) == [], "a second time sets nothing"


BF16_REDUCTION = {
    "ddp.megatron_fsdp_grad_comm_dtype": torch.bfloat16,
    "ddp.grad_reduce_in_fp32": False,
    # Mixed precision would set it again when training starts.
    "mixed_precision.grad_reduce_in_fp32": False,
}
SET: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "as asked for": (
        {},
        {
            "strategy": "optim_grads",
            "outer_strategy": "optim",
            "num_optimizer_instances": 2,
            "expert_strategy": "optim",
            "expert_outer_strategy": "no_shard",
            "num_expert_optimizer_instances": 1,
            "grad_comm_dtype": torch.bfloat16,
        },
        {
            "ddp.data_parallel_sharding_strategy": "optim_grads",
            "ddp.outer_dp_sharding_strategy": "optim",
            "ddp.num_distributed_optimizer_instances": 2,
            "ddp.expert_data_parallel_sharding_strategy": "optim",
            "ddp.expert_outer_dp_sharding_strategy": "no_shard",
            "ddp.expert_num_distributed_optimizer_instances": 1,
            **BF16_REDUCTION,
        },
        "",
    ),
    "core's offload of the optimizer is ours": (
        {"optimizer__optimizer_cpu_offload": True, "optimizer__optimizer_offload_fraction": 1.0},
        {},
        {"ddp.chunked_optimizer_state_offload": True, "optimizer.optimizer_cpu_offload": False},
        "optimizer.optimizer_cpu_offload",
    ),
    # Megatron-Bridge would switch the distributed optimizer off, and refuse clipping and saves.
    "version 2 of Megatron's wrapper": (
        {"ddp__megatron_fsdp_version": 2},
        {},
        {"ddp.megatron_fsdp_version": 1, "ddp.use_distributed_optimizer": True},
        "ddp.megatron_fsdp_version",
    ),
    # As some of Megatron-Bridge's own recipes: the wire dtype is set, and float32 left on.
    "a recipe that reduces in bf16 itself": (
        {"ddp__megatron_fsdp_grad_comm_dtype": torch.bfloat16},
        {},
        BF16_REDUCTION,
        "mixed_precision.grad_reduce_in_fp32",
    ),
    # One of the two switches is completed.
    **{
        f"{one}.use_megatron_fsdp": (
            {f"{one}__use_megatron_fsdp": True},
            {},
            {"dist.use_megatron_fsdp": True, "ddp.use_megatron_fsdp": True},
            f"{other}.use_megatron_fsdp",
        )
        for one, other in (("dist", "ddp"), ("ddp", "dist"))
    },
}
"""What a recipe has, what is asked for, what the recipe has then, and what is printed."""


@pytest.mark.parametrize("name", SET)
def test_options_are_set_and_told(name: str, capsys: Any) -> None:
    changed, asked, expected, printed = SET[name]
    cfg = recipe(**changed)
    apply_fsdp_overrides(cfg, **asked, environment={})
    assert {path: operator.attrgetter(path)(cfg) for path in expected} == expected
    assert printed in capsys.readouterr().out


_ZERO3 = {
    "ddp__use_megatron_fsdp": True, "ddp__data_parallel_sharding_strategy": "optim_grads_params",
    "ddp__average_in_collective": False, "ddp__keep_fp8_transpose_cache": False,
    "model__init_model_with_meta_device": True, "checkpoint__ckpt_format": "fsdp_dtensor",
}  # fmt: skip
RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "llama3 70B, llama3.1 405B (9 recipes)": (
        {**_ZERO3, "ddp__fsdp_double_buffer": True,
         "ddp__suggested_communication_unit_size": 800_000_000,
         "model__gradient_accumulation_fusion": False, "model__cpu_offloading": True,
         "model__cpu_offloading_weights": False, "model__cpu_offloading_num_layers": 20}, ""),
    "qwen35_vl 35B A3B, 2 H100": (
        {**_ZERO3, "ddp__average_in_collective": True, "ddp__fsdp_double_buffer": True,
         "ddp__megatron_fsdp_max_pool_double_buffer": True,
         "ddp__fsdp_db_use_persist_buf_on_alloc_fail": True, "ddp__check_for_nan_in_grad": True,
         "model__expert_model_parallel_size": 2, "model__num_moe_experts": 4,
         "model__mtp_num_layers": 1, "model__recompute_granularity": "full",
         "model__cuda_graph_impl": "none", "model__cuda_graph_scope": "full"}, ""),
    "deepseek_v3": (
        {**_ZERO3, "model__expert_model_parallel_size": 64, "model__num_moe_experts": 256,
         "model__moe_token_dispatcher_type": "flex", "model__fine_grained_activation_offloading":
         True, "model__recompute_modules": ["layernorm", "mla_up_proj", "moe_act"],
         "model__recompute_granularity": "selective", "model__cuda_graph_scope": []}, ""),
    "nemotron_3_ultra, HSDP": (
        {**_ZERO3, "ddp__num_distributed_optimizer_instances": 2,
         "ddp__outer_dp_sharding_strategy": "optim",
         "ddp__megatron_fsdp_grad_comm_dtype": torch.bfloat16,
         "ddp__megatron_fsdp_main_params_dtype": torch.float32,
         "ddp__megatron_fsdp_main_grads_dtype": torch.bfloat16,
         "model__gradient_accumulation_fusion": False}, ""),
    "nemotron_3_5_lightning, MXFP8": (
        {**_ZERO3, "model__cuda_graph_impl": "none", "model__fp8": "e4m3",
         "model__fp8_recipe": "mxfp8"}, ""),
    "nemotron_3_5_lightning, 8k": (
        {**_ZERO3, "ddp__check_for_large_grads": True,
         "ddp__megatron_fsdp_grad_comm_dtype": torch.bfloat16,
         "ddp__megatron_fsdp_main_grads_dtype": torch.float32}, "ddp.check_for_large_grads"),
}  # fmt: skip
"""The recipes of Megatron-Bridge main, of 22 August 2026, that set `use_megatron_fsdp`: what they
set of what is read here, and the option that is refused, if any."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_with_megatron_fsdp_are_accepted_or_refused_with_a_reason(name: str) -> None:
    changed, refused = RECIPES[name]
    cfg = recipe(**changed)
    if not refused:
        apply_fsdp_overrides(cfg, outer_strategy=cfg.ddp.outer_dp_sharding_strategy, environment={})
        return
    with pytest.raises(ValueError, match=f"  - {refused}=True: .*Set it to False") as caught:
        apply_fsdp_overrides(cfg, environment={})
    assert str(caught.value).count("\n  - ") == 1


BREAKING: dict[str, dict[str, Any]] = {
    "dist.use_torch_fsdp2": {"dist__use_torch_fsdp2": True},
    "dist.use_tp_pp_dp_mapping": {"dist__use_tp_pp_dp_mapping": True},
    "dist.use_decentralized_pg": {"dist__use_decentralized_pg": True},
    "checkpoint.async_save": {"checkpoint__async_save": True},
    "model.init_model_with_meta_device": {
        "peft": "lora", "model__init_model_with_meta_device": True
    },
    "checkpoint.also_save_hf_checkpoint": {"checkpoint__also_save_hf_checkpoint": True},
    "train.check_weight_hash_across_dp_replicas_interval": {
        "train__check_weight_hash_across_dp_replicas_interval": 5
    },
    "model.moe_mlp_glu_interleave_size": {"model__moe_mlp_glu_interleave_size": 32},
    "model.moe_shared_expert_glu_interleave_size": {
        "model__moe_shared_expert_glu_interleave_size": 32
    },
    "model.cpu_offloading": {
        "model__cpu_offloading": True, "model__recompute_granularity": "full"
    },
    "model.fp4_recipe": {"model__fp4": "e2m1", "model__fp4_recipe": "custom"},
    "optimizer.optimizer": {"optimizer__optimizer": "muon"},
    "optimizer.optimizer_offload_fraction": {
        "optimizer__optimizer_cpu_offload": True, "optimizer__optimizer_offload_fraction": 0.0
    },
    "comm_overlap.defer_embedding_wgrad_compute": {
        "comm_overlap": SimpleNamespace(defer_embedding_wgrad_compute=True)
    },
}  # fmt: skip
SET_RIGHT = {"dist.use_megatron_fsdp", "checkpoint.ckpt_format"}


@pytest.mark.parametrize("option", BREAKING)
def test_what_cannot_be_set_right_is_named(option: str, nothing_is_installed: mock.Mock) -> None:
    with pytest.raises(ValueError, match=f"  - {option}="):
        apply_fsdp_overrides(recipe(**BREAKING[option]), environment={})
    nothing_is_installed.assert_not_called()


FROM_0_6 = {"checkpoint__async_strategy": "nvrx"}
ASYNC = {**FROM_0_6, "checkpoint__async_save": True}
BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
LATER: dict[str, tuple[dict[str, Any], str]] = {
    # From 0.6 on, by an option; asynchronous saves need a package, and a folder.
    "asynchronous": ({**ASYNC, "checkpoint__save": "folder"}, ""),
    "without the package": (
        {**ASYNC, "checkpoint__save": "folder", "is_installed": None}, "nvidia_resiliency_ext"),
    "at an address": ({**ASYNC, "checkpoint__save": "msc://bucket"}, "rename"),
    "groups of its own": ({**FROM_0_6, "dist__use_decentralized_pg": True}, ""),
    # As mixed precision leaves them when training starts.
    "quantized weights": (
        {"model__fp8": "e4m3", "model__fp8_recipe": "mxfp8", "model__fp8_param": True,
         "ddp__fp8_param_gather": True, f"ddp__{BUFFER}": True, f"optimizer__{BUFFER}": True}, ""),
}  # fmt: skip
"""Recipes that are accepted, or what is wrong with them."""


@pytest.mark.parametrize("name", LATER)
def test_what_later_releases_have_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer that MXFP8 weights share with gradients elsewhere is not asked for any more."""
    changed, wrong = LATER[name]
    cfg = recipe(**changed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: changed.get("is_installed", True))
    if wrong:
        with pytest.raises(ValueError, match=f"  - checkpoint.async_save=True: .*{wrong}"):
            apply_fsdp_overrides(cfg, environment={})
    else:
        apply_fsdp_overrides(cfg, environment={})
        assert not getattr(cfg.ddp, BUFFER)
        assert not getattr(cfg.optimizer, BUFFER)
        kept = getattr(cfg.ddp, "fp8_param_gather", False)
        assert kept is (name == "quantized weights")


@pytest.mark.parametrize("file", ("config.json", ".metadata", "iter_0000001/metadata.json"))
def test_adapters_may_start_from_a_folder_of_any_format(tmp_path: Path, file: str) -> None:
    """Hugging Face's, sharded weights, Megatron's own, which is refused without adapters."""
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    changed = {"checkpoint__pretrained_checkpoint": str(tmp_path)}
    apply_fsdp_overrides(recipe(peft="lora", **changed), environment={})
    if path.name == "metadata.json":
        with pytest.raises(ValueError, match=r"checkpoint\.pretrained_checkpoint=.*Convert it"):
            apply_fsdp_overrides(recipe(**changed), environment={})


def test_every_rule_of_a_recipe_has_its_case() -> None:
    rules = {rule.option for rule in validation.BRIDGE_RULES}
    assert SET_RIGHT <= rules <= {*BREAKING, *SET_RIGHT}


def test_all_problems_are_one_error() -> None:
    cfg = recipe(
        dist__use_torch_fsdp2=True,
        dist__use_tp_pp_dp_mapping=True,
        ddp__megatron_fsdp_main_params_dtype=torch.float16,
    )
    with pytest.raises(ValueError) as caught:
        apply_fsdp_overrides(cfg, "zero3", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert str(caught.value).count("\n  - ") == 5


def test_what_is_forgotten_is_a_problem_where_the_overrides_were_not_applied() -> None:
    cfg = recipe(checkpoint__save="x", dist__use_megatron_fsdp=True, ddp__use_megatron_fsdp=True)
    half = validation.bridge_problems(recipe(dist__use_megatron_fsdp=True), {})
    assert half[0].startswith("dist.use_megatron_fsdp=")
    found = validation.bridge_problems(cfg, {})
    assert any(line.startswith("checkpoint.ckpt_format='torch_dist': ") for line in found)


def test_the_yaml_file_says_what_the_function_sets() -> None:
    """configs/bridge-fsdp.yaml, so that the two cannot drift apart."""
    overrides = yaml.safe_load((ROOT / "configs" / "bridge-fsdp.yaml").read_text())
    cfg = recipe()
    sections = ("dist", "ddp", "checkpoint")
    before = {name: dict(vars(getattr(cfg, name))) for name in sections}
    apply_fsdp_overrides(cfg, environment={})
    for section in sections:
        given = overrides[section]
        after = vars(getattr(cfg, section))
        assert {name: after[name] for name in given} == given
        assert {name for name in after if after[name] != before[section].get(name)} <= set(given)
