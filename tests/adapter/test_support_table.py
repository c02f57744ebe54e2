"""docs/support.md says what is so: every refused option is in it and is refused, every test it
names exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import get_megatron_optimizer

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.megatron.options.ddp_options import DDP_CONFIG_RULES
from megatron_fsdp_adapter.megatron.options.support import (
    MODEL_CONFIG_RULES,
    OPTIMIZER_CONFIG_RULES,
    Rule,
)
from tests.distributed.gpt import (
    Case,
    build_model,
    build_trainer,
    ddp_config,
    optimizer_config,
)

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "support.md"
CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23)
DEVICE = torch.device("cpu")
RULES = (*DDP_CONFIG_RULES, *MODEL_CONFIG_RULES, *OPTIMIZER_CONFIG_RULES)
STATES = ("works", "accepted", "refused", "coming")

Values = tuple[Any, ...]

HAS_OLDER_NAME = hasattr(DistributedDataParallelConfig, "preserve_fp32_weights")
"""The field is gone in 0.17, where core has the one that took its place."""

TRIGGERS: dict[str, Values] = {
    # DDP config: one value for each rule of that option, in the order of the rules
    "use_megatron_fsdp": (False,),
    "data_parallel_sharding_strategy": ("zero3",),
    "num_distributed_optimizer_instances": (0,),
    "outer_dp_sharding_strategy": ("optim_grads", "optim"),
    "preserve_fp32_weights": (not HAS_OLDER_NAME,),
    "grad_reduce_in_fp32": (True,),
    "fsdp_unsharded_budget_gib": (-1.0, 2.0),
    "suggested_communication_unit_size": (-1,),
    "megatron_fsdp_main_params_dtype": (torch.float16,),
    "megatron_fsdp_main_grads_dtype": (torch.float16,),
    "megatron_fsdp_grad_comm_dtype": (torch.float16,),
    "param_name_patterns_for_fp32_local_accumulation": (("router",),),
    # Model config
    "fp8_recipe": ("custom",),
    "fp4_recipe": ("custom",),
    "cuda_graph_impl": ("transformer_engine",),
    "gtp_weight_remat_size": (2,),
    "expert_gtp_weight_remat_size": (2,),
    "tensor_parallel_num_weight_shards": (2,),
    "expert_tensor_parallel_num_weight_shards": (2,),
    "moe_mlp_glu_interleave_size": (32,),
    "moe_shared_expert_glu_interleave_size": (32,),
    # Optimizer config
    "exp_avg_dtype": (torch.uint8,),
    "exp_avg_sq_dtype": (torch.float16,),
    "optimizer_offload_fraction": (0.5,),
    "optimizer": ("soap", "lion", "muon", "sgd"),
}
"""What breaks a rule; True for the options that are not listed."""

BESIDE: dict[str, dict[str, Any]] = {
    "preserve_fp32_weights": {
        "megatron_fsdp_main_params_dtype": torch.float32 if HAS_OLDER_NAME else torch.bfloat16
    },
    "grad_reduce_in_fp32": {"megatron_fsdp_main_grads_dtype": torch.bfloat16},
    "param_name_patterns_for_fp32_local_accumulation": {
        "grad_reduce_in_fp32": False, "megatron_fsdp_main_grads_dtype": torch.bfloat16
    },
    "cpu_offloading": {"recompute_granularity": "selective"},
    "fp8_recipe": {"fp8": "hybrid"},
    "fp4_recipe": {"fp4": "e2m1"},
    "moe_mlp_glu_interleave_size": {"tensor_model_parallel_size": 2},
    "moe_shared_expert_glu_interleave_size": {"expert_tensor_parallel_size": 2},
    "optimizer_offload_fraction": {"optimizer_cpu_offload": True},
    "optimizer": {
        "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "fp16": True
    },
    "flextron": {"pipeline_model_parallel_size": 2},
}
"""What else has to be set: these are refused where they contradict another option."""


def rule_ids() -> list[tuple[Rule, Any]]:
    """Every rule with a value that breaks it."""
    seen: dict[str, int] = {}
    pairs = []
    for rule in RULES:
        values = TRIGGERS.get(rule.option, (True,))
        number = seen.setdefault(rule.option, 0)
        seen[rule.option] += 1
        pairs.append((rule, values[min(number, len(values) - 1)]))
    return pairs


def _configs(strategy: str) -> dict[str, Any]:
    model = build_model(CASE, DEVICE)
    return {"model": model, "ddp": ddp_config(CASE, strategy), "model config": model.config}


@pytest.mark.parametrize("pair", rule_ids(), ids=lambda pair: f"{pair[0].option}={pair[1]}")
def test_refused_option_is_an_early_error(one_rank: torch.device, pair: tuple[Rule, Any]) -> None:
    """The message names option and value; each rule is broken by its value, not by another's."""
    rule, value = pair
    if rule in OPTIMIZER_CONFIG_RULES:
        _check_optimizer(rule, value)
        return
    configs = _configs("no_shard")
    config = configs["ddp"] if rule in DDP_CONFIG_RULES else configs["model config"]
    assert not rule.broken(config), "the default is refused"
    for option, chosen in {**BESIDE.get(rule.option, {}), rule.option: value}.items():
        setattr(config, option, chosen)
    assert rule.broken(config)
    with pytest.raises(ValueError) as caught:
        FullyShardedDataParallel(configs["model config"], configs["ddp"], configs["model"])
    assert f"{rule.option}={value!r}: {rule.message}" in str(caught.value)


def _check_optimizer(rule: Rule, value: Any) -> None:
    """Before core's first collective for the optimizer, and before it makes the inner one."""
    wrapper = build_trainer(CASE, "optim_grads_params", DEVICE).wrapper
    config = optimizer_config(CASE)
    assert not rule.broken(config), "the default is refused"
    for option, chosen in {**BESIDE.get(rule.option, {}), rule.option: value}.items():
        setattr(config, option, chosen)
    collective = mock.patch.object(torch.distributed, "all_gather_object", side_effect=KeyError)
    with collective, pytest.raises(ValueError) as caught:
        if rule.option == "optimizer":  # 0.19 asks for a package first, then as all others do
            core_optimizer._get_param_groups([wrapper], config, None)
        get_megatron_optimizer(config, [wrapper], use_gloo_process_groups=False)
    assert f"{rule.option}={value!r}: {rule.message}" in str(caught.value)


def test_torch_fsdp2_is_not_an_option_of_the_training_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron-LM's flag for another wrapper, exclusive with ours."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    parse = importlib.import_module("lib.options").parse
    with pytest.raises(ValueError, match="--use-torch-fsdp2"):
        parse(["--use-torch-fsdp2"])


def test_every_listed_trigger_belongs_to_a_rule() -> None:
    assert set(TRIGGERS) <= {rule.option for rule in RULES}


# The table.


def rows() -> list[tuple[str, str, str]]:
    """(what, state, remark) of each row."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]
    assert all(len(row) == 3 for row in cells), "a row of three columns"
    return cells  # type: ignore[return-value]


def named_tests(text: str) -> list[str]:
    return re.findall(r"`(tests/[^`]+)`", text)


@pytest.mark.parametrize("option", sorted({rule.option for rule in RULES}))
def test_every_refused_option_is_in_the_table(option: str) -> None:
    found = [row for row in rows() if f"`{option}`" in row[0]]
    assert found, f"{option} is refused, but docs/support.md has no row for it"
    states = [state for _, state, _ in found]
    assert any("refused" in state or "coming" in state for state in states), states


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:50])
def test_row_is_backed(row: tuple[str, str, str]) -> None:
    """What works names a test that exists; what is refused is a rule, or names the test of it."""
    what, state, remark = row
    assert any(word in state for word in STATES), state
    tests = named_tests(remark)
    for path in tests:
        assert (ROOT / path).is_file(), f"{path} does not exist"
    if "works" in state or "accepted" in state:
        assert tests, f"{what}: names no test"
    else:
        options = set(re.findall(r"`([a-z0-9_]+)`", what))
        assert tests or options & {rule.option for rule in RULES}, f"{what}: neither rule nor test"
