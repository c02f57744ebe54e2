"""`plan`: predictions, the search, what is printed, and what is refused."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fsdp_adapter.cli.estimate import plan_model
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8, PER_TENSOR
from megatron_fsdp_adapter.diagnostics.memory import LIFE, PERSISTENT, Precision
from megatron_fsdp_adapter.models.quantization import Quantization
from megatron_fsdp_adapter.models.sources import (
    PRESETS,
    dense_model,
    from_hugging_face,
    from_options,
    model_named,
)
from megatron_fsdp_adapter.models.spec import ModelSpec, Parallel, layers_of, listing
from megatron_fsdp_adapter.planning import command, prediction, report, search
from megatron_fsdp_adapter.planning.configurations import (
    ACTIVATIONS,
    Configuration,
    at_its_most,
    groups,
    memory,
    planned,
)
from megatron_fsdp_adapter.planning.features import Features, features_of
from megatron_fsdp_adapter.planning.machine import Group, machine_named
from megatron_fsdp_adapter.planning.prediction import predict
from megatron_fsdp_adapter.planning.report import bridge_overrides, megatron_flags, plain_call
from megatron_fsdp_adapter.planning.search import (
    NOT_LAUNCH_BOUND,
    Plan,
    Wanted,
    candidates,
    plan,
    splits,
)
from megatron_fsdp_adapter.planning.shapes import waits_for_longer
from tests.adapter.test_sizes import layers_of_core

H200 = machine_named("h200")


def model(name: str, layers: int, seq_length: int = 4096, **more: Any) -> ModelSpec:
    return replace(model_named(name), num_layers=layers, seq_length=seq_length, **more)


FEW = model("llama3-8b", 4)
GIB = 1 << 30


TWO_LAYERS = 300_000_000
"""Elements: more than one layer has, fewer than two."""

AS_ESTIMATED = {
    **{name: (FEW, Configuration(8, strategy=name)) for name in STRATEGIES},
    "copy engines": (FEW, Configuration(8, copies=True)),
    **{form.name: (FEW, Configuration(8, features=Features(Quantization(form))))
       for form in (PER_TENSOR, BLOCK128, MXFP8)},
    "joined layers": (FEW, Configuration(8, features=Features(unit_numel=TWO_LAYERS))),
    "layers joined by default": (model("llama-1.5b", 20), Configuration(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_ESTIMATED)
def test_memory_of_a_plan_is_that_of_estimate(name):
    spec, chosen = AS_ESTIMATED[name]
    row, quantized = STRATEGIES[chosen.strategy], chosen.features.quantized
    theirs = plan_model(
        spec, 8, torch.bfloat16, chosen.slots, quantized, unit_numel=chosen.features.unit_numel
    )
    mine, held = planned(spec, chosen), theirs.bytes_held(row, Precision(), 0)
    assert mine.bytes_held(row, chosen.features.precision, 0) == held
    assert [unit.name for unit in mine.units] == [unit.name for unit in theirs.units]
    assert mine.units[1].layers == (2 if "joined" in name else 1)
    kept = {kind: count for kind, count in held.items() if LIFE[kind] == PERSISTENT}
    found = memory(spec, chosen, H200, 1)
    assert {kind: found[kind] for kind in kept} == kept


@pytest.mark.parametrize(
    ("gpus", "layers", "strategy", "copies", "microbatches", "measured"),
    [(2, 24, "optim_grads_params", False, 1, 52.70), (2, 24, "optim", False, 1, 86.01),
     (2, 24, "optim_grads_params", False, 4, 64.01), (2, 24, "optim_grads_params", True, 1, 58.22),
     (4, 32, "optim_grads_params", False, 1, 43.87), (4, 32, "optim", False, 4, 87.34),
     (4, 32, "optim_grads", False, 4, 64.93), (4, 32, "optim_grads_params", True, 1, 49.79)],
)  # fmt: skip
def test_the_peak_is_what_was_measured(gpus, layers, strategy, copies, microbatches, measured):
    spec = model("llama3-8b", layers)
    chosen = Configuration(gpus, strategy=strategy, copies=copies)
    found = memory(spec, chosen, H200, microbatches)
    peak = sum(found.values()) / GIB - H200.gpu.reserved_gib
    assert peak == pytest.approx(measured, rel=0.04)


def test_what_does_not_exist_at_once_is_not_added_up():
    held = {"main weights": 10, "gradient shard": 5, "reduce bucket": 3, "gathered weights": 2}
    assert sum(at_its_most(held, 4, again=False).values()) == 20
    assert sum(at_its_most(held, 20, again=False).values()) == 32
    assert at_its_most(held, 20, again=True)["gradient shard"] == 5
    assert ACTIVATIONS not in at_its_most(held, 4, again=False)


@pytest.mark.parametrize(
    ("spec", "chosen", "more"),
    [(model("llama3-8b", 14), Configuration(4, copies=True), 14),
     (model("llama-1.5b", 20, 8192), Configuration(2, fused=False), 10)],
)  # fmt: skip
def test_a_prediction_of_few_layers_is_that_of_all_of_them(spec, chosen, more, monkeypatch):
    """Joined by default or not."""
    further = predict(spec, chosen, H200, 8)
    monkeypatch.setattr(prediction, "MORE", more)
    every = predict(spec, chosen, H200, 8)
    assert further.ms == pytest.approx(every.ms, rel=0.01)
    assert further.exposed_ms == pytest.approx(every.exposed_ms, rel=0.1, abs=0.5)


def test_a_faster_machine_is_never_slower():
    chosen = Configuration(8)
    now = predict(FEW, chosen, H200, 8).ms
    network = H200.network
    links = {ranks: 2 * gbps for ranks, gbps in network.link_gbps.items()}
    for better in (
        replace(H200, network=replace(network, link_gbps=links)),
        replace(H200, gpu=replace(H200.gpu, memory_tbps=2 * H200.gpu.memory_tbps)),
        replace(H200, gpu=replace(H200.gpu, product_tflops=2 * H200.gpu.product_tflops)),
        replace(H200, host=H200.host / 2),
    ):
        assert predict(FEW, chosen, better, 8).ms <= 1.001 * now


def test_ranks_of_a_domain_are_tensor_parallel_ones_first():
    found = groups(Configuration(64, Parallel(tensor=4), instances=8), H200)
    assert found["tensor"] == Group(4, 4)
    assert found["dense"] == Group(2, 2) and found["dense outer"] == Group(8, 1)


def test_stages_share_out_all_layers_and_all_parameters():
    spec, parallel = model("llama3-8b", 10), Parallel(pipeline=4)
    numbers = [n for stage in range(4) for n in layers_of(spec, parallel, stage)]
    assert numbers == list(range(10))
    whole = sorted(fqn for _, fqn, _, _ in listing(spec, Parallel()))
    parts = sorted(fqn for stage in range(4) for _, fqn, _, _ in listing(spec, parallel, stage))
    assert parts == whole


def wanted(**given) -> Wanted:
    return Wanted(**{
        "spec": FEW, "machine": H200, "gpus": 8, "global_batch": 16, "memory_gib": 140.0,
        "fixed": {"tensor": 1, "pipeline": 1, "recompute": False, "microbatch": 1}, "tries": 4,
        **given,
    })  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(wanted())


def test_the_best_is_first_and_fits_and_less_memory_never_gives_a_faster_plan(found):
    times = [one.ms for one in found.predictions]
    assert times == sorted(times) and len(times) == 4
    assert all(one.peak_bytes <= 140 * GIB for one in found.predictions)
    tight = plan(wanted(memory_gib=28.0)).predictions[0]
    assert tight.ms >= times[0] and tight.peak_bytes <= 28 * GIB


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"memory_gib": 8.0}, "fits in 8 GiB.*Use more GPUs"),
     ({"fixed": {"tensor": 3}}, "with tensor 3: tensor_model_parallel_size=3: 3 "),
     ({"gpus": 7, "global_batch": 100, "fixed": {}},
      r"of 100: global_batch_size=100: no mult.* x 7"),
     ({"gpus": 64, "global_batch": 64, "fixed": {"tensor": 16}},
      "tensor 16: the search has none with these"),
     ({"gpus": 0}, "--gpus 0")],
)  # fmt: skip
def test_options_that_leave_nothing_are_an_error_that_names_them(given, reason):
    with pytest.raises(ValueError, match=reason):
        plan(wanted(**given))


def every(**given) -> list[Configuration]:
    chosen = wanted(**given)
    return [one for split in splits(chosen) for one in candidates(chosen, split)]


def test_candidates_are_what_the_options_and_the_machine_leave():
    far = every(gpus=64, global_batch=64)
    inside = [one.shards["dense"][0] * one.parallel.tensor for one in far if one.copies]
    assert inside and max(inside) <= 8, "copy engines and shards stay inside a domain"
    told = every(gpus=64, global_batch=64, fixed={"tensor": 2, "strategy": "optim"})
    assert {(one.strategy, one.parallel.tensor) for one in told} == {("optim", 2)}
    assert len({one.parallel.pipeline for one in told}) > 1
    alone = every(gpus=1, global_batch=1)
    assert {one.strategy for one in alone} == {"optim"}, "nothing to shard under four names"


def test_a_graph_is_not_tried_where_the_host_does_not_limit():
    found = plan(wanted(tries=8))
    fast = [one.configuration for one in found.predictions if one.configuration.graph]
    assert not fast and any(why == NOT_LAUNCH_BOUND for _, why in found.refused)
    slow = plan(wanted(tries=8, machine=replace(H200, host=6.0)))
    assert slow.predictions[0].configuration.graph


NARROW = Features(bf16_wire=True)
OF_MEGATRON = features_of({
    "fp8_format": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": True,
    "fsdp_unsharded_budget_gib": 4.0,
})  # fmt: skip
FLAGS = [
    (FEW, Configuration(64, Parallel(tensor=2, recompute=True), instances=4, outer_optim=True,
                        copies=True),
     ("--use-megatron-fsdp", "--tensor-model-parallel-size 2", "--sequence-parallel",
      "--data-parallel-sharding-strategy optim_grads_params",
      "--num-distributed-optimizer-instances 4", "--outer-dp-sharding-strategy optim",
      "--fsdp-copy-engine-all-gather", "--fsdp-copy-engine-reduce-scatter",
      "--recompute-granularity full"), ("unit-size", "layout")),
    # Megatron splits experts like the rest unless told.
    (model_named("deepseek-v3"), Configuration(16, Parallel(tensor=2, pipeline=2, expert=4)),
     ("--pipeline-model-parallel-layout 'Et*31|t*30L'", "--expert-tensor-parallel-size 1",
      "'model.pipeline_model_parallel_layout=Et*31|t*30L'"), ()),
    (model_named("llama3-70b"), Configuration(4, Parallel(1, 4, 2)),
     ("--num-virtual-stages-per-pipeline-rank 2",), ("layout",)),
    (FEW, Configuration(2, features=OF_MEGATRON),
     ("--fp8-recipe blockwise", "--fp8-param-gather", "--fsdp-unsharded-budget-gib 4.0"), ()),
    (FEW, Configuration(2, features=NARROW), ("ddp.megatron_fsdp_grad_comm_dtype=bf16",), ()),
    (FEW, Configuration(2, features=Features(unit_numel=TWO_LAYERS)),
     (f"--suggested-communication-unit-size {TWO_LAYERS}",), ()),
    (FEW, Configuration(2, features=Features(unit_numel=0)),
     ("--suggested-communication-unit-size 0",), ()),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "chosen", "printed", "absent"), FLAGS)
def test_flags_and_overrides_are_those_of_the_options(spec, chosen, printed, absent):
    text = megatron_flags(spec, chosen) + " " + bridge_overrides(spec, chosen)
    assert all(words in text for words in printed), text
    assert not any(words in text for words in absent), text


def told_to_core(spec, text: str) -> dict[str, Any]:
    """The model's config that Megatron-LM makes of printed flags."""
    words = shlex.split(text)
    named: dict[str, Any] = {}
    for flag, value in zip(words, [*words[1:], "--"], strict=True):
        if flag.startswith("--"):
            told = True if value.startswith("--") else int(value) if value.isdigit() else value
            named[flag[2:].replace("-", "_")] = told
    virtual = named.pop("num_virtual_stages_per_pipeline_rank", None)
    fields = {one.name for one in dataclasses.fields(TransformerConfig)}
    return {
        "num_layers": spec.num_layers, "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads, "num_query_groups": spec.query_groups,
        "num_moe_experts": spec.num_experts, "add_bias_linear": False,
        "virtual_pipeline_model_parallel_size": virtual,
        **{name: value for name, value in named.items() if name in fields},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "gpus", "batch"),
    [(name, 64, 512) for name in PRESETS]
    + [("deepseek-v3", 1024, 8192), ("deepseek-v3", 256, 4096)]
    + [("llama3-405b", 16384, 2048), ("llama3-70b", 96, 768)],
)  # fmt: skip
def test_megatron_core_builds_every_split_that_is_planned(preset, gpus, batch):
    """Of each stage and virtual stage the layers are those that core builds, by the printed flags;
    of the uneven ones too."""
    spec = model_named(preset)
    given = wanted(spec=spec, gpus=gpus, global_batch=batch, fixed={"microbatch": 1})
    every = {split.parallel for split in splits(given) if not split.parallel.recompute}
    assert len(every) > 5
    for parallel in every:
        text = megatron_flags(spec, Configuration(gpus, parallel))
        found = layers_of_core(told_to_core(spec, text))
        assert found is not None, text
        stages = [len(layers_of(spec, parallel, stage)) for stage in range(parallel.pipeline)]
        assert [sum(chunks) for chunks in found] == stages and sum(stages) == spec.num_layers
        assert {len(chunks) for chunks in found} == {parallel.virtual}
        assert max(map(max, found)) - min(map(min, found)) <= 1


def test_virtual_stages_wait_for_the_longest():
    spec = model("llama3-8b", 10)
    even, uneven = (Parallel(pipeline=2, virtual=n) for n in (5, 4))
    assert waits_for_longer(spec, even, 0) == waits_for_longer(spec, Parallel(pipeline=4), 0) == 0
    # Chunks of 2, 1, 1 and 1 layers take turns with another stage's.
    assert waits_for_longer(spec, uneven, 0) == pytest.approx(4 * 2 / 5 - 1)


@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [4, 16])
def test_activations_in_flight_are_those_of_cores_schedule(monkeypatch, virtual, microbatches):
    monkeypatch.setattr(ps, "get_pipeline_model_parallel_world_size", lambda: 4)
    chunks = virtual if virtual > 1 else None
    monkeypatch.setattr(ps, "get_virtual_pipeline_model_parallel_world_size", lambda: chunks)
    for stage in range(4):
        monkeypatch.setattr(ps, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        _, _, warmup, left = get_pp_rank_microbatches(microbatches, virtual, 4)
        passes = warmup + (left > 0)
        assert Parallel(1, 4, virtual).in_flight(stage, microbatches) == passes / virtual


def run(capsys, *words: str) -> tuple[int, str]:
    status = command.main(words)
    seen = capsys.readouterr()
    return status, seen.out + seen.err


ONE_STAGE = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")
RUN = ("--seq-length", "4096", "--gpus", "2", "--global-batch-size", "2", "--tries", "2",
       *ONE_STAGE)  # fmt: skip
SMALL = ("--preset", "llama3-8b", "--num-layers", "4", *RUN)
ONE_TRY = ("--preset", "llama3-8b", "--num-layers", "32", *RUN, "--tries", "1")
COMMANDS: list[tuple[tuple[str, ...], int, tuple[str, ...], tuple[str, ...]]] = [
    ((*SMALL, "--explain"), 0,
     ("ms/step", "Megatron-LM", "all-gather", "waits for", "decoder.layers.0/dense",
      "casts of weights", "to measure it      python scripts/benchmark.py",
      "--preset configs/llama3-8b.yaml --num-layers 4 --seq-length 4096", "--ranks 2",
      "--num-microbatches 1"), ("children_in_order", "layers were simulated")),  # all 4 were
    ((*ONE_TRY, "--explain"), 0, ("7 of 32 layers were simulated",), ()),
    ((*SMALL, "--tries", "6"), 0, (NOT_LAUNCH_BOUND, "why not", "like it: "), ()),
    (("--preset", "llama3-8b", "--config", "x"), 2, ("Give one of them",), ()),
    (("--hf-config", "/nowhere/config.json"), 2, ("no such file",), ()),
    (("--preset", "llama3-8b", "--hidden-size", "8"), 2,
     ("only --num-layers and --seq-length",), ()),
    (("--num-layers", "2"), 2, ("--vocab-size is not given",), ()),
    (("--preset", "llama3-8b", "--curve", "eight"), 2, ("Write numbers of GPUs",), ()),
    ((*SMALL, "--global-batch-size", "3"), 2, ("global_batch_size=3: no multiple of",), ()),
]
"""Words, exit status, what is printed and what is not."""


@pytest.mark.parametrize(("words", "status", "printed", "absent"), COMMANDS)
def test_the_command_prints_a_table_flags_reasons_and_the_step(
    capsys, words, status, printed, absent
):
    found, text = run(capsys, *words)
    assert found == status
    assert not [part for part in printed if part not in text], text
    assert not [part for part in (*absent, "Traceback") if part in text], text
    assert text.count(NOT_LAUNCH_BOUND) <= 1, "configurations that one reason refuses are one line"


def test_what_does_not_fit_is_told_with_what_needs_least(capsys):
    words = ("--preset", "llama3-8b", "--gpus", "2", "--global-batch-size", "2", "--tries", "1")
    status, text = run(capsys, *words, "--memory-gib", "30")
    least = int(re.search(r"the smallest needs ([\d,]+) GiB \(.*recompute\)", text)[1])
    assert status == 2 and 30 < least < 80
    assert run(capsys, *words, "--memory-gib", str(least + 1))[0] == 0
    assert run(capsys, *words, "--memory-gib", str(least - 1))[0] == 2


def test_a_first_choice_that_leaves_little_memory_says_so_with_one_that_leaves_more(found):
    first, *_, last = sorted(found.predictions, key=lambda one: -one.peak_bytes)
    last = replace(last, ms=1.01 * first.ms)
    tight = replace(found.wanted, memory_gib=1.01 * first.peak_bytes / GIB)
    [line] = report._margin(replace(found, wanted=tight, predictions=[first, last]))
    assert "GiB are left" in line and f"with {last.configuration.name}, 1.0% slower" in line
    [line] = report._margin(replace(found, wanted=tight, predictions=[first]))
    assert line.endswith("--memory-gib plans for less")
    assert report._margin(found) == []


def test_weights_sharded_alone_are_in_the_table_or_among_the_reasons():
    """What a user of FSDP compares with, however much slower or larger it is."""
    given = wanted(spec=model("llama3-70b", 8, 8192), fixed={}, tries=6)
    found: list[prediction.Prediction] = []
    refused: list[tuple[str, str]] = []
    search._add_sharded_alone(given, 140 * GIB, found, refused)
    [one] = found
    assert one.configuration.parallel.tensor == one.configuration.parallel.pipeline == 1
    assert one.configuration.strategy == "optim_grads_params" and not refused
    search._add_sharded_alone(given, 140 * GIB, found, refused)
    assert len(found) == 1, "it was there"
    search._add_sharded_alone(given, 8 * GIB, [], refused)
    [(name, reason)] = refused
    assert name.startswith("optim_grads_params") and reason.endswith("GiB or more")
    assert any(one.configuration == found[0].configuration for one in plan(given).predictions)


def test_the_plain_call_has_its_mesh_and_units_and_is_not_of_split_models():
    call = plain_call(Configuration(8, strategy="optim_grads"))
    assert call.startswith("fully_shard_model(module, init_device_mesh('cuda', (8,)), "
                           "fsdp_unit_modules=['THE_LAYER'], data_parallel")  # fmt: skip
    ast.parse(call)
    outer = plain_call(Configuration(64, instances=8, outer_optim=True))
    assert "init_device_mesh('cuda', (8, 8))" in outer and "'optim'" in outer
    for parallel in (Parallel(tensor=2), Parallel(pipeline=2), Parallel(expert=2)):
        assert plain_call(Configuration(8, parallel)) is None


def test_json_and_a_curve_have_a_row_for_each_number_of_gpus(capsys):
    status, text = run(capsys, *SMALL, "--json")
    best = json.loads(text)["configurations"][0]
    assert status == 0 and best["ms"] > 0 and best["peak_bytes"] == sum(best["bytes"].values())
    status, text = run(capsys, *SMALL, "--curve", "1,2", "--tries", "1")
    assert status == 0 and len(text.splitlines()) == 3


def test_without_matplotlib_a_plot_is_one_clear_error(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, text = run(capsys, *SMALL, "--plot", str(tmp_path / "x.png"))
    assert status == 2 and "matplotlib is not installed" in text


def test_pictures_say_what_they_show(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from megatron_fsdp_adapter.planning import plot

    drawn, axes_of = [], plot._axes
    monkeypatch.setattr(plot, "_axes", lambda: drawn.append(axes_of()) or drawn[-1])
    pictures = [str(tmp_path / name) for name in ("step.png", "curve.png")]
    assert run(capsys, *ONE_TRY, "--plot", pictures[0])[0] == 0
    assert run(capsys, *SMALL, "--tries", "1", "--curve", "1,2", "--plot", pictures[1])[0] == 0
    without = [w for w in SMALL[:-4] if w not in ("--global-batch-size", "--gpus", "2")]
    assert run(capsys, *without, "1", "--curve", "1,2", "--plot", pictures[1])[0] == 0
    (_, step), (_, curve), (_, grows) = drawn
    assert "H200, 16 sequences of 4,096 tokens a GPU: the" in grows.get_title()
    steps = grows.figure.axes[1]
    assert steps.get_ylim()[0] == 0 and steps.get_yscale() == "linear", "1% is no steep rise"
    monkeypatch.setattr(plot, "MANY", 0)
    assert run(capsys, *without, "1", "--curve", "1,2", "--plot", pictures[1])[0] == 0
    assert drawn[-1][1].figure.axes[1].get_yscale() == "log"
    title = "llama3-8b, 32 layers, H200, 2 sequences of 4,096 tokens, 2 GPUs"
    assert step.get_title().startswith(title)
    assert "1 of 1 microbatches, 7 of 32 layers" in step.get_title()
    named = step.get_legend_handles_labels()[1]
    assert {"forward", "backward", "optimizer", "reduce"} <= set(named)
    assert len(named) == len(set(named)) and step.get_xlabel() == "ms" and step.get_ylabel()
    low, high = curve.get_ylim()
    best = max(curve.get_lines()[0].get_ydata())
    assert low == 0 and best < high < 1.3 * best and "llama3-8b" in curve.get_title()
    assert [axes.get_ylabel() for axes in curve.figure.axes] == ["MFU, %", "seconds a step"]
    assert [label.get_text() for label in curve.get_xticklabels()] == ["1", "2"]


def test_models_of_hugging_face_have_megatrons_sizes(tmp_path):
    path = tmp_path / "config.json"
    known = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    path.write_text(json.dumps(known))
    assert from_hugging_face(str(path)).num_parameters == model_named("llama3-8b").num_parameters
    path.write_text(json.dumps({**known, "vocab_size": 32000, "num_local_experts": 8}))
    found = from_hugging_face(str(path))
    assert found.num_parameters == model_named("mixtral-8x7b").num_parameters
    path.write_text(json.dumps({**known, "num_nextn_predict_layers": 1}))
    [line] = from_hugging_face(str(tmp_path)).left_out  # its folder
    assert line.startswith("mtp_num_layers=1: multi-token prediction (num_nextn")
    path.write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(ValueError, match="has no num_hidden_layers"):
        from_hugging_face(str(path))


def test_flags_of_megatron_make_the_same_model():
    options = dict(PRESETS["llama3-8b"])
    assert from_options(options, "the model") == dense_model(options)
    assert from_options({**options, "num_experts": 8}, "x").moe_router_topk == 2
    with pytest.raises(ValueError, match="--moe-router-topk 9: must be from 1 to --num-experts 8"):
        from_options({**options, "num_experts": 8, "moe_router_topk": 9}, "x")


def test_stages_of_as_many_layers_take_as_long_wherever_they_are():
    # The first one runs a backward and the forward of another microbatch in turn.
    spec = replace(model_named("llama3-8b"), vocab_size=1024)
    chosen = Configuration(8, Parallel(pipeline=8), "optim")
    first, last = (prediction._stage(spec, chosen, H200, 32, stage)[0] for stage in (0, 7))
    assert first == pytest.approx(last, rel=0.02)
