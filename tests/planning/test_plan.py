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
from megatron_fsdp_adapter.cli.gpt import PRESETS, config_from
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.diagnostics.memory import LIFE, PERSISTENT, Precision
from megatron_fsdp_adapter.planning import command, prediction, report, search
from megatron_fsdp_adapter.planning.configurations import (
    ACTIVATIONS,
    Configuration,
    at_its_most,
    groups,
    memory,
    planned,
)
from megatron_fsdp_adapter.planning.machine import Group, machine_named
from megatron_fsdp_adapter.planning.models import from_hugging_face, from_options, shape_named
from megatron_fsdp_adapter.planning.prediction import predict
from megatron_fsdp_adapter.planning.report import bridge_overrides, megatron_flags, plain_call
from megatron_fsdp_adapter.planning.search import NOT_LAUNCH_BOUND, Wanted, candidates, plan, splits
from megatron_fsdp_adapter.planning.shapes import (
    Parallel,
    layers_of,
    listing,
    waits_for_longer,
    with_layers,
)
from tests.adapter.test_sizes import layers_of_core

H200 = machine_named("h200")
pytestmark = pytest.mark.once

FEW = replace(with_layers(shape_named("llama3-8b"), 4), seq_length=4096)
GIB = 1 << 30


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("copies", [False, True])
def test_memory_of_a_plan_is_that_of_estimate(strategy, copies):
    chosen = Configuration(8, strategy=strategy, copies=copies and strategy == "optim_grads_params")
    mine = planned(FEW, chosen)
    theirs = plan_model(FEW.gpt, 8, torch.bfloat16, chosen.slots)
    row, precision = STRATEGIES[strategy], Precision()
    assert mine.num_parameters == theirs.num_parameters
    assert mine.bytes_held(row, precision, 0) == theirs.bytes_held(row, precision, 0)
    kept = {k: n for k, n in theirs.bytes_held(row, precision, 0).items() if LIFE[k] == PERSISTENT}
    found = memory(FEW, chosen, H200, 1)
    assert {kind: found[kind] for kind in kept} == kept


@pytest.mark.parametrize(
    ("gpus", "layers", "strategy", "copies", "microbatches", "measured"),
    [(2, 24, "optim_grads_params", False, 1, 52.70), (2, 24, "optim", False, 1, 86.01),
     (2, 24, "optim_grads_params", False, 4, 64.01), (2, 24, "optim_grads_params", True, 1, 58.22),
     (4, 32, "optim_grads_params", False, 1, 43.87), (4, 32, "optim", False, 4, 87.34),
     (4, 32, "optim_grads", False, 4, 64.93), (4, 32, "optim_grads_params", True, 1, 49.79)],
)  # fmt: skip
def test_the_peak_is_what_was_measured(gpus, layers, strategy, copies, microbatches, measured):
    shape = replace(with_layers(shape_named("llama3-8b"), layers), seq_length=4096)
    chosen = Configuration(gpus, strategy=strategy, copies=copies)
    found = memory(shape, chosen, H200, microbatches)
    peak = sum(found.values()) / GIB - H200.gpu.reserved_gib
    assert peak == pytest.approx(measured, rel=0.04)


def test_what_does_not_exist_at_once_is_not_added_up():
    held = {"main weights": 10, "gradient shard": 5, "reduce bucket": 3, "gathered weights": 2}
    assert sum(at_its_most(held, 4, again=False).values()) == 20
    assert sum(at_its_most(held, 20, again=False).values()) == 32
    assert at_its_most(held, 20, again=True)["gradient shard"] == 5
    assert ACTIVATIONS not in at_its_most(held, 4, again=False)


def test_a_prediction_of_few_layers_is_that_of_all_of_them(monkeypatch):
    from megatron_fsdp_adapter.planning import prediction

    shape = replace(with_layers(shape_named("llama3-8b"), 14), seq_length=4096)
    chosen = Configuration(4, copies=True)
    further = predict(shape, chosen, H200, 8)
    monkeypatch.setattr(prediction, "MORE", 14)
    every = predict(shape, chosen, H200, 8)
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
    shape = replace(with_layers(shape_named("llama3-8b"), 10))
    parallel = Parallel(pipeline=4)
    numbers = [n for stage in range(4) for n in layers_of(shape, parallel, stage)]
    assert numbers == list(range(10))
    whole = sorted(fqn for _, fqn, _, _ in listing(shape, Parallel()))
    parts = sorted(fqn for stage in range(4) for _, fqn, _, _ in listing(shape, parallel, stage))
    assert parts == whole


def test_presets_have_the_sizes_that_they_are_known_by():
    known = {"llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.9, "llama-13b": 13.0,
             "mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6, "deepseek-v3": 671.0}  # fmt: skip
    for name, billions in known.items():
        assert shape_named(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01), name
    assert set(known) <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_estimate_and_plan_count_the_same_parameters(name):
    """By the same listing; of a mixture estimate says what does count them."""
    if "num_experts" in PRESETS[name]:
        with pytest.raises(ValueError, match=r"--num-experts .* use `plan`"):
            config_from(PRESETS[name])
        return
    theirs = plan_model(config_from(PRESETS[name]), 8, torch.bfloat16)
    assert shape_named(name).num_parameters == theirs.num_parameters
    assert shape_named("llama3-8b").num_parameters == 8_030_261_248


def wanted(**given) -> Wanted:
    return Wanted(**{
        "shape": FEW, "machine": H200, "gpus": 8, "global_batch": 16, "memory_gib": 140.0,
        "fixed": {"tensor": 1, "pipeline": 1, "recompute": False, "microbatch": 1}, "tries": 4,
        **given,
    })  # fmt: skip


def test_the_best_is_first_and_fits():
    found = plan(wanted())
    times = [one.ms for one in found.predictions]
    assert times == sorted(times) and len(times) == 4
    assert all(one.peak_bytes <= 140 * GIB for one in found.predictions)


def test_less_memory_never_gives_a_faster_plan_and_too_little_is_an_error():
    roomy, tight = (plan(wanted(memory_gib=gib)).predictions[0] for gib in (140.0, 28.0))
    assert tight.ms >= roomy.ms and tight.peak_bytes <= 28 * GIB
    with pytest.raises(ValueError, match="fits in 8 GiB.*use more GPUs"):
        plan(wanted(memory_gib=8.0))


def test_options_that_leave_nothing_are_an_error_that_names_them():
    with pytest.raises(ValueError, match="with tensor 3: tensor_model_parallel_size=3: 3 "):
        plan(wanted(fixed={"tensor": 3}))
    with pytest.raises(ValueError, match=r"of 100: global_batch_size=100: no mult.* x 7"):
        plan(wanted(gpus=7, global_batch=100, fixed={}))
    with pytest.raises(ValueError, match="tensor 16: none that is searched for"):
        plan(wanted(gpus=64, global_batch=64, fixed={"tensor": 16}))
    with pytest.raises(ValueError, match="--gpus 0"):
        wanted(gpus=0)


def test_copy_engines_and_shards_stay_inside_a_domain():
    far = wanted(gpus=64, global_batch=64)
    every = [chosen for split in splits(far) for chosen in candidates(far, split)]
    assert any(chosen.copies for chosen in every)
    for chosen in every:
        inner, _ = chosen.shards["dense"]
        assert not chosen.copies or inner * chosen.parallel.tensor <= 8


def test_what_is_fixed_is_all_that_is_tried():
    given = wanted(gpus=64, global_batch=64, fixed={"tensor": 2, "strategy": "optim"})
    every = [chosen for split in splits(given) for chosen in candidates(given, split)]
    assert every and {c.strategy for c in every} == {"optim"}
    assert {c.parallel.tensor for c in every} == {2}
    assert len({c.parallel.pipeline for c in every}) > 1


def test_a_graph_is_not_tried_where_the_host_does_not_limit():
    found = plan(wanted(tries=8))
    fast = [one.configuration for one in found.predictions if one.configuration.graph]
    assert not fast and any(why == NOT_LAUNCH_BOUND for _, why in found.refused)
    slow = plan(wanted(tries=8, machine=replace(H200, host=6.0)))
    assert slow.predictions[0].configuration.graph


def test_one_rank_has_nothing_to_shard_under_four_names():
    alone = wanted(gpus=1, global_batch=1)
    every = [chosen for split in splits(alone) for chosen in candidates(alone, split)]
    assert {chosen.strategy for chosen in every} == {"optim"}


def test_flags_are_those_of_the_options():
    chosen = Configuration(
        64, Parallel(tensor=2, recompute=True), instances=4, outer_optim=True, copies=True
    )
    text = megatron_flags(FEW, chosen)
    for words in (
        "--use-megatron-fsdp", "--tensor-model-parallel-size 2", "--sequence-parallel",
        "--data-parallel-sharding-strategy optim_grads_params",
        "--num-distributed-optimizer-instances 4", "--outer-dp-sharding-strategy optim",
        "--fsdp-copy-engine-all-gather", "--fsdp-copy-engine-reduce-scatter",
        "--recompute-granularity full",
    ):  # fmt: skip
        assert words in text


def told_to_core(shape, text: str) -> dict[str, Any]:
    """The model's config that Megatron-LM makes of printed flags."""
    words = shlex.split(text)
    named: dict[str, Any] = {}
    for flag, value in zip(words, [*words[1:], "--"], strict=True):
        if flag.startswith("--"):
            told = True if value.startswith("--") else int(value) if value.isdigit() else value
            named[flag[2:].replace("-", "_")] = told
    virtual = named.pop("num_virtual_stages_per_pipeline_rank", None)
    fields = {one.name for one in dataclasses.fields(TransformerConfig)}
    gpt, experts = shape.gpt, shape.experts
    return {
        "num_layers": gpt.num_layers, "hidden_size": gpt.hidden_size,
        "num_attention_heads": gpt.num_attention_heads, "num_query_groups": gpt.query_groups,
        "num_moe_experts": experts and experts.number, "add_bias_linear": False,
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
    shape = shape_named(preset)
    given = wanted(shape=shape, gpus=gpus, global_batch=batch, fixed={"microbatch": 1})
    every = {split.parallel for split in splits(given) if not split.parallel.recompute}
    assert len(every) > 5
    for parallel in every:
        text = megatron_flags(shape, Configuration(gpus, parallel))
        found = layers_of_core(told_to_core(shape, text))
        assert found is not None, text
        stages = [len(layers_of(shape, parallel, stage)) for stage in range(parallel.pipeline)]
        assert [sum(chunks) for chunks in found] == stages and sum(stages) == shape.gpt.num_layers
        assert {len(chunks) for chunks in found} == {parallel.virtual}
        assert max(map(max, found)) - min(map(min, found)) <= 1


def test_stages_of_different_numbers_of_layers_have_a_layout_and_experts_are_whole():
    shape = shape_named("deepseek-v3")
    chosen = Configuration(16, Parallel(tensor=2, pipeline=2, expert=4))
    text = megatron_flags(shape, chosen)
    assert "--pipeline-model-parallel-layout 'Et*31|t*30L'" in text
    assert "--expert-tensor-parallel-size 1" in text, "Megatron splits experts like the rest"
    assert "'model.pipeline_model_parallel_layout=Et*31|t*30L'" in bridge_overrides(shape, chosen)
    even = megatron_flags(shape_named("llama3-70b"), Configuration(4, Parallel(1, 4, 2)))
    assert "--num-virtual-stages-per-pipeline-rank 2" in even and "layout" not in even


def test_virtual_stages_wait_for_the_longest():
    shape = with_layers(shape_named("llama3-8b"), 10)
    even, uneven = (Parallel(pipeline=2, virtual=n) for n in (5, 4))
    assert waits_for_longer(shape, even, 0) == waits_for_longer(shape, Parallel(pipeline=4), 0) == 0
    # Chunks of 2, 1, 1 and 1 layers take turns with another stage's.
    assert waits_for_longer(shape, uneven, 0) == pytest.approx(4 * 2 / 5 - 1)


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
SMALL = ("--preset", "llama3-8b", "--num-layers", "4", "--seq-length", "4096", "--gpus", "2",
         "--global-batch-size", "2", "--tries", "2", *ONE_STAGE)  # fmt: skip


def test_the_command_prints_a_table_flags_reasons_and_the_step(capsys):
    status, text = run(capsys, *SMALL, "--explain")
    assert status == 0
    for words in ("ms/step", "Megatron-LM", "all-gather", "waits for",
                  "decoder.layers.0/dense", "casts of weights"):  # fmt: skip
        assert words in text
    assert "children_in_order" not in text and "layers were run" not in text  # all 4 were
    found = re.search(r"to measure it +python (scripts/benchmark.py .*)", text)
    for words in ("--preset configs/llama3-8b.yaml --num-layers 4 --seq-length 4096", "--ranks 2",
                  "--num-microbatches 1"):  # fmt: skip
        assert words in found[1]


def test_the_step_of_a_large_model_says_how_many_layers_were_run(capsys):
    words = [word if word != "4" else "32" for word in SMALL]
    assert "7 of 32 layers were run" in run(capsys, *words, "--tries", "1", "--explain")[1]


def test_what_does_not_fit_is_told_with_what_needs_least(capsys):
    words = ("--preset", "llama3-8b", "--gpus", "2", "--global-batch-size", "2", "--tries", "1")
    status, text = run(capsys, *words, "--memory-gib", "30")
    least = int(re.search(r"the least that one needs is ([\d,]+) GiB \(.*recompute\)", text)[1])
    assert status == 2 and 30 < least < 80
    assert run(capsys, *words, "--memory-gib", str(least + 1))[0] == 0
    assert run(capsys, *words, "--memory-gib", str(least - 1))[0] == 2


def test_configurations_that_one_reason_refuses_are_one_line(capsys):
    text = run(capsys, *SMALL, "--tries", "6")[1]
    assert text.count(NOT_LAUNCH_BOUND) == 1
    assert "why not" in text and "like it: " in text


def test_a_first_choice_that_leaves_little_memory_says_so_with_one_that_leaves_more():
    found = plan(wanted())
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
    given = wanted(shape=with_layers(shape_named("llama3-70b"), 8), fixed={}, tries=6)
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


def test_the_command_prints_json(capsys):
    status, text = run(capsys, *SMALL, "--json")
    best = json.loads(text)["configurations"][0]
    assert status == 0 and best["ms"] > 0 and best["peak_bytes"] == sum(best["bytes"].values())


def test_a_curve_has_a_row_for_each_number_of_gpus(capsys):
    status, text = run(
        capsys, *SMALL[:6], "--curve", "1,2", "--global-batch-size", "2", "--tries", "1",
    )  # fmt: skip
    assert status == 0 and len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "reason"),
    [(("--preset", "llama3-8b", "--config", "x"), "give one of them"),
     (("--hf-config", "/nowhere/config.json"), "no such file"),
     (("--preset", "llama3-8b", "--hidden-size", "8"), "only --num-layers and --seq-length"),
     (("--num-layers", "2"), "--vocab-size is not given"),
     (("--preset", "llama3-8b", "--curve", "eight"), "write numbers of GPUs"),
     ((*SMALL, "--global-batch-size", "3"), "global_batch_size=3: no multiple of")],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_it(capsys, words, reason):
    status, text = run(capsys, *words)
    assert status == 2 and reason in text and "Traceback" not in text


def test_without_matplotlib_a_plot_is_one_clear_error(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, text = run(capsys, *SMALL, "--plot", str(tmp_path / "x.png"))
    assert status == 2 and "matplotlib is not installed" in text


def test_pictures_say_what_they_show(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from megatron_fsdp_adapter.planning import plot

    drawn, axes_of = [], plot._axes
    monkeypatch.setattr(plot, "_axes", lambda: drawn.append(axes_of()) or drawn[-1])
    words = [word if word != "4" else "32" for word in SMALL]
    pictures = [str(tmp_path / name) for name in ("step.png", "curve.png")]
    assert run(capsys, *words, "--tries", "1", "--plot", pictures[0])[0] == 0
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
    assert from_hugging_face(str(path)).num_parameters == shape_named("llama3-8b").num_parameters
    path.write_text(json.dumps({**known, "vocab_size": 32000, "num_local_experts": 8}))
    found = from_hugging_face(str(path))
    assert found.num_parameters == shape_named("mixtral-8x7b").num_parameters
    path.write_text(json.dumps({**known, "num_nextn_predict_layers": 1}))
    [line] = from_hugging_face(str(tmp_path)).left_out  # its folder
    assert line.startswith("mtp_num_layers=1: multi-token prediction (num_nextn")
    path.write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(ValueError, match="has no num_hidden_layers"):
        from_hugging_face(str(path))


def test_flags_of_megatron_make_the_same_model():
    options = dict(PRESETS["llama3-8b"])
    assert from_options(options, "x").gpt == config_from(options)
    mixture = from_options({**options, "num_experts": 8}, "x")
    assert mixture.experts is not None and mixture.experts.topk == 2


def test_stages_of_as_many_layers_take_as_long_wherever_they_are():
    # The first one runs a backward and the forward of another microbatch in turn.
    whole = shape_named("llama3-8b")
    shape = replace(whole, gpt=replace(whole.gpt, vocab_size=1024))
    chosen = Configuration(8, Parallel(pipeline=8), "optim")
    first, last = (prediction._stage(shape, chosen, H200, 32, stage)[0] for stage in (0, 7))
    assert first == pytest.approx(last, rel=0.02)
