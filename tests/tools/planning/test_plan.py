"""`plan`: predictions, the search, what is printed, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.plan.memory import LIFE, PERSISTENT
from megatron_fsdp_adapter.tools.cli import estimate, prove
from megatron_fsdp_adapter.tools.cli import plan as command
from megatron_fsdp_adapter.tools.models.hugging_face import read_hugging_face
from megatron_fsdp_adapter.tools.models.sources import (
    PRESETS,
    add_flags,
    from_options,
)
from megatron_fsdp_adapter.tools.models.spec import ModelSpec, Parallel, layers_of, listing
from megatron_fsdp_adapter.tools.planning import prediction
from megatron_fsdp_adapter.tools.planning.configurations import (
    ACTIVATIONS,
    Configuration,
    groups,
    memory,
)
from megatron_fsdp_adapter.tools.planning.guesses import at_least_bytes
from megatron_fsdp_adapter.tools.planning.machine import Group, machine_named
from megatron_fsdp_adapter.tools.planning.prediction import predict
from megatron_fsdp_adapter.tools.planning.report import (
    bridge_overrides,
    megatron_flags,
    render,
)
from megatron_fsdp_adapter.tools.planning.search import (
    NOT_LAUNCH_BOUND,
    Plan,
    Request,
    candidates,
    plan,
    splits,
)
from megatron_fsdp_adapter.tools.planning.shapes import waits_for_longer
from tests.lib.megatron.core_layers import layers_of_core
from tests.lib.tools.presets import model_named
from tests.lib.tools.published_models import PUBLISHED

CHECKS = (
    "tools/cli/plan.py",
    "tools/planning/search.py",
    "tools/planning/prediction.py",
    "tools/planning/guesses.py",
    "tools/planning/report.py",
    "tools/planning/configurations.py",
)

H200 = machine_named("h200")


def model(name: str, layers: int, seq_length: int = 4096, **more: Any) -> ModelSpec:
    return replace(model_named(name), num_layers=layers, seq_length=seq_length, **more)


FEW = model("llama3-8b", 4)
GIB = 1 << 30


COPIES = ("--fsdp-copy-engine-all-gather", "--fsdp-copy-engine-reduce-scatter")
SPLIT = ("--num-distributed-optimizer-instances=2", "--outer-dp-sharding-strategy=optim")
AS_ESTIMATED = {
    "instances": (Configuration(8, instances=2, outer_optim=True), SPLIT),
    **{name: (Configuration(8, strategy=name), ()) for name in STRATEGIES},
    "copy engines": (Configuration(8, copies=True), COPIES),
    "joined by default": (Configuration(8), ("--num-layers=20", "--preset=llama-1.5b")),
}


@pytest.mark.parametrize("name", AS_ESTIMATED)
def test_memory_of_a_plan_is_that_of_estimate(name, capsys):
    chosen, words = AS_ESTIMATED[name]
    spec = model("llama-1.5b", 20) if "default" in name else FEW
    given = ("--preset=llama3-8b", "--num-layers=4", "--data-parallel-size=8", "--rank=0", "--json")
    assert estimate.main([*given, *words]) == 0
    report = json.loads(capsys.readouterr().out)
    held = report["strategies"][chosen.strategy]["bytes"]
    found = memory(spec, chosen, H200, 1)
    for kind, count in held.items():
        if LIFE[kind] == PERSISTENT:
            assert found[kind] == count, kind
    if ACTIVATIONS not in found:
        assert found["gradient shard"] == held["gradient shard"]


@pytest.mark.parametrize(
    ("gpus", "layers", "strategy", "copies", "microbatches", "measured"),
    [
        (2, 24, "optim_grads_params", False, 1, 52.70),
        (2, 24, "optim", False, 1, 86.01),
        (2, 24, "optim_grads_params", False, 4, 64.01),
        (2, 24, "optim_grads_params", True, 1, 58.22),
        (4, 32, "optim_grads_params", False, 1, 43.87),
        (4, 32, "optim", False, 4, 87.34),
        (4, 32, "optim_grads", False, 4, 64.93),
        (4, 32, "optim_grads_params", True, 1, 49.79),
    ],
)
def test_the_peak_is_what_was_measured(gpus, layers, strategy, copies, microbatches, measured):
    spec = model("llama3-8b", layers)
    chosen = Configuration(gpus, strategy=strategy, copies=copies)
    found = memory(spec, chosen, H200, microbatches)
    peak = sum(found.values()) / GIB - H200.gpu.reserved_gib
    assert peak == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize(
    ("spec", "chosen", "more"),
    [
        (model("llama3-8b", 14), Configuration(4, copies=True), 14),
        (model("llama-1.5b", 20, 8192), Configuration(2, fused=False), 10),
    ],
)
def test_a_prediction_of_few_layers_is_that_of_all_of_them(spec, chosen, more, monkeypatch):
    """Joined by default or not."""
    further = predict(spec, chosen, H200, 8)
    monkeypatch.setattr(prediction, "MORE", more)
    every = predict(spec, chosen, H200, 8)
    assert further.ms == pytest.approx(every.ms, rel=0.01)
    assert further.exposed_ms == pytest.approx(every.exposed_ms, rel=0.1, abs=0.5)


def test_ranks_of_a_domain_are_tensor_parallel_ones_first():
    found = groups(Configuration(64, Parallel(tensor=4), instances=8), H200)
    assert found["tensor"] == Group(4, 4)
    assert found["dense"] == Group(2, 2)
    assert found["dense outer"] == Group(8, 1)


def test_stages_share_out_all_layers_and_all_parameters():
    spec = model("llama3-8b", 10)
    parallel = Parallel(pipeline=4)
    numbers = []
    parts = []
    for stage in range(4):
        numbers += layers_of(spec, parallel, stage)
        parts += [fqn for _, fqn, _, _ in listing(spec, parallel, stage)]
    whole = [fqn for _, fqn, _, _ in listing(spec, Parallel())]
    assert numbers == list(range(10))
    assert sorted(parts) == sorted(whole)


def wanted(**given) -> Request:
    usual = Request(
        spec=FEW,
        machine=H200,
        gpus=8,
        global_batch=16,
        memory_gib=140.0,
        fixed={"tensor": 1, "pipeline": 1, "recompute": False, "microbatch": 1},
        tries=4,
    )
    return replace(usual, **given)


def test_the_best_is_first_and_fits_and_less_memory_never_gives_a_faster_plan():
    found = plan(wanted())
    times = [one.ms for one in found.predictions]
    assert times == sorted(times)
    assert len(times) == 4
    for one in found.predictions:
        assert one.device_bytes <= 140 * GIB
    tight = plan(wanted(memory_gib=28.0)).predictions[0]
    assert tight.ms >= times[0]
    assert tight.device_bytes <= 28 * GIB


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"memory_gib": 8.0}, "fits in 8 GiB.*Use more GPUs"),
        ({"fixed": {"tensor": 3}}, "with tensor 3: tensor_model_parallel_size=3: 3 "),
        (
            {"gpus": 7, "global_batch": 100, "fixed": {}},
            r"of 100: global_batch_size=100: no mult.* x 7",
        ),
        (
            {"gpus": 64, "global_batch": 64, "fixed": {"instances": 3}},
            "num_distributed_optimizer_instances=3: does not divide the 64 data-parallel ranks",
        ),
        ({"gpus": 0}, "--gpus 0"),
    ],
)
def test_options_that_leave_nothing_are_an_error_that_names_them(given, reason):
    with pytest.raises(ValueError, match=reason):
        plan(wanted(**given))


def every(**given) -> list[Configuration]:
    chosen = wanted(**given)
    found = []
    for split in splits(chosen):
        found += candidates(chosen, split)
    return found


def test_candidates_are_what_the_options_and_the_machine_leave():
    far = every(gpus=64, global_batch=64)
    inside = []
    for one in far:
        if one.copies:
            inside.append(one.shards["dense"][0] * one.parallel.tensor)
    assert inside, "copy engines and shards stay inside a domain"
    assert max(inside) <= 8, "copy engines and shards stay inside a domain"
    told = every(gpus=64, global_batch=64, fixed={"tensor": 2, "strategy": "optim"})
    assert {(one.strategy, one.parallel.tensor) for one in told} == {("optim", 2)}
    assert len({one.parallel.pipeline for one in told}) > 1
    alone = every(gpus=1, global_batch=1)
    assert {one.strategy for one in alone} == {"optim"}, "nothing to shard under four names"
    alone = every(gpus=1, global_batch=1, fixed={"strategy": "optim_grads_params"})
    assert {one.strategy for one in alone} == {"optim_grads_params"}


def test_a_given_value_is_used_even_if_the_search_would_not_try_it():
    fixed = {"instances": 4, "microbatch": 3, "pipeline": 3}
    told = every(spec=model("llama3-8b", 12), gpus=96, global_batch=96 * 3, fixed=fixed)
    seen = {(one.instances, one.microbatch, one.parallel.pipeline) for one in told}
    assert seen == {(4, 3, 3)}


def test_experts_have_what_the_options_say():
    fixed = {"expert": 4, "expert_strategy": "optim", "expert_instances": 1}
    told = every(spec=model("mixtral-8x7b", 4), gpus=16, global_batch=16, fixed=fixed)
    assert {(one.expert_strategy, one.expert_instances) for one in told} == {("optim", 1)}
    assert {one.instances for one in told} > {1}
    assert {one.strategy for one in told} == set(STRATEGIES)
    assert len({one.name for one in told}) == len(told)
    spanning = {"expert": 4, "expert_instances": 1}
    of_nodes = every(spec=model("mixtral-8x7b", 4), gpus=16, global_batch=16, fixed=spanning)
    spans = [one for one in of_nodes if one.shards["expert"][0] * 4 > H200.network.domain]
    assert {one.instances for one in spans} > {1}
    assert not any(one.copies for one in spans), "experts are gathered between nodes"
    dense = every(gpus=16, global_batch=16, fixed=fixed | {"expert": 1})
    assert {one.expert_strategy for one in dense} == {None}


def test_a_graph_is_not_tried_where_the_host_does_not_limit():
    found = plan(wanted(tries=8))
    fast = [one.configuration for one in found.predictions if one.configuration.graph]
    assert not fast
    assert any(why == NOT_LAUNCH_BOUND for _, why in found.refused)
    slow = plan(wanted(tries=8, machine=replace(H200, host=6.0)))
    assert slow.predictions[0].configuration.graph


SPLIT_AGAIN = Configuration(
    64, Parallel(tensor=2, recompute=True), instances=4, outer_optim=True, copies=True
)
FLAGS = [
    (FEW, SPLIT_AGAIN,
     ("--use-megatron-fsdp", "--tensor-model-parallel-size 2", "--sequence-parallel",
      "--data-parallel-sharding-strategy optim_grads_params",
      "--num-distributed-optimizer-instances 4", "--outer-dp-sharding-strategy optim",
      "--fsdp-copy-engine-all-gather", "--fsdp-copy-engine-reduce-scatter",
      "--recompute-granularity full"), ("unit-size", "layout")),
    (model_named("mixtral-8x7b"),
     Configuration(16, Parallel(expert=4), expert_strategy="optim", expert_instances=1),
     ("--expert-data-parallel-sharding-strategy optim",
      "--expert-num-distributed-optimizer-instances 1"), ()),
    # Megatron splits experts like the rest by default.
    (model_named("deepseek-v3"), Configuration(16, Parallel(tensor=2, pipeline=2, expert=4)),
     ("--pipeline-model-parallel-layout 'Et*31|t*30L'", "--expert-tensor-parallel-size 1",
      "'model.pipeline_model_parallel_layout=Et*31|t*30L'"), ()),
    (model_named("llama3-70b"), Configuration(4, Parallel(1, 4, 2)),
     ("--num-virtual-stages-per-pipeline-rank 2",), ("layout",)),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "chosen", "printed", "absent"), FLAGS)
def test_flags_and_overrides_are_those_of_the_options(spec, chosen, printed, absent):
    text = megatron_flags(spec, chosen) + " " + bridge_overrides(spec, chosen)
    for words in printed:
        assert words in text, text
    for words in absent:
        assert words not in text, text


def told_to_core(spec, text: str) -> dict[str, Any]:
    """The model's config that Megatron-LM makes of printed flags."""
    words = shlex.split(text)
    named: dict[str, Any] = {}
    for flag, value in zip(words, [*words[1:], "--"], strict=True):
        if not flag.startswith("--"):
            continue
        name = flag[2:].replace("-", "_")
        if value.startswith("--"):
            named[name] = True
        elif value.isdigit():
            named[name] = int(value)
        else:
            named[name] = value
    virtual = named.pop("num_virtual_stages_per_pipeline_rank", None)
    fields = {one.name for one in dataclasses.fields(TransformerConfig)}
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.query_groups,
        "num_moe_experts": spec.num_experts,
        "add_bias_linear": False,
        "virtual_pipeline_model_parallel_size": virtual,
        **{name: value for name, value in named.items() if name in fields},
    }


@pytest.mark.parametrize(
    ("preset", "gpus", "batch"),
    [(name, 64, 512) for name in PRESETS]
    + [("deepseek-v3", 1024, 8192), ("deepseek-v3", 256, 4096)]
    + [("llama3-405b", 16384, 2048), ("llama3-70b", 96, 768)],
)
def test_megatron_core_builds_every_split_that_is_planned(preset, gpus, batch):
    """Of each stage and virtual stage the layers are those that core builds, by the printed flags;
    of the uneven ones too."""
    spec = model_named(preset)
    given = wanted(spec=spec, gpus=gpus, global_batch=batch, fixed={"microbatch": 1})
    every = set()
    for split in splits(given):
        if not split.parallel.recompute:
            every.add(split.parallel)
    assert len(every) > 5
    for parallel in every:
        text = megatron_flags(spec, Configuration(gpus, parallel))
        found = layers_of_core(told_to_core(spec, text))
        assert found is not None, text
        stages = [len(layers_of(spec, parallel, stage)) for stage in range(parallel.pipeline)]
        assert [sum(chunks) for chunks in found] == stages
        assert sum(stages) == spec.num_layers
        assert {len(chunks) for chunks in found} == {parallel.virtual}
        layers = [number for chunks in found for number in chunks]
        assert max(layers) - min(layers) <= 1


def test_virtual_stages_wait_for_the_longest():
    spec = model("llama3-8b", 10)
    even = Parallel(pipeline=2, virtual=5)
    uneven = Parallel(pipeline=2, virtual=4)
    assert waits_for_longer(spec, even, 0) == 0
    assert waits_for_longer(spec, Parallel(pipeline=4), 0) == 0
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
TWO_LAYERS = (
    "--preset=llama3-8b",
    "--num-layers=2",
    "--hidden-size=4096",
    "--gpus=1",
    "--tries=1",
    "--global-batch-size=1",
    "--seq-length=1024",
)
COMMANDS: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = [
    (SMALL, 0, ("ms/step", "Megatron-LM", "reduce-scatter", "others")),
    ((*SMALL, "--tries", "6"), 0, (NOT_LAUNCH_BOUND, "why not", "like it: ")),
    (TWO_LAYERS, 0, ("llama3-8b: 1.5B",)),
    (("--hf-config", "/nowhere/config.json"), 2, ("no such file",)),
    (
        ("--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "1"),
        2,
        ("--vocab-size is not given",),
    ),
    (
        (*SMALL, "--num-experts=8", "--moe-router-topk=9"),
        2,
        ("--moe-router-topk 9: must be from 1 to --num-experts 8",),
    ),
    (
        ("--preset", "llama3-8b", "--no-group-query-attention"),
        2,
        ("--num-query-groups 8 without --group-query-attention",),
    ),
    ((*SMALL, "--micro-batch-size", "0"), 2, ("--micro-batch-size 0: must be at least 1",)),
    ((*SMALL, "--global-batch-size", "3"), 2, ("global_batch_size=3: no multiple of",)),
]
"""Words, exit status, and what is printed."""


@pytest.mark.parametrize(("words", "status", "printed"), COMMANDS)
def test_the_command_prints_a_table_flags_and_reasons(capsys, words, status, printed):
    found, text = run(capsys, *words)
    assert found == status
    for part in printed:
        assert part in text, text
    assert "Traceback" not in text
    assert text.count(NOT_LAUNCH_BOUND) <= 1, "configurations that one reason refuses are one line"


def test_what_does_not_fit_is_told_with_what_needs_least(capsys):
    words = ("--preset", "llama3-8b", "--gpus", "2", "--global-batch-size", "2", "--tries", "1")
    status, text = run(capsys, *words, "--memory-gib", "30")
    least = int(re.search(r"the smallest needs ([\d,]+) GiB or more \(.*recompute\)", text)[1])
    assert status == 2
    assert 30 < least < 80
    status, _ = run(capsys, *words, "--memory-gib", str(least - 1))
    assert status == 2


def is_baseline(name: str) -> bool:
    return name.startswith("optim_grads_params") and "TP" not in name and "PP" not in name


@pytest.mark.parametrize(("memory_gib", "fits"), [(36.0, True), (30.0, False)])
def test_weights_sharded_alone_are_in_the_table_or_among_the_reasons(memory_gib, fits):
    """What a user of FSDP compares with, however much slower or larger it is."""
    given = wanted(spec=model("llama3-70b", 8, 8192), fixed={}, tries=6, memory_gib=memory_gib)
    found = plan(given)
    names = [one.configuration.name for one in found.predictions]
    reasons = [reason for name, reason in found.refused if is_baseline(name)]
    assert any(map(is_baseline, names)) == fits
    if not fits:
        assert any(reason.endswith("GiB") for reason in reasons)


def test_json_has_what_the_table_has(capsys):
    status, text = run(capsys, *SMALL, "--json")
    best = json.loads(text)["configurations"][0]
    assert status == 0
    assert best["ms"] > 0
    assert best["device_bytes"] == sum(best["bytes"].values())
    assert best["peak_bytes"] == best["device_bytes"] - best["bytes"]["contexts, NCCL, fragments"]


def test_a_row_that_fits_by_less_than_the_error_of_peaks_is_marked():
    found = plan(wanted(tries=1))
    [best] = found.predictions
    text = render(found, 5)
    assert f"{best.peak_bytes / GIB:.1f}        {best.device_bytes / GIB:.1f}  " in text
    assert "may need more than" not in text
    limit = best.device_bytes / GIB + 0.06 * best.peak_bytes / GIB
    text = render(replace(found, wanted=wanted(memory_gib=limit)), 5)
    assert f"{best.device_bytes / GIB:.1f}?" in text
    assert "?: may need more than" in text


def test_a_row_whose_experts_are_on_one_rank_says_so():
    """Each of four instances has one of the ranks with the same experts."""
    mixtral = wanted(spec=model("mixtral-8x7b", 2), gpus=16)
    prediction = plan(wanted(tries=1)).predictions[0]
    for expert_instances, unsharded in ((None, True), (1, False)):
        chosen = Configuration(
            16, Parallel(expert=4), instances=4, expert_instances=expert_instances
        )
        row = replace(prediction, configuration=chosen)
        text = render(Plan(mixtral, [row], []), 5)
        assert (", expert parameters unsharded  " in text) == unsharded
    assert "dense parameters unsharded" not in render(Plan(wanted(), [prediction], []), 5)


def test_what_fits_only_with_recompute_is_a_row_and_a_reason():
    fixed = {"tensor": 1, "pipeline": 1, "microbatch": 1, "strategy": "optim"}
    whole = Configuration(8, strategy="optim")
    spec = model("llama3-8b", 12)
    needed = at_least_bytes(spec, whole, 2) / GIB + H200.gpu.reserved_gib
    found = plan(wanted(spec=spec, fixed=fixed, tries=1, memory_gib=needed - 0.1))
    assert [one.configuration.parallel.recompute for one in found.predictions] == [True]
    assert any("recompute" not in name for name, _ in found.refused)


SIZES_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def test_commands_read_a_model_of_hugging_face(tmp_path, capsys):
    """`estimate` and `doctor --prove`; the file, and its folder."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES_8B))
    llama = from_options(read_hugging_face(str(tmp_path)), "")
    for given in (tmp_path, path):
        assert estimate.main(["--hf-config", str(given), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["parameters"] == 8_030_261_248

    parser = argparse.ArgumentParser()
    add_flags(parser, prove.OPTIONS)
    words = parser.parse_args(["--hf-config", str(tmp_path)], argparse.Namespace(script=None))
    words.world_size = None
    proven = prove.read_recipe(words, {}).options
    assert from_options({**proven, "num_experts": None}, "") == llama

    deepseek = PUBLISHED["deepseek-ai/DeepSeek-V3"].config
    path.write_text(json.dumps(deepseek))
    [line] = from_options(read_hugging_face(str(path)), "").left_out
    assert line.startswith("mtp_num_layers=1: multi-token prediction (num_nextn")
