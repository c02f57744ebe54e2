"""Every row of the option tables, by every way in: a rule is broken by a value of its option, a
setting is set where it is not so, a field has its flag. Values, and what has to be beside them, are
found by trying, so that a new row is tried without a word here."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import get_megatron_optimizer

from megatron_fsdp_adapter import DistributedDataParallelConfig, FullyShardedDataParallel
from megatron_fsdp_adapter.launch import megatron_lm
from megatron_fsdp_adapter.megatron.compat import core_api
from megatron_fsdp_adapter.megatron.options import settings, table, validation
from megatron_fsdp_adapter.megatron.options.cuda_graphs import GRAPH_RULES
from megatron_fsdp_adapter.megatron.options.option import Option
from megatron_fsdp_adapter.megatron.options.rules import Joined, Rule, problems
from megatron_fsdp_adapter.megatron.options.support import (
    MODEL_CONFIG_RULES,
    OPTIMIZER_CONFIG_RULES,
    SCHEDULE_RULES,
)
from megatron_fsdp_adapter.megatron.options.table import DDP_CONFIG_RULES, OPTIONS
from megatron_fsdp_adapter.megatron.options.validation import LAUNCH_RULES
from tests.lib.gpt.gpt import build_model, build_trainer, ddp_config, optimizer_config
from tests.lib.gpt.one_layer import CASE, wrapped
from tests.lib.megatron.launch_cases import recipe

CHECKS = (
    "megatron/options/table.py",
    "megatron/options/rules.py",
    "megatron/options/settings.py",
    "megatron/options/option.py",
    "megatron/options/support.py",
    "megatron/options/validation.py",
    "megatron/options/cuda_graphs.py",
    "megatron/options/elastic_rules.py",
)

OF_WRAPPER = (*DDP_CONFIG_RULES, *MODEL_CONFIG_RULES, *GRAPH_RULES, *SCHEDULE_RULES)
OF_RECIPES = {
    "ddp": DDP_CONFIG_RULES,
    "model": MODEL_CONFIG_RULES,
    "optimizer": OPTIMIZER_CONFIG_RULES,
}

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
VALUES = (
    True, False, "unknown", 2, 1, -1, 0, 32, 0.5, 10, "optim", "no_shard", ["router"], ["moe"],
    "full", "delayed", "local", "muon", "lion", "sgd", "full_iteration",
    "msc://bucket", 0.1, "auto", "return_all",
)  # fmt: skip
"""What options are tried with, the first that breaks a rule being taken."""

LAYERS = {"cuda_graph_impl": "local", "fsdp_double_buffer": True}
SELECTIVE = {**LAYERS, "recompute_granularity": "selective"}
BESIDE: tuple[Mapping[str, Any], ...] = (
    {}, {"fp8": "hybrid"}, {"fp4": "e2m1"}, {"cuda_graph_impl": "full_iteration"}, LAYERS,
    {"cuda_graph_impl": "local"}, {**LAYERS, "fp8": "hybrid"},
    {**SELECTIVE, "recompute_modules": ["core_attn"]}, SELECTIVE,
    {"overlap_moe_expert_parallel_comm": True}, {"fsdp_double_buffer": True},
    {"suggested_communication_unit_size": 1000},
    {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2},
    {"grad_reduce_in_fp32": False, "megatron_fsdp_main_grads_dtype": torch.bfloat16},
    {"megatron_fsdp_main_params_dtype": torch.bfloat16},
    {"data_parallel_sharding_strategy": "optim"}, {"data_parallel_sharding_strategy": "no_shard"},
    {"fp16": True}, {"optimizer_cpu_offload": True}, {"use_precision_aware_optimizer": True},
    {"chunked_optimizer_state_offload": True}, {"optimizer": "muon"},
    {"async_save": True, "async_strategy": "mcore"},
    {"fsdp_elastic": "host:1", "fsdp_elastic_replicas": 2},
)  # fmt: skip
"""What else may have to be set."""


@pytest.fixture(autouse=True)
def a_place_without_pools_and_with_a_core_that_asks_for_tokens() -> Any:
    """What no option says: rules about it are broken here."""
    settings_of_torch = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    asks = mock.patch.object(core_api, "asks_tokens_on_the_host", lambda: True)
    with mock.patch.dict("os.environ", settings_of_torch), asks:
        yield


def asked(**options: Any) -> SimpleNamespace:
    """Everything that is asked for, as one, with nothing wrong."""
    plain = {**validation.PLAIN_OPTIONS, "overlap_param_gather": True, "overlap_grad_reduce": True,
             "device": torch.device("cpu"), "asks_tokens": True, "save": None}  # fmt: skip
    return SimpleNamespace(**{**plain, **options})


@functools.cache
def breaking(rule: Rule) -> Mapping[str, Any]:
    """Options that break a rule, the last of which is the rule's."""
    for beside in BESIDE:
        for value in DTYPES if rule.option.endswith("_dtype") else VALUES:
            chosen = {name: beside[name] for name in beside if name != rule.option}
            chosen[rule.option] = value
            try:
                if rule.broken(asked(**chosen)):
                    return chosen
            except (TypeError, AttributeError):  # of another kind than the option's
                continue
    raise AssertionError(f"{rule.option}: nothing tried breaks it; add to VALUES or BESIDE")


def put(chosen: Mapping[str, Any], *configs: Any) -> None:
    for config in configs:
        for name, value in chosen.items():
            setattr(config, name, value)


def identity(row: Any) -> str:
    return f"{row.option} {getattr(row, 'message', '')[:30]}"


def test_a_plain_configuration_breaks_no_rule() -> None:
    assert problems(asked(), (*LAUNCH_RULES, *OF_WRAPPER, *OPTIMIZER_CONFIG_RULES)) == []


@pytest.mark.parametrize(
    "options",
    [
        LAYERS, {**LAYERS, "cuda_graph_scope": ["attn"], "cuda_graph_impl": "local"},
        {**SELECTIVE, "recompute_modules": ["core_attn"]}, {"cuda_graph_impl": "full_iteration"},
        {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
        {"overlap_moe_expert_parallel_comm": True, "fsdp_double_buffer": True,
         "data_parallel_sharding_strategy": "optim_grads"},
        {"cpu_offloading": True}, {"moe_mlp_glu_interleave_size": 32}, {"flextron": True},
        {"nccl_ub": True, "fsdp_manual_registration": True}, {"fp8": "hybrid"}, {"fp4": "e2m1"},
        {"muon_momentum": 2.0}, {"optimizer": "muon"}, {"bucket_size": 5, "num_buckets": 5},
    ],
    ids=str,
)  # fmt: skip
def test_what_goes_together_breaks_no_rule(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    config = asked(**options, device=torch.device("cuda"))
    assert problems(config, (*OF_WRAPPER, *OPTIMIZER_CONFIG_RULES)) == []


@pytest.mark.parametrize(
    "rule", [*LAUNCH_RULES, *OF_WRAPPER, *OPTIMIZER_CONFIG_RULES], ids=identity
)
def test_a_command_line_is_refused_for_each_rule(rule: Rule) -> None:
    chosen = breaking(rule)
    args = asked(**chosen, device=torch.device("cuda"))
    if not rule.broken(args):
        return  # of a wrapper on the CPU
    with mock.patch.object(megatron_lm, "launch_options", lambda args: args):
        found = megatron_lm.problems_of_run(args, {}, None)
    expected = rule.problem(args)
    assert expected in found or "number of tokens on the host" in rule.message
    assert expected.startswith(f"{rule.option}={chosen[rule.option]!r}")


def _id(one: str | Rule) -> str:
    if isinstance(one, Rule):
        return identity(one)
    return one


OF_SECTIONS = []
for _section, _rules in OF_RECIPES.items():
    for _rule in _rules:
        OF_SECTIONS.append((_section, _rule))


@pytest.mark.parametrize(("section", "rule"), OF_SECTIONS, ids=_id)
def test_a_recipe_is_refused_for_each_rule(section: str, rule: Rule) -> None:
    cfg = recipe()
    chosen = breaking(rule)
    put(vars(asked()), cfg.ddp)
    put({"device": torch.device("cpu"), **chosen}, cfg.ddp, cfg.model, cfg.optimizer)
    expected = rule.problem(asked(**chosen))
    assert f"{section}.{expected}" in validation.bridge_problems(cfg, {})


@pytest.mark.parametrize("rule", OF_WRAPPER, ids=identity)
def test_the_wrapper_refuses_each_rule_before_anything_is_made(
    one_rank: torch.device, rule: Rule
) -> None:
    model = build_model(CASE, one_rank)
    ddp = ddp_config(CASE, "optim_grads_params")
    chosen = breaking(rule)
    put(chosen, ddp, model.config)
    with pytest.raises(ValueError) as caught:
        FullyShardedDataParallel(model.config, ddp, model)
    expected = rule.problem(asked(**chosen))
    assert f"  - {expected}" in str(caught.value).splitlines()


@pytest.mark.parametrize("rule", OPTIMIZER_CONFIG_RULES, ids=identity)
def test_the_optimizer_refuses_each_rule(one_rank: torch.device, rule: Rule) -> None:
    """Before core's first collective for it, and before the inner one is made."""
    config = optimizer_config(CASE)
    chosen = breaking(rule)
    ddp = {name: value for name, value in chosen.items() if name.startswith("chunked")}
    wrapper = build_trainer(CASE, "optim_grads_params", one_rank, ddp=ddp).wrapper
    put({name: chosen[name] for name in chosen.keys() - ddp.keys()}, config)
    collective = mock.patch.object(torch.distributed, "all_gather_object", side_effect=KeyError)
    with collective, pytest.raises(ValueError) as caught:
        # 0.19 asks for a package first, then as all others do.
        core_optimizer._get_param_groups([wrapper], config, None)
        get_megatron_optimizer(config, [wrapper], use_gloo_process_groups=False)
    assert rule.problem(Joined(wrapper.ddp_config, config)) in str(caught.value)


# What follows.


@pytest.mark.parametrize("setting", settings.SETTINGS, ids=identity)
def test_what_follows_is_set_and_told_once(setting: settings.Setting) -> None:
    """And not where it is so, or where the user has written another value."""
    for beside in (
        {}, {"grad_reduce_in_bf16": True}, {"fp8_param": True},
        {"bf16": True, "megatron_fsdp_grad_comm_dtype": "bf16"},
        {"megatron_fsdp_grad_comm_dtype": torch.bfloat16},
        {"optimizer_cpu_offload": True}, {"async_save": True, "async_strategy": "nvrx"},
        {"megatron_fsdp_version": 2}, {"fsdp_elastic": "host:1"},
    ):  # fmt: skip
        if setting.when(asked(**beside)):
            break
    if isinstance(setting.value, bool):
        other = not setting.value
    else:
        other = "another"
    for way in setting.ways:
        config = asked(**{**beside, setting.option: other})
        configs = {setting.section: config, "all": asked(**beside)}
        if not setting.when(config):  # what follows from the option itself
            continue
        written = settings.settle(way, configs, [setting], lambda flag: flag == setting.flag)
        assert bool(written) is setting.is_void
        setattr(config, setting.option, other)
        [change] = settings.settle(way, configs, [setting])
        assert getattr(config, setting.option) == setting.value == change.after
        named = {"runner": setting.flag, "recipe": f"{setting.section}.{setting.option}"}
        assert change.option == named.get(way, setting.option)
        assert (change.before, change.reason) == (other, setting.reason)
        assert settings.settle(way, configs, [setting]) == []
    assert setting.when(asked(**beside)), "add what it follows from"


# Fields and flags.


WORDS: dict[Any, tuple[list[str], Any]] = {
    bool: ([], True),
    int: (["3"], 3),
    float: (["1.5"], 1.5),
    str: (["a"], "a"),
    table.Text: (["a"], "a"),
    table.Count: (["3"], 3),
    table.Gib: (["1.5"], 1.5),
}
"""What stands behind a flag, and what becomes of it, by the type of its option."""


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_each_option_is_a_field_and_a_flag_with_its_default(option: Option) -> None:
    config = DistributedDataParallelConfig()
    assert getattr(config, option.name) == option.default == table.read(object(), option.name)
    parser = megatron_lm.add_missing_flags(argparse.ArgumentParser())
    args = parser.parse_args([])
    if not option.help:
        assert not hasattr(args, option.name)
        return
    assert getattr(args, option.name) == option.default
    given, expected = WORDS.get(option.type, (["bf16"], torch.bfloat16))
    args = parser.parse_args([option.flag, *given])
    assert getattr(args, option.name) == expected
    if expected is torch.bfloat16 or option.type == table.Gib:
        automatic = None if expected is torch.bfloat16 else "auto"
        args = parser.parse_args([f"{option.flag}=auto"])
        assert getattr(args, option.name) == automatic
        with pytest.raises(SystemExit):
            parser.parse_args([option.flag, "int8"])
    own = argparse.ArgumentParser()
    own.add_argument(option.flag, default="its own")
    args = megatron_lm.add_missing_flags(own).parse_args([])
    assert getattr(args, option.name) == "its own"


def test_a_default_of_the_class_asks_for_nothing(one_rank: torch.device) -> None:
    """0.16.1's `preserve_fp32_weights` is True by itself, and contradicts no other main weights."""
    wrapped(ddp={"megatron_fsdp_main_params_dtype": None})
