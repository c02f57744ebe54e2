"""The estimate: its listing against core's own model, its sums against the layouts."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_fsdp_adapter.cli import prove
from megatron_fsdp_adapter.cli.estimate import (
    NO_SLOTS,
    Model,
    UnitKind,
    estimate,
    main,
    plan_listing,
    plan_model,
)
from megatron_fsdp_adapter.cli.gpt import (
    PRESETS,
    GptConfig,
    config_from,
    gpt_parameter_listing,
    read_hugging_face,
    read_options,
)
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.layout import (
    GroupLayout,
    ParamSpec,
    Placement,
    Segment,
    plan_group,
    row_granularity,
)
from megatron_fsdp_adapter.diagnostics.memory import Precision, group_bytes
from megatron_fsdp_adapter.megatron.local_spec import local_block_spec

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100}
GPT2 = {**SMALL, "max_position_embeddings": 64}
LLAMA = {
    **SMALL,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
LATENT = {"kv_lora_rank": 20, "qk_head_dim": 12, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2 untied": {**GPT2, "untie_embeddings_and_output_weights": True},
    "llama": LLAMA,
    "llama tied": {**LLAMA, "untie_embeddings_and_output_weights": False},
    "llama, grouped queries": {**LLAMA, "group_query_attention": True, "num_query_groups": 2},
    "groups without the switch": {**LLAMA, "num_query_groups": 2},
    "wide heads": {**LLAMA, "kv_channels": 24, "ffn_hidden_size": 72},
    "norms of queries and keys": {**LLAMA, "qk_layernorm": True},
    "LayerNorm of queries and keys": {**GPT2, "qk_layernorm": True},
    "bias of qkv only": {**LLAMA, "add_qkv_bias": True},
    "gated with biases": {**GPT2, "swiglu": True},
    "exact vocabulary": {**LLAMA, "padded_vocab_size": 99},
    "other padding": {**LLAMA, "make_vocab_size_divisible_by": 7},
    "latent attention": {**LLAMA, "multi_latent_attention": True, "q_lora_rank": 24, **LATENT},
    "latent attention with norms": {
        **LLAMA, "multi_latent_attention": True, "q_lora_rank": 24, "qk_layernorm": True, **LATENT,
    },
    "latent keys alone": {**LLAMA, "multi_latent_attention": True, **LATENT},
    "no positions": {**GPT2, "position_embedding_type": "none"},
}


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def core_model(config: GptConfig) -> GPTModel:
    kind: Any = TransformerConfig
    latent: dict[str, Any] = {}
    if config.multi_latent_attention:
        kind, names = MLATransformerConfig, ("q_lora_rank", *LATENT)
        latent = {name: getattr(config, name) for name in names}
    core = kind(
        **latent,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups if config.group_query_attention else None,
        ffn_hidden_size=config.ffn_hidden_size or megatron_default_ffn(config),
        kv_channels=config.kv_channels,
        normalization=config.normalization,
        gated_linear_unit=config.swiglu,
        add_bias_linear=config.add_bias_linear,
        add_qkv_bias=config.add_qkv_bias,
        qk_layernorm=config.qk_layernorm,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
    )
    spec = local_block_spec(core, None) if latent else get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )  # fmt: skip
    assert config.embedding_rows is not None
    return GPTModel(
        core,
        spec,
        vocab_size=config.embedding_rows,
        max_sequence_length=64,
        position_embedding_type=config.position_embedding_type,  # type: ignore[arg-type]
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
    )


def megatron_default_ffn(config: GptConfig) -> int:
    hidden = config.hidden_size
    return int((4 * hidden * 2 / 3) / 64) * 64 if config.swiglu else 4 * hidden


@pytest.mark.parametrize("name", MODELS)
def test_the_listing_is_that_of_cores_own_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # asked for by rotary tables
    for kind in ("TELinear", "TEColumnParallelLinear"):  # core 0.16 asks whether a layer is one
        if not isinstance(getattr(multi_latent_attention, kind), type):
            monkeypatch.setattr(multi_latent_attention, kind, TransformerConfig)
    config = GptConfig(**MODELS[name])
    model = core_model(config)
    real = [(fqn, tuple(param.shape)) for fqn, param in model.named_parameters()]
    assert [(fqn, shape) for _, fqn, shape in gpt_parameter_listing(config)] == real


def units_of(config: GptConfig) -> dict[str, list[str]]:
    units: dict[str, list[str]] = {}
    for unit, fqn, _ in gpt_parameter_listing(config):
        units.setdefault(unit, []).append(fqn)
    return units


def test_units() -> None:
    untied = units_of(GptConfig(**LLAMA))
    layers = ["decoder.layers.0", "decoder.layers.1"]
    assert list(untied) == ["embedding", *layers, "root", "output_layer"]
    assert untied["root"] == ["decoder.final_layernorm.weight"]
    tied = units_of(GptConfig(**GPT2))
    assert list(tied) == ["root", *layers]
    assert tied["root"] == [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
    ]


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    model = plan_model(config_from(PRESETS[preset]), 8, torch.bfloat16)
    assert model.num_parameters == parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["gpt2", "gpt2 untied", "llama, grouped queries"])
def test_persistent_bytes_are_the_formula_over_every_unit(name: str, dtype: torch.dtype) -> None:
    """Each unit planned by itself, none taken to be like another."""
    config, num_shards = GptConfig(**MODELS[name]), 4
    model = plan_model(config, num_shards, dtype)
    units: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for unit, fqn, shape in gpt_parameter_listing(config):
        units.setdefault(unit, []).append((fqn, shape))
    for rank in range(num_shards):
        report = estimate(model, list(STRATEGIES.values()), Precision(), rank)
        for row in STRATEGIES.values():
            total: dict[str, int] = {}
            for params in units.values():
                specs = [
                    ParamSpec(i, (fqn,), shape, dtype, True, row_granularity(shape))
                    for i, (fqn, shape) in enumerate(params)
                ]
                layout = plan_group(specs, num_shards)
                for kind, count in group_bytes(layout, row, Precision(), rank).items():
                    total[kind] = total.get(kind, 0) + count
            persistent = {"compute weights", "main weights", "main gradients", "optimizer state"}
            held = report["strategies"][row.name]
            expected = sum(count for kind, count in total.items() if kind in persistent)
            assert held["between_steps"] == expected
            assert held["bytes"].get("gradient shard") == total.get("gradient shard")


def test_the_fullest_rank_holds_most() -> None:
    model = plan_model(GptConfig(**LLAMA), 8, torch.bfloat16)
    row = STRATEGIES["optim_grads_params"]
    held = [model.bytes_held(row, Precision(), rank)["optimizer state"] for rank in range(8)]
    assert held[model.fullest_rank] == max(held) and min(held) < max(held)
    assert sum(held) == 8 * model.num_parameters


def test_the_fullest_rank_counts_every_unit() -> None:
    """32 elements on rank 1 in one unit, 16 on rank 0 in each of three."""

    def kind(names: tuple[str, ...], rows: int, offset: int) -> UnitKind:
        spec = ParamSpec(0, ("weight",), (rows, 16), torch.bfloat16, True, 16)
        segment, placement = Segment(0, 64, 16, 2), Placement(0, offset)
        return UnitKind(names, (GroupLayout((spec,), (segment,), (placement,), 2, 16),))

    one, three = kind(("a",), 2, 32), kind(("b", "c", "d"), 1, 0)
    for kinds, of, rank in (((one,), "a", 1), ((one, three), "abcd", 0)):
        assert Model(kinds, 2, tuple(of), NO_SLOTS, with_listing=plan_listing).fullest_rank == rank


def test_slots_take_the_memory_that_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3 8B with copy engines for both held 29.77 GiB on each of 4 GPUs (performance.md).
    More layers take the same two slots."""
    words = ["--preset", "llama3-8b", "--data-parallel-size", "4", "--json",
             "--data-parallel-sharding-strategy", "optim_grads_params"]  # fmt: skip
    copied = [*words, "--fsdp-copy-engine-all-gather", "--fsdp-copy-engine-reduce-scatter"]
    found = []
    for layers in (32, 64):
        assert main([*copied, "--num-layers", str(layers)]) == 0
        report = json.loads(capsys.readouterr().out)["strategies"]["optim_grads_params"]
        found.append(report)
    assert round(found[0]["between_steps"] / 2**30, 2) == 29.77
    for kind in ("weight slots", "bucket slots", "received pieces"):
        assert found[0]["bytes"][kind] == found[1]["bytes"][kind] > 0
    assert found[0]["gathered_ahead"] == 0


def test_copy_engines_hold_half_without_fusion(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "llama3-8b", "--data-parallel-size", "4", "--json",
             "--data-parallel-sharding-strategy", "optim_grads_params",
             "--fsdp-copy-engine-reduce-scatter"]  # fmt: skip
    found = []
    for more in ((), ("--no-gradient-accumulation-fusion",)):
        assert main([*words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["strategies"]["optim_grads_params"]["bytes"])
    fused, unfused = found
    for kind, count in fused.items():
        half = 2 if kind in ("bucket slots", "received pieces") else 1
        assert count == half * unfused[kind], kind


@pytest.mark.parametrize("layers", (0, 1, 2, 3, 7, 24))
@pytest.mark.parametrize("slots", (NO_SLOTS, dict.fromkeys(NO_SLOTS, True)))
def test_another_number_of_layers_is_another_model(layers: int, slots: dict[str, bool]) -> None:
    """What `most_layers` asks of a model is what a model with so many layers says."""
    row, given = STRATEGIES["optim_grads_params"], GptConfig(**{**LLAMA, "num_layers": 3})
    model = plan_model(given, 2, torch.bfloat16, slots)
    held, one = (model.with_layers(n).bytes_held(row, Precision(), 0) for n in (layers, 1))
    if layers:
        other = plan_model(GptConfig(**{**LLAMA, "num_layers": layers}), 2, torch.bfloat16, slots)
        assert held == other.bytes_held(row, Precision(), 0)
    else:
        assert sum(held.values()) < sum(one.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("gib", [0.001, 1.0, 40.0])
def test_most_layers_is_the_last_number_that_fits(strategy: str, gib: float) -> None:
    config = GptConfig(**{**LLAMA, "hidden_size": 1024, "num_attention_heads": 8})
    model, row = plan_model(config, 8, torch.bfloat16), STRATEGIES[strategy]
    rank = model.fullest_rank
    found = estimate(model, [row], Precision(), rank, gib)["strategies"][strategy]["most_layers"]

    def peak(num_layers: int) -> int:
        longer = plan_model(replace(config, num_layers=num_layers), 8, torch.bfloat16)
        return estimate(longer, [row], Precision(), rank)["strategies"][strategy]["peak"]

    limit = int(gib * 2**30)
    assert peak(found + 1) > limit and (found == 0 or peak(found) <= limit)
    assert (found == 0) == (gib == 0.001)


def run_main(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_flags_override_the_file_and_the_file_the_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text("num-layers: 3\nhidden_size: 2048\nffn-hidden-size: null\nlr: 1.0e-3\n")
    found = run_main(
        capsys, "--preset", "llama3-8b", "--config", str(file), "--hidden-size", "1024"
    )
    expected = config_from({**PRESETS["llama3-8b"], "num_layers": 3, "hidden_size": 1024})
    expected = replace(expected, ffn_hidden_size=None)
    assert found["parameters"] == plan_model(expected, 1, torch.float32).num_parameters
    assert found["params_dtype"] == "fp32"


@pytest.mark.parametrize(
    ("content", "flags", "dtype"),
    [
        ("bf16: true", (), "bf16"),
        ("fp16: true", (), "fp16"),
        ("seed: 1", (), "fp32"),
        ("bf16: true", ("--params-dtype", "fp32"), "fp32"),
    ],
)
def test_the_dtype_is_the_presets_unless_given(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    flags: tuple[str, ...],
    dtype: str,
) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text(content)
    found = run_main(capsys, "--preset", "llama3-8b", "--config", str(file), *flags)
    assert found["params_dtype"] == dtype


CONFIGS = [
    path
    for path in sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    if not path.name.startswith("bridge-")  # overrides of a recipe, no preset
]
DENSE = [file for file in CONFIGS if "num-experts" not in file.read_text()]


def test_a_preset_with_experts_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    [file] = set(CONFIGS) - set(DENSE)
    assert main(["--config", str(file), "--data-parallel-size", "8"]) == 2
    assert "--num-experts 8" in capsys.readouterr().err


@pytest.mark.parametrize("file", DENSE, ids=lambda file: file.stem)
def test_training_presets_can_be_estimated(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_main(capsys, "--config", str(file), "--data-parallel-size", "8")
    assert found["parameters"] > 0 and list(found["strategies"]) == list(STRATEGIES)


def test_there_are_training_presets() -> None:
    assert "cpu-tiny" in [file.stem for file in CONFIGS]


def test_a_preset_without_vocabulary_means_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "preset.yaml"
    sizes = "num-layers: 1\nhidden-size: 8\nnum-attention-heads: 1\nseq-length: 16\n"
    file.write_text(sizes)
    rows = [(), ("--vocab-size", "1000"), ("--tokenizer-type", "ByteLevelTokenizer")]
    found = [run_main(capsys, "--config", str(file), *row)["parameters"] for row in rows]
    assert found[0] == found[2] == found[1] - (1024 - 384) * 8


def test_bias_switches(tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text("disable-bias-linear: true")
    assert read_options(str(file)) == {"add_bias_linear": False}


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"vocab_size": 100}, 128),
        ({"vocab_size": 128}, 128),
        ({"vocab_size": 128, "tokenizer_type": "NullTokenizer"}, 256),
        ({"vocab_size": None, "tokenizer_type": "ByteLevelTokenizer"}, 384),
        ({"vocab_size": 100, "padded_vocab_size": 101}, 101),
        ({"vocab_size": 100, "make_vocab_size_divisible_by": 8}, 104),
    ],
)
def test_rows_of_the_embedding(options: dict[str, Any], rows: int) -> None:
    assert GptConfig(**(LLAMA | options)).embedding_rows == rows


def test_the_table_shows_bytes_padding_and_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "llama3-70b", "--data-parallel-size", "512", "--memory-gib", "80"]
    assert main(arguments) == 0
    lines = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert next(iter(lines)).startswith("70,553,706,496 parameters, bf16")
    assert "0.49%" in lines["decoder.layers.0 .. decoder.layers.79"]
    assert lines["kind"][2:] == list(STRATEGIES)
    assert lines["fits"] == ["fits", "80", "GiB", "no", "no", "no", "yes"]
    report = run_main(capsys, *arguments)
    for name, column in zip(STRATEGIES, range(-4, 0), strict=True):
        held = report["strategies"][name]
        state = held["bytes"]["optimizer state"]
        assert lines["optimizer state"][column] == f"{state / 2**30:.3f}"
        assert lines["transformer layers that fit"][column] == str(held["most_layers"])
        assert held["peak"] == sum(held["bytes"].values())


def test_one_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_main(
        capsys, "--preset", "llama3-8b", "--data-parallel-sharding-strategy", "optim", "--rank", "0"
    )
    assert list(found["strategies"]) == ["optim"] and found["rank"] == 0


def test_dtypes_of_the_policy_reach_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 gradients take half the bytes of fp32's; communication in another dtype than that of
    kept gradients takes a bucket; main weights in the compute dtype, where those are kept, none."""

    def kinds(strategy: str, *flags: str) -> dict[str, int]:
        arguments = ("--preset", "llama3-8b", "--data-parallel-size", "8", *flags)
        return run_main(capsys, *arguments)["strategies"][strategy]["bytes"]

    grads, comm = "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype"
    plain = kinds("optim")
    assert 2 * kinds("optim", grads, "bf16")["main gradients"] == plain["main gradients"]
    assert "reduce bucket" not in plain and kinds("optim", comm, "bf16")["reduce bucket"] > 0
    sharded = kinds("optim_grads_params")["reduce bucket"]
    assert 2 * kinds("optim_grads_params", comm, "bf16")["reduce bucket"] == sharded
    own = kinds("no_shard", "--megatron-fsdp-main-params-dtype", "none")
    assert "main weights" not in own and "main weights" in kinds("no_shard")


def test_planner_options_reach_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--preset", "llama3-70b", "--data-parallel-size", "512")
    one = run_main(capsys, *arguments, "--max-segments", "1")["units"][1]
    two = run_main(capsys, *arguments)["units"][1]
    loose = run_main(capsys, *arguments, "--padding-bound", "0.05")["units"][1]
    assert [len(unit["segments"]) for unit in (one, two, loose)] == [1, 2, 1]
    assert one["padding_fraction"] > 0.02 > two["padding_fraction"]


def test_405b_on_16384_shards_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    found = run_main(capsys, "--preset", "llama3-405b", "--data-parallel-size", "16384")
    assert found["parameters"] == 405_853_388_800
    assert time.process_time() - start < 10.0


BAD: list[tuple[tuple[str, ...], str]] = [
    ((), "--num-layers, --hidden-size, --num-attention-heads: not given"),
    (("--preset", "llama3-8b", "--num-layers", "0"), "--num-layers 0"),
    (("--preset", "llama3-8b", "--num-attention-heads", "33"), "--num-attention-heads 33"),
    (("--preset", "llama3-8b", "--num-query-groups", "5"), "--num-query-groups 5"),
    (("--preset", "llama3-8b", "--normalization", "BatchNorm"), "--normalization 'BatchNorm'"),
    (("--preset", "llama3-8b", "--position-embedding-type", "x"), "--position-embedding-type"),
    (("--preset", "llama3-8b", "--data-parallel-size", "0"), "--data-parallel-size 0"),
    (("--preset", "llama3-8b", "--data-parallel-size", "2", "--rank", "2"), "--rank 2"),
    (("--preset", "llama3-8b", "--memory-gib", "0"), "--memory-gib 0"),
    (("--preset", "llama3-8b", "--max-segments", "0"), "max_segments=0"),
    (("--config", "no/such/file.yaml"), "--config no/such/file.yaml"),
    (
        ("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1"),
        "--vocab-size is not given",
    ),
    (
        (
            *("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1"),
            *("--vocab-size", "8"),
        ),
        "--max-position-embeddings",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_naming_option_and_value(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("num-experts: 8", "--num-experts 8"),
        ("tensor-model-parallel-size: 2", "--tensor-model-parallel-size 2"),
        ("hidden-size: wide", "--hidden-size 'wide'"),
        ("swiglu: 1", "--swiglu 1"),
        ("tokenizer-type: ByteLevelTokenizer", "--vocab-size 128256 with --tokenizer-type"),
        ("bf16: true\nfp16: true", "--bf16 and --fp16"),
        ("params-dtype: int8", "--params-dtype 'int8'"),
        ("- a list", "must hold 'flag: value' lines"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text(content)
    assert main(["--preset", "llama3-8b", "--config", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_the_command_line_needs_no_process_group() -> None:
    command = [sys.executable, "-m", "megatron_fsdp_adapter", "estimate", "--preset", "llama3-8b"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first = "8,030,261,248 parameters, bf16 compute weights, data-parallel size 1"
    assert done.stdout.splitlines()[0] == first


def test_a_hugging_face_config_is_the_same_model_for_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of estimate, plan and `doctor --prove`: of the file, and of its folder."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "intermediate_size": 14336,
             "vocab_size": 128256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    for path in (tmp_path, tmp_path / "config.json"):
        assert run_main(capsys, "--hf-config", str(path))["parameters"] == 8_030_261_248
    parser = argparse.ArgumentParser()
    prove.add_arguments(parser)
    given = parser.parse_args(["--hf-config", str(tmp_path)], argparse.Namespace(script=None))
    given.world_size = None
    found = prove.read_recipe(given, {}).options
    assert config_from(found) == config_from(read_hugging_face(str(tmp_path)))
    assert set(next(a for a in parser._actions if a.dest == "preset").choices or ()) == set(PRESETS)
