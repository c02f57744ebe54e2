"""The estimate: its listing against core's own model, its sums against plans made by hand, and
numbers that were measured or published."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.layout import (
    GroupLayout,
    ParamSpec,
    Placement,
    Segment,
)
from megatron_fsdp_adapter.core.layout.format import MXFP8, PER_TENSOR
from megatron_fsdp_adapter.megatron.options.staging_options import NO_SLOTS
from megatron_fsdp_adapter.plan.memory import Precision
from megatron_fsdp_adapter.tools.cli.estimate import main, make_parser
from megatron_fsdp_adapter.tools.models.local_spec import local_block_spec
from megatron_fsdp_adapter.tools.models.quantization import (
    PLAIN,
    RECIPES,
    Quantization,
    quantization,
)
from megatron_fsdp_adapter.tools.models.sources import PRESETS, from_options
from megatron_fsdp_adapter.tools.models.spec import (
    ModelSpec,
    Parallel,
    default_ffn_hidden_size,
    listing,
)
from megatron_fsdp_adapter.tools.planning.configurations import Configuration, memory
from megatron_fsdp_adapter.tools.planning.machine import machine_named
from megatron_fsdp_adapter.tools.planning.planned import PlannedModel, PlannedUnit, planned_units
from tests.lib.ranks.one_rank import world_of_one
from tests.lib.tools.presets import model_named

CHECKS = (
    "tools/cli/estimate.py",
    "tools/cli/estimate_text.py",
    "tools/cli/precision_options.py",
    "tools/models/spec.py",
    "tools/models/sources.py",
    "tools/models/quantization.py",
    "tools/planning/planned.py",
)

GIB = 2**30
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
        **LLAMA,
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "qk_layernorm": True,
        **LATENT,
    },
    "latent keys alone": {**LLAMA, "multi_latent_attention": True, **LATENT},
    "sinks": {**GPT2, "softmax_type": "learnable"},
    "no positions": {**GPT2, "position_embedding_type": "none"},
}


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with world_of_one():
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()


def core_model(spec: ModelSpec) -> GPTModel:
    kind: Any = TransformerConfig
    latent = {}
    experts = {}
    if spec.num_experts:
        experts = {
            "num_moe_experts": spec.num_experts,
            "moe_ffn_hidden_size": spec.moe_ffn_hidden_size,
            "moe_shared_expert_intermediate_size": spec.moe_shared_expert_intermediate_size,
            "moe_shared_expert_gate": spec.moe_shared_expert_gate,
        }
    if spec.multi_latent_attention:
        kind = MLATransformerConfig
        for name in ("q_lora_rank", *LATENT):
            latent[name] = getattr(spec, name)
    default_ffn = default_ffn_hidden_size(spec.hidden_size, spec.swiglu)
    core = kind(
        **latent,
        **experts,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_query_groups if spec.group_query_attention else None,
        ffn_hidden_size=spec.ffn_hidden_size or default_ffn,
        kv_channels=spec.kv_channels,
        normalization=spec.normalization,
        gated_linear_unit=spec.swiglu,
        add_bias_linear=spec.add_bias_linear,
        add_qkv_bias=spec.add_qkv_bias,
        qk_layernorm=spec.qk_layernorm,
        softmax_type=spec.softmax_type,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
    )
    if latent:
        layers = local_block_spec(core, None)
    else:
        layers = get_gpt_layer_local_spec(
            spec.num_experts, qk_layernorm=spec.qk_layernorm, normalization=spec.normalization
        )
    return GPTModel(
        core,
        layers,
        vocab_size=spec.embedding_rows,
        max_sequence_length=64,
        position_embedding_type=spec.position_embedding_type,  # type: ignore[arg-type]
        share_embeddings_and_output_weights=not spec.untie_embeddings_and_output_weights,
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_listing_is_that_of_cores_own_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in no layer is in a unit of its own, or, with a weight that two share, the root's."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # asked for by rotary tables
    for kind in ("TELinear", "TEColumnParallelLinear"):  # core 0.16 asks whether a layer is one
        if not isinstance(getattr(multi_latent_attention, kind), type):
            monkeypatch.setattr(multi_latent_attention, kind, TransformerConfig)
    spec = ModelSpec(**MODELS[name])
    real = [(fqn, tuple(param.shape)) for fqn, param in core_model(spec).named_parameters()]
    listed = []
    units = {}
    of_layers = set()
    for unit, fqn, shape, _ in listing(spec):
        listed.append((fqn, shape))
        units[fqn] = unit
        if "layers" in fqn:
            of_layers.add(unit)
    assert listed == real

    tied = not spec.untie_embeddings_and_output_weights
    assert units["decoder.final_layernorm.weight"] == "root"
    assert units["embedding.word_embeddings.weight"] == ("root" if tied else "embedding")
    assert units.get("output_layer.weight") == (None if tied else "output_layer")
    assert of_layers == {"decoder.layers.0", "decoder.layers.1"}


EXPERTS: dict[str, dict[str, Any]] = {
    "experts": LLAMA,
    "experts with biases": {**LLAMA, "add_bias_linear": True},
    "shared expert": {**LLAMA, "moe_shared_expert_intermediate_size": 48},
    "shared expert with a gate": {
        **LLAMA,
        "moe_shared_expert_intermediate_size": 48,
        "moe_shared_expert_gate": True,
    },
}


@pytest.mark.parametrize("name", EXPERTS)
def test_layers_with_experts_have_cores_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Core's experts on the CPU have other names than those of Transformer Engine's layers."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    spec = ModelSpec(**EXPERTS[name], num_experts=4, moe_ffn_hidden_size=24)
    real = Counter(tuple(param.shape) for param in core_model(spec).parameters())
    assert Counter(shape for _, _, shape, _ in listing(spec)) == real


PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama-13b": 13.0e9,
    "mixtral-8x7b": 46.7e9,
    "mixtral-8x22b": 140.6e9,
    "deepseek-v3": 671e9,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_published_number_of_parameters(preset: str) -> None:
    found = model_named(preset).num_parameters
    published = PUBLISHED.get(preset, found)
    assert found == pytest.approx(published, rel=0.01)
    if isinstance(published, int):
        assert found == published


def planned(spec: ModelSpec, shards: int, quantized: Quantization = PLAIN) -> PlannedModel:
    units = planned_units(spec, shards, shards, torch.bfloat16, quantized.weights)
    return PlannedModel(units, NO_SLOTS, quantized)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_quantized_weights_are_held_in_all_their_planes(
    recipe: str, strategy: str, shards: int
) -> None:
    """What is gathered has no whole copy, and keeps a shard only in MXFP8; bytes of what is not
    quantized: tests/plan/test_memory.py."""
    row = STRATEGIES[strategy]
    spec = ModelSpec(**{**LLAMA, "hidden_size": 256, "ffn_hidden_size": 384})
    model = planned(spec, shards, quantized=Quantization(weights=RECIPES[recipe]))
    held = model.bytes_held(row, Precision(), model.fullest_rank)
    gathers = row.shard_weights and shards > 1
    expected: Counter[str] = Counter()
    for layout in model.layouts:
        shard = 0
        whole = 0
        for plane in layout.format.planes:
            shard += layout.shard_numel // plane.elements * plane.dtype.itemsize
            whole += layout.total_numel // plane.elements * plane.dtype.itemsize
        if layout.format.quantized:
            assert shard * shards == whole
        if not gathers:
            expected["compute weights"] += whole
        elif layout.format is MXFP8:
            expected["quantized shard"] += shard
        numel = layout.shard_numel if row.shard_main else layout.total_numel
        expected["main weights"] += 4 * numel
    for kind in ("compute weights", "quantized shard", "main weights"):
        assert held.get(kind, 0) == expected[kind], kind


def test_the_fullest_rank_is_that_of_all_units() -> None:
    """32 elements on rank 1 in one unit, 16 on rank 0 in each of three; and of a model."""

    def unit(rows: int, offset: int) -> tuple[GroupLayout]:
        spec = ParamSpec(0, ("weight",), (rows, 16), torch.bfloat16, True, 16)
        segment = Segment(0, 64, 16, 2)
        placement = Placement(0, offset)
        return (GroupLayout((spec,), (segment,), (placement,), 2, 16),)

    one = PlannedUnit("a", unit(2, 32))
    three = unit(1, 0)
    others = [PlannedUnit(name, three) for name in "bcd"]
    assert PlannedModel((one,), NO_SLOTS).fullest_rank == 1
    assert PlannedModel((one, *others), NO_SLOTS).fullest_rank == 0

    spec = ModelSpec(**LLAMA)
    model = planned(spec, 8)
    row = STRATEGIES["optim"]
    held = []
    for rank in range(8):
        held.append(model.bytes_held(row, Precision(), rank)["optimizer state"])
    assert held[model.fullest_rank] == max(held)
    assert min(held) < max(held)
    assert sum(held) == 8 * spec.num_parameters


def run_main(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    printed = capsys.readouterr().out
    return json.loads(printed)


LLAMA_8B = ("--preset", "llama3-8b")
MIXTRAL = ("--preset", "mixtral-8x7b", "--num-layers", "2", "--data-parallel-size", "8")
ZERO_3 = "optim_grads_params"


def kinds_of_8b(
    capsys: pytest.CaptureFixture[str], size: int, *words: str, strategy: str = ZERO_3
) -> dict[str, int]:
    """Of Llama-3 8B, by kind, with what is between steps and at the peak."""
    chosen = ("--data-parallel-sharding-strategy", strategy, "--data-parallel-size", str(size))
    report = run_main(capsys, *LLAMA_8B, *chosen, *words)
    found = report["strategies"][strategy]
    kinds = found["bytes"]
    for name in ("between_steps", "peak"):
        kinds[name] = found[name]
    return kinds


REPLICAS = ("--num-distributed-optimizer-instances", "2")
SPLIT = (*REPLICAS, "--outer-dp-sharding-strategy", "optim")


def test_replicas_hold_a_half_each_or_split_it(capsys: pytest.CaptureFixture[str]) -> None:
    """As exactly as engines do: tests/megatron/wrapper/test_expert_instances.py."""
    alone = kinds_of_8b(capsys, 4)
    of_all = kinds_of_8b(capsys, 8)
    assert kinds_of_8b(capsys, 8, *REPLICAS) == alone
    split = kinds_of_8b(capsys, 8, *SPLIT)
    for kind in ("main weights", "optimizer state"):
        assert split[kind] == of_all[kind]
    assert split["gradient shard"] == alone["gradient shard"]
    assert split["shard of compute weights"] == alone["main weights"] // 2


def test_experts_have_replicas_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*MIXTRAL, "--expert-model-parallel-size", "2", *SPLIT)
    words += ("--data-parallel-sharding-strategy", ZERO_3)
    found = [
        run_main(capsys, *words, "--expert-num-distributed-optimizer-instances", count)
        for count in ("1", "2", "4")
    ]
    held = [one["strategies"][ZERO_3]["bytes"] for one in found]
    assert [one["replicas"] for one in found] == [{"dense": 2, "expert": n} for n in (1, 2, 4)]
    # With a replica on each rank its weights stay, and are gathered over the outer axis.
    assert "compute weights" in held[2] and "compute weights" not in held[1]
    assert held[0]["main weights"] == held[1]["main weights"] == held[2]["main weights"]
    assert held[0]["gradient shard"] < held[1]["gradient shard"] < held[2]["gradient shard"]
    assert main([*words, "--expert-num-distributed-optimizer-instances", "3"]) == 2
    said = capsys.readouterr().err
    assert "--expert-num-distributed-optimizer-instances 3: must divide the 4 ranks" in said


BOTH_COPIED = ("--fsdp-copy-engine-all-gather", "--fsdp-copy-engine-reduce-scatter")


def test_slots_take_the_memory_that_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3 8B with copy engines for both held 29.77 GiB on each of 4 GPUs (performance.md).
    More layers take the same two slots. Without fusion gradients travel in bf16."""
    found = kinds_of_8b(capsys, 4, *BOTH_COPIED, "--num-layers", "32")
    longer = kinds_of_8b(capsys, 4, *BOTH_COPIED, "--num-layers", "64")
    assert round(found["between_steps"] / GIB, 2) == 29.77
    for kind in ("weight slots", "bucket slots", "received pieces"):
        assert found[kind] == longer[kind] > 0
    narrow = kinds_of_8b(capsys, 4, *BOTH_COPIED, "--no-gradient-accumulation-fusion")
    changed = {kind for kind, count in found.items() if count != narrow[kind]}
    assert changed == {"bucket slots", "received pieces", "between_steps", "peak"}
    for kind in ("bucket slots", "received pieces"):
        assert found[kind] == 2 * narrow[kind], kind


def flags(recipe: str) -> list[str]:
    if recipe != "bf16":
        return [f"--fp8-recipe={recipe}", "--fp8-param-gather"]
    return []


@pytest.mark.parametrize(
    ("recipe", "layer"), (("tensorwise", 208), ("blockwise", 208), ("mxfp8", 430))
)
def test_what_a_layer_of_llama_takes_while_it_is_used(
    recipe: str, layer: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """MiB of all planes."""
    quantized = Quantization(weights=RECIPES[recipe])
    model = planned(model_named("llama3-8b"), 2, quantized=quantized)
    layouts = {}
    for layout in model.layouts:
        if layout.format.quantized:
            layouts[id(layout)] = layout
    [one] = layouts.values()
    gathered = one.format.nbytes(one.total_numel)
    assert round(gathered / 2**20) == layer

    # Less of one layer in the slots that hold the two largest units: the embedding is larger.
    slots = kinds_of_8b(capsys, 2, "--fsdp-double-buffer", *flags(recipe))["weight slots"]
    transposes = kinds_of_8b(capsys, 2, *flags(recipe)).get("transposes", 0)
    assert slots > 2 * gathered
    if recipe == "mxfp8":
        assert transposes == 0
    else:
        assert transposes == gathered


LINEAR_8B = 6_979_321_856
"""Elements of the weights of GEMMs in the 32 layers of Llama-3 8B."""


@pytest.mark.parametrize(
    ("words", "per_element"),
    (
        (["--fp8-format=hybrid", "--fp8-recipe=tensorwise"], 2),
        (["--fp8-format=hybrid"], 2),
        (["--fp8-format=hybrid", "--fp8-recipe=mxfp8"], 2 * 33 / 32),
        (["--fp8-format=hybrid", "--fp8-param-gather"], 0),
        ([], 0),
    ),
)
def test_autograd_keeps_quantized_copies_of_weights_that_are_not(
    words: list[str], per_element: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """13 GiB of Llama-3 8B, whatever the number of ranks; of one layer where layers run again."""
    for size, more, layers in ((2, [], 1), (8, [], 1), (8, ["--recompute-granularity=full"], 32)):
        found = kinds_of_8b(capsys, size, *words, *more)
        kept = found.get("quantized copies of weights", 0)
        assert kept == LINEAR_8B * per_element / layers
        assert found["peak"] >= found["between_steps"] + kept


def test_dtypes_of_the_policy_reach_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 gradients take half the bytes of fp32's; communication in another dtype than that of
    kept gradients takes a bucket; main weights in the compute dtype, where those are kept, none."""

    def kinds(strategy: str, *words: str) -> dict[str, int]:
        return kinds_of_8b(capsys, 8, *words, strategy=strategy)

    grads = "--megatron-fsdp-main-grads-dtype"
    comm = "--megatron-fsdp-grad-comm-dtype"
    plain = kinds("optim")
    kept_in_bf16 = kinds("optim", grads, "bf16")
    sent_in_bf16 = kinds("optim", comm, "bf16")
    assert 2 * kept_in_bf16["main gradients"] == plain["main gradients"]
    assert "reduce bucket" not in plain
    assert sent_in_bf16["reduce bucket"] > 0

    sharded = kinds(ZERO_3)
    sent_in_bf16 = kinds(ZERO_3, comm, "bf16")
    assert 2 * sent_in_bf16["reduce bucket"] == sharded["reduce bucket"]

    own = kinds("no_shard", "--megatron-fsdp-main-params-dtype", "none")
    assert "main weights" not in own
    assert "main weights" in kinds("no_shard")


def test_experts_are_held_by_the_ranks_that_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 8 ranks of ZeRO-3, 4 share each layer's 8 experts: a shard of 2 experts is a half."""
    words = ("--preset=mixtral-8x7b", "--num-layers=4", "--data-parallel-size=8", "--rank=7")
    whole = run_main(capsys, *words, "--expert-model-parallel-size=1")
    split = run_main(capsys, *words, "--expert-model-parallel-size=4")
    assert whole["parameters"] == split["parameters"]
    held = whole["strategies"][ZERO_3]["bytes"]
    more = split["strategies"][ZERO_3]["bytes"]
    assert held["main weights"] == pytest.approx(more["main weights"], rel=1e-3)
    assert held["gathered weights"] > 3 * more["gathered weights"]

    spec = replace(model_named("mixtral-8x7b"), num_layers=4)
    chosen = Configuration(8, Parallel(expert=4))
    plan = memory(spec, chosen, machine_named("h200"), microbatches=1)
    assert plan["main weights"] == more["main weights"]
    assert plan["optimizer state"] == pytest.approx(more["optimizer state"], rel=1e-3)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 4), (2, 2)])
def test_a_rank_of_a_split_model_holds_its_part(
    tensor: int, pipeline: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `plan` counts it, which simulates the engine. The last stage, with the output layer, holds
    as much as the first, with the embedding; norms are whole on each tensor-parallel rank."""
    sizes = (f"--tensor-model-parallel-size={tensor}", f"--pipeline-model-parallel-size={pipeline}")
    found = run_main(capsys, *LLAMA_8B, "--data-parallel-size=2", *sizes)
    whole = run_main(capsys, *LLAMA_8B, "--data-parallel-size=2")
    held = found["strategies"][ZERO_3]["bytes"]
    assert found["split"]["stage"] == (pipeline - 1 if pipeline > 1 else 0)
    spec = model_named("llama3-8b")
    chosen = Configuration(2 * tensor * pipeline, Parallel(tensor, pipeline))
    plan = memory(spec, chosen, machine_named("h200"), microbatches=pipeline)
    for kind in ("main weights", "optimizer state"):
        assert held[kind] == pytest.approx(plan[kind], rel=1e-3)
        rest = whole["strategies"][ZERO_3]["bytes"][kind] / held[kind]
        assert tensor * pipeline * 0.7 < rest < tensor * pipeline * 1.001
    assert main([*LLAMA_8B, *sizes]) == 0
    assert f"model parallel: {'tensor 2' if tensor > 1 else 'pipeline'}" in capsys.readouterr().out


def test_tensor_parallel_ranks_hold_other_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """As `plan` counts them: of 2 x 4 tensor and data-parallel ranks, 2 have the same experts."""
    words = ("--preset=mixtral-8x7b", "--num-layers=4", "--data-parallel-size=4")
    words += ("--tensor-model-parallel-size=2", "--expert-model-parallel-size=4")
    held = run_main(capsys, *words)["strategies"][ZERO_3]["bytes"]
    spec = replace(model_named("mixtral-8x7b"), num_layers=4)
    chosen = Configuration(8, Parallel(2, expert=4))
    plan = memory(spec, chosen, machine_named("h200"), microbatches=1)
    for kind in ("main weights", "optimizer state"):
        assert held[kind] == pytest.approx(plan[kind], rel=1e-3)


WIDE = {**PRESETS["llama3-8b"], "num_layers": 3, "hidden_size": 1024, "ffn_hidden_size": None}
BYTES = "num-layers: 1\nhidden-size: 8\nnum-attention-heads: 1\nseq-length: 16\n"
FP8_FILE = "bf16: true\nfp8-format: hybrid\nfp8-recipe: mxfp8\nfp8-param-gather: true\n"


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        (
            "num-layers: 3\nhidden_size: 2048\nffn-hidden-size: null\nlr: 1.0e-3\n",
            (*LLAMA_8B, "--hidden-size", "1024"),
            {"parameters": from_options(WIDE, "").num_parameters, "params_dtype": "fp32"},
        ),
        ("bf16: true", LLAMA_8B, {"params_dtype": "bf16"}),
        ("fp16: true", LLAMA_8B, {"params_dtype": "fp16"}),
        ("seed: 1", LLAMA_8B, {"params_dtype": "fp32"}),
        ("bf16: true", (*LLAMA_8B, "--params-dtype", "fp32"), {"params_dtype": "fp32"}),
        (BYTES, ("--vocab-size", "1000"), {"parameters": 1024 * 8 + 1016}),
        (
            f"{BYTES}disable-bias-linear: true",
            ("--vocab-size", "1000"),
            {"parameters": 1024 * 8 + 1016 - 72},
        ),
        (
            FP8_FILE,
            (*LLAMA_8B, "--padded-vocab-size=128256"),
            {"quantized": "linear weights as mxfp8"},
        ),
        ("bf16: true", (*LLAMA_8B, "--rank", "0"), {"rank": 0}),
    ],
)
def test_flags_override_the_file_and_the_file_the_preset(
    content: str,
    words: tuple[str, ...],
    expected: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text(content)
    found = run_main(capsys, "--config", str(preset), *words)
    for name, value in expected.items():
        assert found[name] == value


FOLDER = Path(__file__).parents[3] / "configs"
CONFIGS = []
for path in sorted(FOLDER.glob("*.yaml")):
    if not path.name.startswith("bridge-"):  # overrides of a recipe, no preset
        CONFIGS.append(path)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_training_presets_can_be_estimated(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_main(capsys, "--config", str(file), "--data-parallel-size", "8")
    assert list(report["strategies"]) == list(STRATEGIES)
    assert "cpu-tiny" in [other.stem for other in CONFIGS]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"vocab_size": 100}, 128),
        ({"vocab_size": 128}, 128),
        ({"vocab_size": 128, "tokenizer_type": "NullTokenizer"}, 256),
        ({"vocab_size": 100, "padded_vocab_size": 101}, 101),
        ({"vocab_size": 100, "make_vocab_size_divisible_by": 8}, 104),
    ],
)
def test_rows_of_the_embedding(options: dict[str, Any], rows: int) -> None:
    assert ModelSpec(**(LLAMA | options)).embedding_rows == rows


def test_the_table_shows_bytes_and_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "llama3-70b", "--data-parallel-size", "512", "--memory-gib", "80"]
    assert main([*arguments, *flags("mxfp8")]) == 0
    assert "linear weights as mxfp8" in capsys.readouterr().out

    assert main(arguments) == 0
    lines = {}
    for line in capsys.readouterr().out.splitlines():
        lines[line.split("  ")[0]] = line.split()
    assert next(iter(lines)).startswith("70,553,706,496 parameters, bf16")
    assert lines["kind"][2:] == list(STRATEGIES)
    fits = lines["fits before activations"]
    assert fits[3:] == ["80", "GiB", "no", "no", "no", "yes"]
    report = run_main(capsys, *arguments)
    for name, column in zip(STRATEGIES, range(-4, 0), strict=True):
        held = report["strategies"][name]
        state = held["bytes"]["optimizer state"]
        assert lines["optimizer state"][column] == f"{state / GIB:.3f}"
        assert held["peak"] == sum(held["bytes"].values())


TINY = ("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1")
FP8_TINY = (
    "--num-layers=1",
    "--hidden-size=128",
    "--num-attention-heads=2",
    "--vocab-size=128",
    "--position-embedding-type=none",
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--num-layers, --hidden-size, --num-attention-heads: not given"),
        ((*LLAMA_8B, "--num-layers", "0"), "--num-layers 0"),
        ((*LLAMA_8B, "--num-attention-heads", "33"), "--num-attention-heads 33"),
        ((*LLAMA_8B, "--num-query-groups", "5"), "--num-query-groups 5"),
        ((*LLAMA_8B, "--normalization", "BatchNorm"), "--normalization 'BatchNorm'"),
        ((*LLAMA_8B, "--position-embedding-type", "x"), "--position-embedding-type"),
        ((*LLAMA_8B, "--data-parallel-size", "0"), "--data-parallel-size 0"),
        ((*LLAMA_8B, "--data-parallel-size", "2", "--rank", "2"), "--rank 2"),
        ((*LLAMA_8B, "--memory-gib", "0"), "--memory-gib 0"),
        (("--config", "no/such/file.yaml"), "--config no/such/file.yaml"),
        (TINY, "--vocab-size is not given"),
        ((*TINY, "--vocab-size", "8"), "--max-position-embeddings"),
        ((*FP8_TINY, *flags("fast")), "--fp8-recipe 'fast' is unknown"),
        ((*FP8_TINY, "--fp8-param-gather", "--params-dtype=fp32"), "Use --params-dtype bf16"),
        ((*FP8_TINY, *flags("mxfp8"), "--ffn-hidden-size=144"), "mlp.linear_fc1.weight as mxfp8"),
        ((*LLAMA_8B, "--expert-model-parallel-size=3"), "size 3: must divide"),
        ("qk-l2-norm: true", "--qk-l2-norm True: models with it"),
        ("softmax-type: fast", "--softmax-type 'fast' is not supported"),
        (
            "add-bias-linear: true\nmoe-shared-expert-intermediate-size: 8",
            "Give --disable-bias-linear",
        ),
        ("tensor-model-parallel-size: 3", "tensor_model_parallel_size=3"),
        ((*LLAMA_8B, "--pipeline-model-parallel-size=64"), "must be at most --num-layers 32"),
        ((*LLAMA_8B, "--data-parallel-size=100000000"), "must be from 1 to 65,536"),
        ((*LLAMA_8B, "--num-layers=100000000"), "must be at most 10,000"),
        ("num_layerz: 12", "unknown key num_layerz. Did you mean num-layers?"),
        ("hidden-size: wide", "--hidden-size 'wide'"),
        ("swiglu: 1", "--swiglu 1"),
        ("bf16: true\nfp16: true", "--bf16 and --fp16"),
        ("params-dtype: int8", "--params-dtype 'int8'"),
        ("- a list", "must hold 'flag: value' lines"),
        ("a: [", "not valid YAML"),
        (
            "fp8-param-gather: true\nbf16: true\nfirst-last-layers-bf16: true",
            "--first-last-layers-bf16",
        ),
        ("megatron-fsdp-enable-fine-grained-param-gather: true", "units of parts of a layer"),
        ("fp4-format: e2m1", "--fp4-format: FP4 is not modeled. Leave it out"),
    ],
)
def test_bad_input_is_one_line_naming_option_and_value(
    words: tuple[str, ...] | str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words of the command line, or the lines of a file beside a preset."""
    if isinstance(words, str):
        preset = tmp_path / "preset.yaml"
        preset.write_text(words)
        words = (*LLAMA_8B, "--config", str(preset))
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    if "YAML" not in message:  # whose parser says more
        assert captured.err.count("\n") == 1


def test_options_that_the_page_of_memory_recommends_are_taken_or_refused_with_a_reason() -> None:
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
    _, _, advice = page.partition("\n## When a model does not fit\n")
    advice, _, _ = advice.partition("\nAn out-of-memory error")
    named = set(re.findall(r"`(--[a-z0-9-]+)", advice))
    parser = make_parser()
    taken = named & set(parser._option_string_actions)
    assert {"--chunked-optimizer-state-offload", "--recompute-granularity"} <= taken
    assert named - taken
    assert named - taken <= set(parser.not_modeled)


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (
            ("--num-distributed-optimizer-instances=4",),
            ["unsharded on one rank: expert parameters, because 4 replicas share the 4 ranks"],
        ),
        (
            ("--num-distributed-optimizer-instances=4", "--recompute-granularity=full",
             "--expert-num-distributed-optimizer-instances=1"),
            ["--recompute-granularity changes no number here"],
        ),
        (("--recompute-granularity=full", "--fp8-format=hybrid"), []),
    ],
)  # fmt: skip
def test_options_that_do_less_than_expected_are_named(
    words: tuple[str, ...], printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--preset=mixtral-8x7b", "--num-layers=2", "--data-parallel-size=8")
    given = (*model, "--expert-model-parallel-size=2", *words)
    assert main(given) == 0
    _, *remarks = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert len(remarks) == len(printed)
    for line, text in zip(remarks, printed, strict=True):
        assert line.startswith(text)


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        ({}, PLAIN),
        ({"fp8_recipe": "mxfp8"}, PLAIN),
        ({"fp8_param_gather": True}, Quantization(weights=PER_TENSOR)),
        ({"fp8": "hybrid", "fp8_param": True, "fp8_recipe": "mxfp8"}, Quantization(weights=MXFP8)),
        (
            {"fp8_format": "e4m3", "recompute_granularity": "full"},
            Quantization(products=PER_TENSOR, recomputes=True),
        ),
    ),
)
def test_what_options_of_fp8_mean(options: dict[str, Any], expected: Quantization) -> None:
    """Megatron's flags, and the fields that its configs have."""
    assert quantization(options, "bf16") == expected
