"""`doctor` says when another configuration is expected to be more than 10% faster."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_fsdp_adapter.cli import doctor
from megatron_fsdp_adapter.planning.advice import advice, configuration_of, gpu_in_tables
from megatron_fsdp_adapter.planning.shapes import Parallel

pytestmark = pytest.mark.once

MODEL = {
    "num_layers": 4, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "num_query_groups": 8, "vocab_size": 32000, "seq_length": 4096, "micro_batch_size": 1,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
FAST = {"data_parallel_sharding_strategy": "optim_grads_params"}


def test_devices_are_known_by_the_names_that_torch_has_for_them():
    names = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA GB200": "gb200",
             "NVIDIA B200": "b200", "NVIDIA A100-SXM4-80GB": None}  # fmt: skip
    assert {name: gpu_in_tables(name) for name in names} == names


def test_options_are_read_by_megatrons_names():
    found = configuration_of(
        {**MODEL, **FAST, "tensor_model_parallel_size": 2, "recompute_granularity": "full",
         "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim",
         "fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True},
        16,
    )  # fmt: skip
    assert found.parallel == Parallel(tensor=2, recompute=True)
    assert found.instances == 2 and found.outer_optim and found.copies and not found.graph


def test_a_much_slower_configuration_is_told_with_what_is_faster_and_a_good_one_is_not():
    slow = {**MODEL, **FAST, "recompute_granularity": "full", "global_batch_size": 8}
    [line] = advice(slow, 4, "h200")
    assert "% more than the" in line and "data_parallel_sharding_strategy=" in line
    good = {**slow, "recompute_granularity": None, "micro_batch_size": 2}
    assert advice(good, 4, "h200") == []


def test_too_much_memory_is_told():
    lines = advice({**MODEL, "num_layers": 80, **FAST, "global_batch_size": 64}, 8, "h100")
    assert "GiB are expected at the most, and the device has 79" in lines[0]


def test_doctor_prints_it(capsys):
    words = [f"--set={name}={value!r}" for name, value in {**MODEL, **FAST}.items()]
    slow = ["--set=recompute_granularity='full'", "--world-size", "2", "--plan", "h200"]
    doctor.main([*words, *slow])
    text = capsys.readouterr().out
    assert "configuration: plan expects" in text and "more than the" in text
    doctor.main([*words, "--world-size", "2"])
    assert "plan expects" not in capsys.readouterr().out


def test_what_cannot_be_planned_is_said_and_the_rest_of_the_report_stands(capsys):
    doctor.main(["--set", "data_parallel_sharding_strategy=optim", "--plan", "h200"])
    assert "nothing, as it cannot be planned: --vocab-size" in capsys.readouterr().out


def test_a_world_that_cannot_be_shared_out_is_an_error():
    with pytest.raises(ValueError, match="cannot be shared out"):
        configuration_of({"tensor_model_parallel_size": 3}, 8)


def a_recipe(**model):
    """As a function of megatron.bridge.recipes returns one, with the parts that matter here."""
    sizes = {**MODEL, "gradient_accumulation_fusion": False, "cpu_offloading": False, **model}
    for name in ("seq_length", "micro_batch_size"):
        sizes.pop(name)
    parts = {
        "dist": {"use_megatron_fsdp": False, "use_torch_fsdp2": False,
                 "use_tp_pp_dp_mapping": False, "use_decentralized_pg": False},
        "ddp": {"use_megatron_fsdp": False, "use_distributed_optimizer": True,
                "average_in_collective": False, "grad_reduce_in_fp32": True,
                "reduce_scatter_with_fp32_accumulation": False,
                "data_parallel_sharding_strategy": "no_shard",
                "outer_dp_sharding_strategy": "no_shard",
                "num_distributed_optimizer_instances": 1},
        "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True},
        "model": {**sizes, "tensor_model_parallel_size": 1, "num_moe_experts": None},
        "checkpoint": {"ckpt_format": "torch_dist", "save": None, "load": None,
                       "async_save": False, "pretrained_checkpoint": None},
        "train": {"micro_batch_size": 1, "global_batch_size": 8},
        "dataset": {"seq_length": 4096},
        "mixed_precision": {"grad_reduce_in_fp32": True},
    }  # fmt: skip
    cfg = {name: SimpleNamespace(**fields) for name, fields in parts.items()}
    return SimpleNamespace(**cfg, comm_overlap=None)


def test_doctor_plans_a_recipe_of_megatron_bridge(monkeypatch, capsys):
    stub = ModuleType("megatron.bridge.recipes")
    stub.slow = lambda: a_recipe(recompute_granularity="full")
    stub.good = a_recipe
    monkeypatch.setitem(sys.modules, "megatron.bridge.recipes", stub)
    given = ["--world-size", "4", "--plan", "h200", "--recipe"]
    doctor.main([*given, "slow"])
    text = capsys.readouterr().out
    assert "% more than the" in text and "data_parallel_sharding_strategy" in text
    assert "ddp.use_megatron_fsdp" in text, "what apply_fsdp_overrides sets"
    doctor.main([*given, "good", "--set", "train.micro_batch_size=2",
                 "--set", "ddp.data_parallel_sharding_strategy='optim'"])  # fmt: skip
    text = capsys.readouterr().out
    assert "plan expects" not in text and "no_shard -> optim_grads_params" not in text
    assert doctor.main([*given, "none"]) == 2
    assert doctor.main([*given, "good", "--set", "train.no=1"]) == 2
    seen = capsys.readouterr().err
    assert "has no such function" in seen and "--set train.no" in seen


def test_a_recipe_without_megatron_bridge_is_one_clear_error(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "megatron.bridge.recipes", None)
    assert doctor.main(["--recipe", "any"]) == 2
    assert "not installed" in capsys.readouterr().err


def test_graphs_of_layers_say_what_their_pools_reserve_and_it_is_counted():
    """Activations of 4 layers: 4096 tokens of 2 bytes for each of the elements that are kept."""
    plain = {**MODEL, **FAST, "fsdp_double_buffer": True, "global_batch_size": 4}
    lines = advice({**plain, "cuda_graph_impl": "local"}, 4, "h200")
    kept = 4 * 4096 + 2 * 4096 + 2 * 8 * 128 + 3 * 14336
    (said,) = (line for line in lines if "graphs of layers reserve" in line)
    assert f"{4 * 4096 * 2 * kept / 2**30:.1f} GiB" in said
    assert not any("graphs of layers" in line for line in advice(plain, 4, "h200"))


def test_a_step_that_is_late_or_in_a_graph_says_that_its_time_is_planned_as_without():
    plain = {**MODEL, **FAST, "global_batch_size": 4}
    for option, said in (
        ("fsdp_overlap_param_gather_with_optimizer_step", "ms of updates it hides what would run"),
        ("optimizer_cuda_graph", "gradients keep their memory between steps, which is counted"),
    ):
        lines = advice({**plain, option: True}, 4, "h200")
        assert [said in line and "planned as without" in line for line in lines] == [True]
    assert advice(plain, 4, "h200") == []
