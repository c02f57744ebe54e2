"""`doctor` says when another configuration is expected to be more than 10% faster."""

from __future__ import annotations

import pytest

from megatron_fsdp_adapter.cli import doctor
from megatron_fsdp_adapter.models.spec import Parallel
from megatron_fsdp_adapter.planning.advice import advice, configuration_of, gpu_in_tables

MODEL = {
    "num_layers": 4, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 8, "vocab_size": 32000, "seq_length": 4096,
    "micro_batch_size": 1,
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
    assert "GiB peak memory is expected, but the device has 79" in lines[0]


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
    assert "none: it cannot be planned: --num-layers" in capsys.readouterr().out


def test_a_world_that_cannot_be_shared_out_is_an_error():
    with pytest.raises(ValueError, match="are no multiple of"):
        configuration_of({"tensor_model_parallel_size": 3}, 8)


def test_graphs_of_layers_say_what_their_pools_reserve_and_it_is_counted():
    """Activations of 4 layers: 4096 tokens of 2 bytes for each of the elements that are kept."""
    plain = {**MODEL, **FAST, "fsdp_double_buffer": True, "global_batch_size": 4}
    lines = advice({**plain, "cuda_graph_impl": "local"}, 4, "h200")
    kept = 4 * 4096 + 2 * 4096 + 2 * 8 * 128 + 3 * 14336
    (said,) = (line for line in lines if "layer graphs reserve" in line)
    assert f"{4 * 4096 * 2 * kept / 2**30:.1f} GiB" in said
    assert not any("layer graphs" in line for line in advice(plain, 4, "h200"))
