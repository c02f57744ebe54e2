"""benchmark.py: its arguments, what it computes from samples, and that it runs and sees a wrapper
that trains differently."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import benchmark
import pytest
from lib import bench_report, bench_wrappers, model, ranks
from lib.bench_measure import Result
from lib.bench_subjects import KINDS, PRECISIONS, Subject, parse_subjects
from lib.bench_trace import budget, budget_text, read_events
from lib.bench_wrappers import row_options
from lib.check import Machine
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_fsdp_adapter.megatron.options.rules import Joined, problems
from megatron_fsdp_adapter.megatron.options.support import MODEL_CONFIG_RULES
from megatron_fsdp_adapter.megatron.options.table import DDP_CONFIG_RULES
from tests.lib import strays
from tests.lib.scripts.script_runs import SCRIPTS, run_script

CHECKS = ()  # of scripts/benchmark.py

TINY = [
    "--num-layers=2",
    "--hidden-size=32",
    "--num-attention-heads=2",
    "--seq-length=16",
    "--repeats=2",
    "--steps=1",
    "--warmup=1",
]
FLOOR = Subject("floor")
DDP = Subject("ddp")
OURS = Subject("ours", "optim")
CPU = Machine(world_size=1, cuda=False, transformer_engine=False)
GPU = Machine(world_size=2, cuda=True, transformer_engine=True)


def result(subject: Subject, seconds: list[float], floor: list[float], **more: object) -> Result:
    steps = more.pop("steps", [[3.0, 1.0], [2.9, 1.1]])
    return Result(subject, seconds, seconds, floor, {"held": 2**20}, steps=steps, **more)  # type: ignore[arg-type]


def given(*arguments: str, machine: Machine = CPU) -> Namespace:
    return benchmark.parse_arguments([*TINY, *arguments], machine)


def table_of(results: list[Result], *arguments: str) -> list[dict]:
    told = given(*arguments)
    return bench_report.rows(results, told, told.options)


# Options


@pytest.mark.parametrize(
    ("name", "subject", "chosen"),
    (
        ("ours-ce@fp8w_delayed", Subject("ours-ce", "optim_grads_params", "fp8w_delayed"),
         {"fp8_recipe": "delayed", "fp8_param_gather": True, "fsdp_copy_engine_all_gather": True}),
        ("ddp@fp8_blockwise", Subject("ddp", None, "fp8_blockwise"),
         {"fp8_format": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": False}),
        ("ours:optim+2.5@bf16", Subject("ours", "optim", "bf16", 2.5), {"fp8_format": None}),
        ("ours-muon", Subject("ours-muon", "optim_grads_params"), {"optimizer": "muon"}),
        ("floor", Subject("floor"), {}),
    ),
)  # fmt: skip
def test_a_name_says_options(name: str, subject: Subject, chosen: dict) -> None:
    assert parse_subjects(name) == [subject]
    assert parse_subjects(subject.name) == [subject]
    assert chosen.items() <= subject.options().items()
    assert subject.floor == Subject("floor", None, subject.precision)


@pytest.mark.parametrize(
    "text", ("fsdp", "ours:zero3", "ddp:optim", ",", "ddp+3", "ours@fp8", "ddp@fp8w_mxfp8")
)
def test_an_unknown_wrapper_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--wrappers.*floor, ddp, ours"):
        parse_subjects(text)


def test_rows_are_measured_after_a_budget_was_found() -> None:
    rows = "ddp,ours:optim_grads_params"
    assert given("--wrappers", rows).warmup == 1
    assert given("--wrappers", f"{rows}+auto").warmup == benchmark.AUTO_WARMUP
    assert given("--wrappers", f"{rows}+auto", "--warmup", "9").warmup == 9


def test_the_model_comes_from_preset_and_flags(tmp_path: Path) -> None:
    preset = tmp_path / "p.yaml"
    preset.write_text(
        "num-layers: 3\nhidden-size: 64\nnum-attention-heads: 4\nseq-length: 8\n"
        "vocab-size: 500\ntrain-data-path: nowhere\nhidden-dropout: 0.5\n"
    )
    arguments = ["--preset", str(preset), "--hidden-size=96", "--num-microbatches=3"]
    common = benchmark.parse_arguments(arguments).options
    assert common.num_layers == 3
    assert common.hidden_size == 96
    assert common.global_batch_size == 3
    assert common.hidden_dropout == 0.0
    assert common.mock_data is True
    assert common.train_data_path is None
    assert common.tokenizer_type == "NullTokenizer"


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (["--wrappers=nothing"], "--wrappers"),
        (["--preset=missing.yaml"], "missing.yaml"),
        (["--hidden-sise=3"], "--hidden-sise"),
        (["--steps=0"], "--steps 0"),
        (["--ranks=0"], "--ranks 0"),
        (["--ranks=2", "--row-limit=0"], "--row-limit 0"),
        (["--fp8-format=hybrid"], "Give --bf16"),
    ),
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main([*TINY, *arguments]) == 2
    assert words in capsys.readouterr().err


# Numbers


SLOW = [2.0, 20.0, 2.0]


def row_of(name: str, *seconds: float, loss: float = 3.0) -> Result:
    return result(parse_subjects(name)[0], list(seconds), [], steps=[[loss, 1.0]])


RATIOS = {
    # The machine is 10 times slower in the second round; the ratio is 2 in each.
    "within a round": (
        [result(FLOOR, [1.0, 10.0, 1.0], [1.0, 10.0, 1.0]), result(DDP, SLOW, [1.0, 10.0, 1.0]),
         result(OURS, [1.0, 10.0, 1.0], [1.0, 10.0, 1.0])],
        [], {"over_floor": [1.0, 2.0, 1.0], "over_ddp": [0.5, 1.0, 0.5]},
    ),
    # Ours was measured while the machine was 3 times slower, as its own floor shows.
    "measured one after the other": (
        [result(DDP, [2.0, 2.0], [1.0, 1.0]), result(OURS, [6.0, 9.0], [3.0, 4.5])],
        ["--isolated"], {"over_ddp": [1.0, 1.0]},
    ),
    "within a precision": (
        [row_of("ours:optim@bf16", 4, 8, 5, loss=2.0), row_of("ddp@fp8w_delayed", 4, 1, 9),
         row_of("ours:optim@fp8w_delayed", 2, 1, 9), row_of("ours:optim@fp8_delayed", 1, 1, 1)],
        ["--isolated"], {"over_ddp": [None, 1.0, 0.5, None], "flag": [False] * 4},
    ),
    "tokens": (
        [result(DDP, [0.5], [])], ["--num-microbatches=4"],
        {"tokens_per_second": [4 * 16 / 0.5]},
    ),
}  # fmt: skip
"""Results, options, and columns of their table."""


@pytest.mark.parametrize("name", RATIOS)
def test_ratios_are_of_what_was_measured_alike(name: str) -> None:
    results, flags, columns = RATIOS[name]
    table = table_of(results, *flags)
    for column, expected in columns.items():
        assert [row[column] for row in table] == expected, column


@pytest.mark.parametrize(
    ("flags", "mlp"),
    (
        ([], 2 * 32 * 128),  # no gate
        # A token passes 2 of the 8 experts, each of 3 matrices, and the router.
        (["--num-experts=8", "--moe-ffn-hidden-size=48", "--swiglu"], 2 * 3 * 32 * 48 + 32 * 8),
    ),
    ids=["dense", "experts"],
)
def test_flops_are_those_of_the_weights_of_a_model(flags: list[str], mlp: int) -> None:
    """That is written out: 2 layers, width 32."""
    layer = 4 * 32 * 32 + mlp + 32 * 16
    found = bench_report.flops_per_token(given(*flags).options)
    assert found == 6 * (2 * layer + 32 * 384)


@pytest.mark.parametrize(
    ("steps", "flag"),
    (
        ([(3.0, 1.0), (2.9, 1.1)], False),
        ([(3.0, 1.0), (2.9, 5.0)], False),  # norms are compared at the first step alone
        ([(3.0, 1.0), (2.91, 1.1)], True),
        ([(3.0, 1.001), (2.9, 1.1)], True),
        ([(3.0, 1.0), (math.nan, 1.1)], True),
        ([(math.nan, 1.0), (2.9, 1.1)], True),
    ),
)
def test_a_wrapper_that_trains_differently_is_marked(steps: list, flag: bool) -> None:
    reference = result(DDP, [1.0], [1.0])
    compared = result(OURS, [0.1], [1.0], steps=steps)
    table = table_of([reference, compared])
    text = bench_report.table_text(table)
    assert [row["flag"] for row in table] == [False, flag]
    assert ("DIFFERS" in text) is flag


def event(name: str, start_ms: float, end_ms: float, cat: str = "kernel") -> dict:
    return {"cat": cat, "name": name, "ts": start_ms * 1e3, "dur": (end_ms - start_ms) * 1e3}


def test_time_budget_of_a_trace(tmp_path: Path) -> None:
    """compute     0--------4     5---6
    gather           3-----5.5                     exposed from 4 to 5
    reduce                       5--------8        exposed from 6 to 8; idle from 8 to 9
    """
    events = [
        event("gemm", 0, 3),
        event("gemm", 2, 4),
        event("copy", 5, 6, "gpu_memcpy"),
        event("ncclDevKernel_AllGather_RING", 3, 5.5),
        event("ncclDevKernel_ReduceScatter_Sum_f32", 5, 8),
        event("gemm", 9, 10),
        event("aten::mm", 0, 50, "cpu_op"),
    ]
    path = tmp_path / "trace.json.gz"
    content = json.dumps({"traceEvents": events})
    path.write_bytes(gzip.compress(content.encode()))
    found = budget(read_events(path))
    assert found == pytest.approx(
        {
            "span": 10,
            "compute": 6,
            "exposed": 3,
            "exposed AllGather": 1,
            "exposed ReduceScatter": 2,
            "idle": 1,
            "beside": 2,
            "together": 0.5,
        }
    )
    traced = result(OURS, [1.0], [1.0], trace=found)
    text = bench_report.table_text(table_of([traced]))
    assert budget_text("ours:optim", found) in text
    assert "idle 1.00 ms" in text


# Options of a row


CONFIGS = {
    "fp8w_blockwise": ("hybrid", "blockwise", True),
    "fp8_delayed": ("hybrid", "delayed", False),
    "bf16": (None, "delayed", False),
}
"""`fp8`, `fp8_recipe` and `fp8_param` of the model, by precisions."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_configs_of_a_row_have_no_problem(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Core takes them, and the rules of the wrapper find nothing to refuse, in any precision. That
    is in the model's config, so that layers make FP8 weights, in the wrapper's and in the
    optimizer's."""
    common = given("--gradient-accumulation-fusion", "--bf16", machine=GPU).options
    monkeypatch.setattr(model.parallel_state, "get_data_parallel_world_size", lambda: 2)
    precisions = [""]
    for one in PRECISIONS:
        precisions.append(f"@{one}")
    for precision in precisions:
        subject = parse_subjects(f"{kind}{precision}")[-1]
        if kind == "ours-muon" and "fp8w" in precision:
            continue
        chosen = row_options(subject, common, GPU)
        config = bench_wrappers.model_config(subject, chosen)
        ddp = model.ddp_config(chosen)
        assert config.bf16
        assert chosen.transformer_impl == "transformer_engine"
        if precision[1:] in CONFIGS:
            found = (config.fp8, config.fp8_recipe, config.fp8_param)
            assert found == CONFIGS[precision[1:]]
        has_fp8_weights = "fp8w" in precision
        assert chosen.fp8_param_gather is has_fp8_weights
        assert ddp.fp8_param_gather is has_fp8_weights
        has_its_own = subject.is_floor or kind in ("fsdp2", "bundled-v2")
        assert ddp.use_distributed_optimizer is not has_its_own
        if subject.is_ours:
            rules = (*DDP_CONFIG_RULES, *MODEL_CONFIG_RULES)
            assert problems(Joined(ddp, config), rules) == []
            assert ddp.data_parallel_sharding_strategy == subject.strategy


@pytest.mark.parametrize(
    ("names", "given_options", "field", "values"),
    (
        # Ours and its peers have units in place of buckets, and refuse the option.
        ("ddp,ours:optim,bundled", {"ddp_bucket_size": 1000}, "ddp_bucket_size",
         [1000, None, None]),
        # Layers are apart in rows that say so.
        ("ours:optim,ours-apart,ours-ce-apart,ddp", {"suggested_communication_unit_size": 7},
         "suggested_communication_unit_size", [7, 0, 0, None]),
    ),
)  # fmt: skip
def test_an_option_is_for_the_rows_that_have_it(
    names: str, given_options: dict, field: str, values: list
) -> None:
    common = dataclasses.replace(given().options, **given_options)
    found = []
    for subject in parse_subjects(names):
        chosen = row_options(subject, common, CPU)
        found.append(getattr(chosen, field))
    assert found == values


# Rows in processes


FAKE = """
import json, os, sys, time
name, path = sys.argv[sys.argv.index("--wrappers") + 1], sys.argv[sys.argv.index("--json") + 1]
if name == "fsdp2":
    time.sleep(60)  # hangs
if name == "bundled:optim_grads_params":
    if os.environ["RANK"] == "1":
        raise MemoryError("no room left")
    time.sleep(60)  # waits for the other in a collective
if os.environ["RANK"] == "0":
    json.dump(json.loads(CONTENT.replace("NAME", name)), open(path, "w"))
if name == "ours:optim":
    sys.exit(1)  # measured, and found to train differently
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a benchmark whose rows are measured by `FAKE`."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    words = ["--ranks=2", f"--out={tmp_path / 'rows'}", "--row-limit=3", "--ffn-hidden-size=64"]
    told = benchmark.parse_arguments([*TINY, *words])
    [row] = bench_report.rows([result(DDP, [0.2, 0.1], [])], told, told.options)
    row["subject"] = "NAME"
    content = json.dumps({**benchmark.settings(told), "rows": [row]})
    path = tmp_path / "fake.py"
    path.write_text(f"CONTENT = {content!r}\n{FAKE}")
    monkeypatch.setattr(benchmark, "__file__", str(path))
    return [*TINY, *words]


def test_a_row_that_hangs_or_dies_takes_no_other_with_it(
    fake: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main([*fake, "--wrappers=ddp,fsdp2,bundled,ours:optim"]) == 1
    text = (tmp_path / "rows" / "rows.txt").read_text()
    assert text == capsys.readouterr().out
    assert "fsdp2: not measured: not done after 3 s" in text
    assert "bundled:optim_grads_params: not measured: rank 1 ended with status 1; " in text
    assert "MemoryError: no room left" in text
    measured = set()
    for line in text.splitlines():
        if " 150.0 " in line:
            measured.add(line.split()[0])
    assert measured == {"ddp", "ours:optim"}


def test_a_row_ends_with_the_script_that_began_it(tmp_path: Path) -> None:
    """What stops the script kills it, and its session, but not those of its rows."""
    log = tmp_path / "log"
    row = "import time; print(1, flush=True); time.sleep(60)"
    script = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from pathlib import Path; "
        "from lib.ranks import run_ranks; "
        f"run_ranks([sys.executable, '-I', '-c', {row!r}], 1, 60, Path({str(log)!r}))"
    )
    mark, value = strays.new_mark()
    environment = {**os.environ, strays.VARIABLE: value}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        strays.wait_for(lambda: log.exists() and bool(log.read_text().strip()))
        parent.kill()
        parent.wait()
        strays.wait_for(lambda: not strays.marked(mark), 10.0)
    finally:
        strays.end_all(mark)


# Runs


FAULT = """
import sys, importlib.abc
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != 'megatron_fsdp_adapter.megatron.wrapper.domains': return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec
        spec = find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            scale = module.grad_scale
            module.grad_scale = lambda *a: 1.1 * scale(*a)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""
"""Scales gradients of ours by 1.1, as a `sitecustomize.py`."""

FIELDS = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
OF_BUNDLED = {}
if "megatron_fsdp_main_grads_dtype" not in FIELDS:
    # Until 0.16 bundled has fp32 gradients, and scales them by an operation that gloo lacks. From
    # 0.17 on it has bf16 ones of bf16 weights, and scales them itself.
    OF_BUNDLED = {"bundled:optim_grads_params": "PREMUL_SUM"}

RUNS = {
    # Every wrapper that runs on gloo; one that fails in its first backward takes nothing with it.
    "interleaved": (
        "--wrappers=bundled,floor,ddp,ours:optim,ours:optim_grads_params,fsdp2 "
        "--num-microbatches=2 --bf16",
        "",
        OF_BUNDLED,
        set(),
    ),
    # The table marks a wrapper that trains differently, and the status says so.
    "isolated, of which one is faulty": (
        "--wrappers=ddp,bundled,ours:optim_grads,floor --isolated --calculate-per-token-loss",
        FAULT,
        {},
        {"ours:optim_grads"},
    ),
    # Without bundled, whose norm is another one where experts have one data-parallel rank.
    "experts of their own": (
        "--wrappers=ddp,ours:optim_grads_params,ours-ag:optim_grads_params,fsdp2,floor "
        "--calculate-per-token-loss --num-experts=4 --expert-model-parallel-size=2 "
        "--disable-bias-linear --moe-aux-loss-coeff=0.01 --moe-token-dispatcher-type=alltoall",
        "",
        {"fsdp2": "one mesh for all parameters"},
        set(),
    ),
}
"""Options, what is put into the processes, errors by wrapper, and wrappers that are marked."""


DEFAULT = "interleaved"
CASES = [DEFAULT]
for name in RUNS:
    if name != DEFAULT:
        CASES.append(pytest.param(name, marks=pytest.mark.full))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each wrapper, with its numbers or why it has none; all others train alike."""
    words, fault, errors, marked = RUNS[name]
    (tmp_path / "sitecustomize.py").write_text(fault)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    file = tmp_path / "rows.json"
    arguments = [*TINY, *words.split(), f"--json={file}"]
    done = run_script("benchmark.py", *arguments, processes=2, timeout=280)

    assert done.returncode == bool(marked), done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {row["subject"] for row in rows if row["flag"]} == marked
    assert ("DIFFERS" in done.stdout) is bool(marked)
    for row in rows:
        subject = row["subject"]
        assert subject in done.stdout
        if subject in errors:
            assert errors[subject] in row["error"]
            continue
        assert row["error"] is None
        # One step of warm-up, two rounds of one.
        assert len(row["seconds"]) == 2, row
        assert len(row["steps"]) == 3, row
