"""Rows of a benchmark in processes of their own, and rows of FP8: what a name stands for, limits,
and what one row's end does to the others."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fsdp_adapter.megatron.options.cuda_graphs import captures_iteration

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import benchmark  # noqa: E402
import benchmark_rows  # noqa: E402
from lib import bench_report, bench_wrappers, model  # noqa: E402
from lib.bench_apart import (  # noqa: E402
    Apart,
    Limits,
    beside_floors,
    from_plain,
    run_ranks,
)
from lib.bench_measure import Memory, Result, as_plain  # noqa: E402
from lib.bench_subjects import (  # noqa: E402
    FP8_ROWS,
    PRECISIONS,
    SETS,
    Plan,
    Subject,
    parse_subjects,
)
from lib.bench_trace import Budget, Overlap, Trace, Work  # noqa: E402
from lib.check import Machine  # noqa: E402

from megatron_fsdp_adapter.megatron.options.validation import wrapper_problems  # noqa: E402

TINY = [
    "--num-layers=2", "--hidden-size=32", "--num-attention-heads=2", "--seq-length=16",
    "--repeats=2", "--steps=1", "--warmup=1",
]  # fmt: skip
WITH_GPU = Machine(world_size=2, cuda=True, transformer_engine=True)


def options_on_gpu(monkeypatch: pytest.MonkeyPatch, *arguments: str):
    for module in (benchmark, bench_wrappers):
        monkeypatch.setattr(module, "this_machine", lambda: WITH_GPU)
    return benchmark.common_options(benchmark.parse_arguments([*TINY, *arguments])[1], 1)


# Names


@pytest.mark.parametrize(
    ("name", "subject", "recipe", "weights"),
    (
        ("ours-ce@fp8w_delayed", Subject("ours-ce", "optim_grads_params", "fp8w_delayed"),
         "delayed", True),
        ("ddp@fp8_blockwise", Subject("ddp", None, "fp8_blockwise"), "blockwise", False),
        ("ours:optim@bf16", Subject("ours", "optim", "bf16"), None, False),
        ("floor", Subject("floor"), None, False),
    ),
)  # fmt: skip
def test_a_name_may_end_in_a_precision(
    name: str, subject: Subject, recipe: str | None, weights: bool
) -> None:
    assert parse_subjects(name) == [subject]
    assert parse_subjects(subject.name) == [subject]
    assert (subject.recipe, subject.has_fp8_weights) == (recipe, weights)
    assert subject.floor == Subject("floor", None, subject.precision)


@pytest.mark.parametrize("name", ("ours@fp8", "ddp@fp8w_mxfp8", "floor@fp8w_tensorwise:optim"))
def test_an_unknown_precision_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"@bf16\|fp8_tensorwise"):
        parse_subjects(name)


def test_the_list_of_fp8_rows_has_a_floor_for_every_precision() -> None:
    subjects = parse_subjects(SETS["fp8"])
    assert [subject.kind for subject in subjects] == [
        row.split("@")[0].split(":")[0] for row in FP8_ROWS
    ]
    assert {subject.precision for subject in subjects} == set(PRECISIONS)
    assert {subject.floor for subject in subjects} <= set(subjects)


# Options of a row


@pytest.mark.parametrize("kind", ("ours", "ddp", "bundled", "floor", "ours-ce-graph"))
def test_a_precision_is_in_the_configs_of_its_row(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fp8_param` of the model, so that layers make FP8 weights, and `fp8_param_gather` of the
    wrapper and the recipe of the optimizer."""
    common = options_on_gpu(monkeypatch)
    subject = parse_subjects(f"{kind}@fp8w_blockwise")[0]
    options = bench_wrappers.row_options(subject, common)
    config = model.transformer_config(options)
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("hybrid", "blockwise", True)
    assert config.bf16 and options.transformer_impl == "transformer_engine"
    assert options.fp8_param_gather
    other = bench_wrappers.row_options(dataclasses.replace(subject, precision="bf16"), common)
    assert not other.fp8_param_gather and model.transformer_config(other).fp8 is None
    compute = dataclasses.replace(subject, precision="fp8_delayed")
    config = model.transformer_config(bench_wrappers.row_options(compute, common))
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("hybrid", "delayed", False)


@pytest.mark.parametrize("name", FP8_ROWS)
def test_the_configs_of_a_row_of_fp8_have_no_problem(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Core takes them, and the rules of the wrapper find nothing to refuse."""
    common = options_on_gpu(monkeypatch, "--gradient-accumulation-fusion")
    monkeypatch.setattr(model.parallel_state, "get_data_parallel_world_size", lambda: 2)
    subject = parse_subjects(name)[0]
    options = bench_wrappers.row_options(subject, common)
    config = bench_wrappers._config(subject, options)
    ddp = model.ddp_config(options)
    assert ddp.fp8_param_gather is subject.has_fp8_weights
    assert ddp.use_distributed_optimizer is not subject.is_floor
    if subject.is_ours:
        assert wrapper_problems(config, ddp) == []
        assert ddp.data_parallel_sharding_strategy == subject.strategy


def test_a_name_without_a_precision_follows_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    common = options_on_gpu(
        monkeypatch, "--bf16", "--fp8-format=hybrid", "--fp8-recipe=tensorwise",
        "--fp8-param-gather", "--fp8-amax-history-len=16", "--fp8-amax-compute-algo=max",
    )  # fmt: skip
    config = model.transformer_config(bench_wrappers.row_options(Subject("ddp"), common))
    assert (config.fp8_recipe, config.fp8_param) == ("tensorwise", True)
    assert (config.fp8_amax_history_len, config.fp8_amax_compute_algo) == (16, "max")


def test_fp8_on_a_machine_without_it_is_refused_before_a_row_is_begun(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    arguments = ["--ranks=2", "--rows=ours-ce@fp8w_tensorwise", f"--out={out}", *TINY]
    assert benchmark_rows.main(arguments) == 1
    assert "use --transformer-impl transformer_engine, on a GPU" in (out / "rows.txt").read_text()
    assert not (out / "each").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (["--ranks=2", "--rows=nothing"], "'nothing' is unknown"),
        (["--ranks=0", "--rows=ddp"], "--ranks 0"),
        (["--ranks=2", "--rows=ddp", "--row-limit=0"], "--row-limit 0"),
        (["--ranks=2", "--rows=ddp", "--json=x"], "--json"),
        (["--ranks=2", "--rows=ddp", "--no-bf16", "--fp8-format=hybrid"], "give --bf16"),
    ),
)
def test_bad_options_are_told_before_anything_starts(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark_rows.main([*arguments, f"--out={tmp_path}", *TINY]) == 2
    assert words in capsys.readouterr().err


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
    json.dump({"rows": [json.loads(sys.argv[1]) | {"subject": name}]}, open(path, "w"))
if name == "ours:optim":
    sys.exit(1)  # measured, and found to train differently
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("lib.bench_apart.GRACE_S", 0.2)
    row = as_plain(Result(Subject("ddp"), [0.2, 0.1], [0.2, 0.1], memory=Memory(1), steps=[(3, 1)]))
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return [sys.executable, "-I", str(path), json.dumps(row)]


def test_a_row_that_hangs_or_dies_takes_no_other_with_it(fake: list[str], tmp_path: Path) -> None:
    subjects = parse_subjects("ddp,fsdp2,bundled,ours:optim")
    noted: list[int] = []
    apart = Apart(
        fake, 2, tmp_path / "each", Limits(3, 100), note=lambda rows: noted.append(len(rows))
    )
    results = apart.run(subjects)
    errors = [result.error or "" for result in results]
    assert noted == [1, 2, 3, 4]
    assert [bool(error) for error in errors] == [False, True, True, False]
    assert "not done after 3 s" in errors[1]
    assert "rank 1 ended with status 1" in errors[2] and "MemoryError: no room left" in errors[2]
    assert results[3].seconds == [0.2, 0.1]


def test_no_row_is_begun_when_the_time_is_over(fake: list[str], tmp_path: Path) -> None:
    now = iter((0.0, 0.0, 99.0))
    apart = Apart(fake, 1, tmp_path, Limits(3, 100), clock=lambda: next(now))
    first, second = apart.run(parse_subjects("ddp,ours:optim_grads"))
    assert first.error is None
    assert second.error == "not begun: --time-limit 100 is over"


def test_what_was_measured_is_not_measured_again(fake: list[str], tmp_path: Path) -> None:
    ddp = Result(Subject("ddp"), [9.0])
    failed = Result(Subject("ours", "optim_grads"), error="out of memory")
    apart = Apart(fake, 1, tmp_path, Limits(30, 100))
    first, second = apart.run(parse_subjects("ddp,ours:optim_grads"), [ddp, failed])
    assert first is ddp
    assert second.error is None and second.seconds == [0.2, 0.1]


def test_nothing_of_a_row_is_left_when_it_ends(tmp_path: Path) -> None:
    """Nor are processes that its processes started."""
    script = "import os, subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); " \
        "import time; time.sleep(60)"  # fmt: skip
    log = tmp_path / "log"
    assert "not done" in str(run_ranks([sys.executable, "-I", "-c", script], 1, 2, log))
    left = int(log.read_text())
    for _ in range(100):
        if not _is_running(left):
            return
        time.sleep(0.05)
    os.kill(left, 9)
    raise AssertionError("a process was left")


def _is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_row_ends_with_the_script_that_began_it(tmp_path: Path) -> None:
    """Whoever stops the script kills it, and its session, but not those of its rows."""
    log = tmp_path / "log"
    row = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); from pathlib import Path; "
        "from lib.bench_apart import run_ranks; "
        f"run_ranks([sys.executable, '-I', '-c', {row!r}], 1, 60, Path({str(log)!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        while not log.exists() or not log.read_text().strip():
            assert parent.poll() is None
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    child = int(log.read_text())
    for _ in range(100):
        if not _is_running(child):
            return
        time.sleep(0.05)
    os.kill(child, 9)
    raise AssertionError("a row was left")


def test_rows_of_other_options_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"arguments": ["--num-layers=24"], "ranks": 2, "rows": []}
    (tmp_path / "rows.json").write_text(json.dumps(content))
    assert benchmark_rows.main(["--ranks=2", "--rows=ddp", f"--out={tmp_path}", *TINY]) == 2
    assert "holds rows of other options (--num-layers=24" in capsys.readouterr().err


# Numbers


def test_a_result_survives_its_json() -> None:
    trace = Trace(
        Budget(10, 6, 5, 3, 1, {"AllGather": 3}), Overlap(1, 2, 1, 0.5, {"7": {"AllGather": 1}}),
        Work({"products": 6}, 0.5), {"forward": 3},
    )  # fmt: skip
    result = Result(
        Subject("ours", "optim", "fp8w_delayed"), [0.1], [0.2], [0.3], Memory(1, 2, 3, 4),
        (0.1, 0.2), [(3.0, None)], 5, trace,
    )  # fmt: skip
    assert from_plain(json.loads(json.dumps(as_plain(result)))) == result


def test_ratios_of_rows_apart_are_of_medians_and_within_a_precision() -> None:
    def row(name: str, *seconds: float, steps: float = 3.0) -> Result:
        return Result(parse_subjects(name)[0], list(seconds), list(seconds), steps=[(steps, 1.0)])

    results = [
        row("floor@bf16", 1, 2, 9, steps=2.0), row("ours:optim@bf16", 4, 8, 5, steps=2.0),
        row("floor@fp8w_delayed", 1, 1, 1), row("ddp@fp8w_delayed", 4, 1, 9),
        row("ours:optim@fp8w_delayed", 2, 1, 9), row("ours:optim@fp8_delayed", 1, 1, 1),
    ]  # fmt: skip
    options = benchmark.parse_arguments([*TINY, "--ffn-hidden-size=64", "--padded-vocab-size=384"])
    table = bench_report.rows(beside_floors(results), Plan(isolated=True), options[1])
    assert [row.over_floor for row in table] == [1.0, 2.5, 1.0, 4.0, 2.0, None]
    assert [row.over_ddp for row in table] == [None, None, 0.25, 1.0, 0.5, None]
    assert not any(row.flag for row in table)  # the losses of bf16 and FP8 are not compared


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_ranks_in_processes_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    arguments = ["--ranks=2", "--rows=floor,ddp,ours:optim", f"--out={out}", "--row-limit=100"]
    assert benchmark_rows.main([*arguments, *TINY]) == 0
    rows = json.loads((out / "rows.json").read_text())["rows"]
    assert [row["subject"] for row in rows] == ["floor", "ddp", "ours:optim"]
    assert all(row["over_floor"] for row in rows) and rows[2]["over_ddp"]
    assert "ours:optim" in (out / "rows.txt").read_text()


def test_a_captured_row_asks_for_a_graph_of_the_whole_iteration() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert not captures_iteration(config)
    bench_wrappers.ask_for_one_graph(config)
    assert captures_iteration(config)
    newer = SimpleNamespace(cuda_graph_impl="none", cuda_graph_modules=[])
    bench_wrappers.ask_for_one_graph(newer)
    assert newer.cuda_graph_impl == "full_iteration"
