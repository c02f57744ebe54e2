"""benchmark.py: what it is told, what it computes from samples, and that it runs and sees a wrapper
that trains differently."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import benchmark  # noqa: E402
from lib import bench_report  # noqa: E402
from lib.bench_measure import Memory, Result, as_plain  # noqa: E402
from lib.bench_subjects import FLOOR, SETS, Plan, Subject, parse_subjects  # noqa: E402
from lib.bench_trace import (  # noqa: E402
    GATHER,
    REDUCE,
    Trace,
    budget,
    clipped,
    collective_kernels,
    over_floor,
    overlap,
    overlap_text,
    read_trace,
    time_budget,
    time_budget_text,
    work,
)
from lib.bench_wrappers import row_options  # noqa: E402

TINY = [
    "--num-layers=2", "--hidden-size=32", "--num-attention-heads=2", "--seq-length=16",
    "--repeats=2", "--steps=1", "--warmup=1",
]  # fmt: skip
DDP, OURS = Subject("ddp"), Subject("ours", "optim")


def result(subject: Subject, seconds: list[float], floor: list[float], **more: object) -> Result:
    steps = more.pop("steps", [(3.0, 1.0), (2.9, 1.1)])
    return Result(subject, seconds, seconds, floor, Memory(2**20), steps=steps, **more)  # type: ignore[arg-type]


def options(*arguments: str):
    return benchmark.common_options(benchmark.parse_arguments([*TINY, *arguments])[1], 2)


# Options


def test_a_kind_stands_for_its_strategies() -> None:
    names = [subject.name for subject in parse_subjects("floor, ours,ours:optim,bundled")]
    assert names == [
        "floor", "ours:no_shard", "ours:optim", "ours:optim_grads", "ours:optim_grads_params",
        "bundled:optim_grads_params",
    ]  # fmt: skip


def test_layers_whose_activations_are_on_the_host_are_part_of_a_name() -> None:
    rows = parse_subjects("bundled/half,ours:optim/all@bf16,ddp") + parse_subjects(SETS["offload"])
    assert [row.name for row in rows[:3]] == [
        "bundled:optim_grads_params/half", "ours:optim/all@bf16", "ddp"
    ]  # fmt: skip
    assert [row.offloaded_layers(7) for row in rows[:3]] == [3, 6, 0]
    assert parse_subjects(",".join(row.name for row in rows)) == list(dict.fromkeys(rows))
    with pytest.raises(ValueError, match="ours:optim/all@bf16: .* --transformer-impl trans"):
        row_options(rows[1], options())


@pytest.mark.parametrize("text", ("fsdp", "ours:zero3", "ddp:optim", ",", "ours/three"))
def test_an_unknown_wrapper_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--wrappers.*floor, ddp, ours"):
        parse_subjects(text)


def test_the_model_comes_from_preset_and_flags(tmp_path: Path) -> None:
    preset = tmp_path / "p.yaml"
    preset.write_text(
        "num-layers: 3\nhidden-size: 64\nnum-attention-heads: 4\nseq-length: 8\n"
        "vocab-size: 500\ntrain-data-path: nowhere\nhidden-dropout: 0.5\n"
    )
    arguments = ["--preset", str(preset), "--hidden-size=96", "--num-microbatches=3"]
    settings, parsed = benchmark.parse_arguments(arguments)
    common = benchmark.common_options(parsed, settings.plan.num_microbatches)
    assert (common.num_layers, common.hidden_size) == (3, 96)
    assert common.global_batch_size == 3
    assert common.hidden_dropout == 0.0
    assert common.mock_data and common.train_data_path is None
    assert common.tokenizer_type == "NullTokenizer"


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (["--wrappers=nothing"], "--wrappers"),
        (["--preset=missing.yaml"], "missing.yaml"),
        (["--hidden-sise=3"], "--hidden-sise"),
        (["--steps=0"], "--steps 0"),
    ),
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main([*TINY, *arguments]) == 2
    assert words in capsys.readouterr().err


# Numbers


def test_spread() -> None:
    found = bench_report.spread([4.0, 1.0, 3.0, 2.0, 100.0])
    assert found == bench_report.Spread(median=3.0, low=1.0, p25=2.0, p75=4.0, high=100.0)
    assert bench_report.spread([2.0]).p75 == 2.0


def test_ratios_are_taken_within_a_round() -> None:
    """The machine is 10 times slower in the second round; the ratio is 2 in each."""
    floor, slow = [1.0, 10.0, 1.0], [2.0, 20.0, 2.0]
    results = [result(FLOOR, floor, floor), result(DDP, slow, floor), result(OURS, floor, floor)]
    table = bench_report.rows(results, Plan(), options())
    assert [row.over_floor for row in table] == [1.0, 2.0, 1.0]
    assert [row.over_ddp for row in table] == [0.5, 1.0, 0.5]


def test_ratio_to_ddp_of_wrappers_that_were_not_measured_together() -> None:
    """Ours was measured while the machine was 3 times slower, as its own floor shows."""
    results = [result(DDP, [2.0, 2.0], [1.0, 1.0]), result(OURS, [6.0, 9.0], [3.0, 4.5])]
    table = bench_report.rows(results, Plan(isolated=True), options())
    assert [row.over_ddp for row in table] == [1.0, 1.0]


def test_tokens_per_second() -> None:
    row = bench_report.rows([result(DDP, [0.5], [])], Plan(num_microbatches=4), options())[0]
    assert row.tokens_per_second == 4 * 16 / 0.5


def test_flops() -> None:
    """Against the weights of a model that is written out: 2 layers, no gate, width 32."""
    layer = 4 * 32 * 32 + 2 * 32 * 128 + 32 * 16
    assert bench_report.flops_per_token(options()) == 6 * (2 * layer + 32 * 384)


def test_flops_of_experts() -> None:
    """A token passes 2 of the 8 experts, each of 3 matrices, and the router."""
    layer = 4 * 32 * 32 + 2 * 3 * 32 * 48 + 32 * 8 + 32 * 16
    found = options("--num-experts=8", "--moe-ffn-hidden-size=48", "--swiglu")
    assert bench_report.flops_per_token(found) == 6 * (2 * layer + 32 * 384)


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
    results = [result(DDP, [1.0], [1.0]), result(OURS, [0.1], [1.0], steps=steps)]
    table = bench_report.rows(results, Plan(), options())
    assert [row.flag for row in table] == [False, flag]
    assert ("DIFFERS" in bench_report.table_text(table, 2**20)) is flag


def test_the_floor_is_compared_at_the_first_step() -> None:
    floor = result(FLOOR, [1.0], [1.0], steps=[(3.0, None), (3.0, None)])
    apart = bench_report.deviation(floor, result(DDP, [1.0], [1.0]))
    assert apart == bench_report.Deviation(loss=0.0, norm=None, steps=1)


def test_a_wrapper_that_cannot_run_has_its_reason_in_the_table() -> None:
    failed = Result(Subject("bundled", "optim"), error="ValueError: no PREMUL_SUM")
    table = bench_report.rows([result(DDP, [1.0], [1.0]), failed], Plan(), options())
    text = bench_report.table_text(table, 2**20)
    assert "bundled:optim: not measured: ValueError: no PREMUL_SUM" in text
    assert "ddp" in text


def event(name: str, start_ms: float, end_ms: float, cat: str = "kernel") -> dict:
    return {"cat": cat, "name": name, "ts": start_ms * 1e3, "dur": (end_ms - start_ms) * 1e3}


def test_time_budget_of_a_trace() -> None:
    """compute     0--------4     5---6
    gather           3-----5.5                     exposed from 4 to 5
    reduce                         5.5-----8       exposed from 6 to 8; idle from 8 to 9
    """
    found = budget(
        [
            event("gemm", 0, 3), event("gemm", 2, 4), event("copy", 5, 6, "gpu_memcpy"),
            event("ncclDevKernel_AllGather_RING", 3, 5.5),
            event("ncclDevKernel_ReduceScatter_Sum_f32", 5.5, 8), event("gemm", 9, 10),
            event("aten::mm", 0, 50, "cpu_op"),
        ]
    )  # fmt: skip
    assert found.span == pytest.approx(10.0)
    assert (found.compute, found.exposed, found.idle) == pytest.approx((6.0, 3.0, 1.0))
    assert found.communication == pytest.approx(5.0)
    assert found.overlapped == pytest.approx(2.0)
    assert found.exposed_by_kind == pytest.approx({"AllGather": 1.0, "ReduceScatter": 2.0})


def test_time_budget_by_parts_of_the_step_adds_up() -> None:
    """Parts of the step on the marked stream, casts on another, collectives and peer copies where
    nothing covers them; each moment counts once."""
    mark = "spin_kernel(long)"
    events = [
        {**event(name, start, end, cat), "args": {"stream": stream}}
        for name, start, end, cat, stream in (
            ("gemm", 0, 10, "kernel", 7),
            (mark, 10, 11, "kernel", 7),
            ("gemm", 11, 20, "kernel", 7),
            ("cast", 15, 25, "kernel", 9),
            ("Memcpy PtoP (Device -> Device)", 24, 28, "gpu_memcpy", 9),
            ("ncclDevKernel_ReduceScatter_Sum", 26, 32, "kernel", 8),
            (mark, 34, 35, "kernel", 7),
            ("L2Norm", 35, 37, "kernel", 7),
            ("AdamFunctor", 37, 40, "kernel", 7),
        )
    ]
    parts = time_budget(events)
    assert parts == pytest.approx({
        "forward": 10, "backward": 9, "optimizer": 3, "norm and clip": 2, "casts and copies": 5,
        "exposed AllGather": 3, "exposed ReduceScatter": 4, "idle": 4,
    })  # fmt: skip
    assert sum(parts.values()) == pytest.approx(40)


def _trace(*events: dict) -> Trace:
    return Trace(budget(events), overlap(collective_kernels(events)), work(events), {})


TORCH = "void at::native::vectorized_elementwise_kernel<4, at::native::"


def test_what_a_step_takes_beyond_the_floor_adds_up() -> None:
    """floor    products 0----10  attention -----15
    ours      0--2 gather; products 2----14, a sum 10--16, attention 16---22; idle; Adam 25-30; a
              kernel of the compiler's, a cast, a scaling
    """
    floor = _trace(event("nvjet_tst", 0, 10), event("flash_fprop", 10, 15))
    found = _trace(
        event("Memcpy PtoP (Device -> Device)", 0, 2, "gpu_memcpy"), event("nvjet_tss", 2, 14),
        event("_sum_rows", 10, 16), event("flash_fprop", 16, 22),
        event("adam", 25, 30), event("triton_poi", 30, 31),
        event(TORCH + "bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>", 31, 33),
        event(TORCH + "BUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<"
              "float>>>", 33, 36),
    )  # fmt: skip
    parts = over_floor(found, floor)
    assert {name: ms for name, ms in parts.items() if ms} == pytest.approx({
        "the floor's kernels": 15, "products": 2, "attention": 1, "sums": 6, "optimizer": 5,
        "rest": 1, "casts and copies": 2, "scaling": 3, "at once": -4, "exposed": 2, "idle": 3,
    })  # fmt: skip
    assert sum(parts.values()) == pytest.approx(36)
    assert "- at once 4.0 + exposed 2.0" in time_budget_text("ours", parts)


@pytest.mark.parametrize(
    ("name", "kind"),
    (
        ("_tensors", "quantising"),
        ("_blocks", "quantising"),
        ("void at::native::fill_blocks(float*)", "rest"),
        ("void transformer_engine::detail::(anonymous namespace)::cast_transpose_general_kernel<4",
         "quantising"),
        ("void transformer_engine::(anonymous namespace)::amax_kernel<16, true>", "quantising"),
        ("void transformer_engine::fp8_block_scaling_recipe::fp8_block_scaling_partial_cast_kernel",
         "quantising"),
        ("transpose_optimized_kernel(__nv_fp8_e4m3 const*, float const*)", "transposes"),
        ("nvjet_qqtst_128x256", "products"),
        ("_sum_rows", "sums"),
    ),
)  # fmt: skip
def test_what_a_kernel_of_fp8_does(name: str, kind: str) -> None:
    """Names that traces of an H200 had."""
    found = work([event(name, 0, 2)]).kinds
    assert {one for one, ms in found.items() if ms} == {kind}


def test_a_trace_without_gpu_events() -> None:
    with pytest.raises(ValueError, match="no event of a GPU"):
        budget([event("aten::mm", 0, 50, "cpu_op")])


GATHER_NAME, REDUCE_NAME = "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_f32"


def on_stream(name: str, start: float, end: float, stream: int, **details: object) -> dict:
    return {**event(name, start, end), "args": {"stream": stream, **details}}


def test_gathers_and_reductions_at_once() -> None:
    """gather   0-------4        6-------10  10.5-11
    reduce               5--------8--------9            2 more from 12 to 14
    The forward's gather, before any reduction, could not run beside one.
    """
    found = overlap(
        collective_kernels(
            [
                on_stream(GATHER_NAME, 0, 4, 20), on_stream(GATHER_NAME, 6, 10, 20),
                on_stream(GATHER_NAME, 10.5, 11, 20), on_stream(REDUCE_NAME, 5, 8, 24),
                on_stream(REDUCE_NAME, 8, 9, 24), on_stream(REDUCE_NAME, 12, 14, 24),
                on_stream("gemm", 0, 14, 7), event("aten::mm", 0, 50, "cpu_op"),
            ]
        )
    )  # fmt: skip
    assert (found.gather, found.reduce) == pytest.approx((8.5, 6.0))
    assert found.gather_beside == pytest.approx(4.5)
    assert found.together == pytest.approx(3.0)
    assert found.share == pytest.approx(3 / 4.5)
    assert found.share_of_step == pytest.approx(3 / 6)
    assert found.streams == {"20": {GATHER: pytest.approx(8.5)}, "24": {REDUCE: pytest.approx(6)}}
    assert "67% of the shorter one" in overlap_text("ours", found)


def test_kernels_one_after_the_other_share_nothing() -> None:
    kernels = [on_stream(GATHER_NAME, 2, 3, 20), on_stream(REDUCE_NAME, 0, 2, 20)]
    kernels += [on_stream(REDUCE_NAME, 3, 4, 20)]
    found = overlap(collective_kernels(kernels))
    assert (found.together, found.share) == (0.0, 0.0)
    assert found.streams == {"20": {GATHER: pytest.approx(1), REDUCE: pytest.approx(3)}}


def test_two_gathers_at_once_are_counted_once() -> None:
    kernels = [on_stream(GATHER_NAME, 0, 4, 20), on_stream(GATHER_NAME, 1, 3, 21)]
    found = overlap(collective_kernels([*kernels, on_stream(REDUCE_NAME, 0, 4, 24)]))
    assert (found.gather, found.together, found.share) == pytest.approx((4.0, 4.0, 1.0))


@pytest.mark.parametrize(
    ("details", "kept"),
    (
        ({}, 1),
        ({"Out msg nelems": 2**24, "In msg nelems": 2**22}, 1),
        ({"Out msg nelems": "8", "In msg nelems": "2"}, 0),
    ),
)
def test_a_dispatchers_gather_of_counts_is_left_out(details: dict, kept: int) -> None:
    assert len(collective_kernels([on_stream(GATHER_NAME, 0, 1, 20, **details)])) == kept


def test_a_trace_without_collectives_has_no_share() -> None:
    found = overlap([])
    assert (found.share, found.share_of_step, found.streams) == (None, None, {})
    assert "no such kernel" in overlap_text("ours", found)


def test_clipping() -> None:
    assert clipped([(0, 2), (3, 5), (6, 9)], (1, 6)) == [(1, 2), (3, 5)]


def test_what_a_trace_tells_is_in_table_and_json(tmp_path: Path) -> None:
    events = [on_stream(GATHER_NAME, 0, 2, 20), on_stream(REDUCE_NAME, 1, 3, 24)]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    traced = result(OURS, [1.0], [1.0], trace=read_trace(path))
    table = bench_report.rows([result(DDP, [1.0], [1.0]), traced], Plan(), options())
    text = bench_report.table_text(table, 2**20)
    assert "ours:optim: 3.00 ms = compute 0.00" in text
    assert "ours:optim: gather and reduce at once 1.00 ms = 100% of the shorter one" in text
    plain = json.loads(json.dumps(as_plain(traced)))
    assert plain["trace"]["overlap"]["together"] == pytest.approx(1.0)


def test_separate_groups_are_for_ours() -> None:
    given = [*TINY, "--wrappers=ddp,ours:optim,ours-ag:optim", "--separate-all-gather-groups"]
    settings, _ = benchmark.parse_arguments(given)
    assert [subject.name for subject in settings.subjects] == ["ddp", "ours-ag:optim"]


# Runs


def run(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Two ranks; (the process, the rows of its JSON)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    path = tmp_path / "rows.json"
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node=2", str(ROOT / "scripts/benchmark.py"), *TINY, f"--json={path}",
        *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert path.is_file(), done.stdout + done.stderr
    return done, json.loads(path.read_text())["rows"]


def test_a_bucket_size_is_for_ddp_alone() -> None:
    """Ours and its peers have units in place of buckets, and refuse the option."""
    given = dataclasses.replace(options(), ddp_bucket_size=1000)
    sizes = [row_options(row, given).ddp_bucket_size for row in (DDP, OURS, Subject("bundled"))]
    assert sizes == [1000, None, None]


def test_layers_are_apart_in_rows_that_say_so() -> None:
    rows = (OURS, *parse_subjects("ours-apart,ours-ce-apart"), DDP)
    given = dataclasses.replace(options(), suggested_communication_unit_size=7)
    sizes = [row_options(row, given).suggested_communication_unit_size for row in rows]
    assert sizes == [7, 0, 0, None]


@pytest.mark.timeout(300)
def test_two_ranks_interleaved(tmp_path: Path) -> None:
    """Every wrapper that runs on gloo, with its numbers; the others say why they did not."""
    chart = tmp_path / "chart.png"
    done, rows = run(
        tmp_path, "--wrappers=bundled,floor,ddp,ours:optim,ours:optim_grads_params,fsdp2",
        "--num-microbatches=2", f"--plot={chart}", "--bf16",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    by_name = {row["subject"]: row for row in rows}
    able = ["floor", "ddp", "ours:optim", "ours:optim_grads_params", "fsdp2"]
    for name in able:
        row = by_name[name]
        assert row["error"] is None, row
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert len(row["steps"]) == 3  # one of warm-up, two rounds of one
        assert row["left_behind"] < 0.1 * row["memory"]["held"]
        assert name in done.stdout
    held = {name: by_name[name]["memory"]["held"] for name in able}
    assert held["floor"] < held["ours:optim_grads_params"] < held["ours:optim"]
    # A wrapper that fails in its first backward takes nothing with it.
    assert "PREMUL_SUM" in by_name["bundled:optim_grads_params"]["error"]
    assert chart.stat().st_size > 1000


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_ranks_isolated_and_a_faulty_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients of ours scaled by 1.1, the table marks ours and the status says so; results
    of wrappers that were finished are in the JSON."""
    fault = tmp_path / "sitecustomize.py"
    fault.write_text(
        "import sys, importlib.abc\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name != 'megatron_fsdp_adapter.megatron.domains': return None\n"
        "        sys.meta_path.remove(self)\n"
        "        from importlib.util import find_spec\n"
        "        spec = find_spec(name)\n"
        "        load = spec.loader.exec_module\n"
        "        def exec_module(module):\n"
        "            load(module)\n"
        "            scale = module.grad_scale\n"
        "            module.grad_scale = lambda *a: 1.1 * scale(*a)\n"
        "        spec.loader.exec_module = exec_module\n"
        "        return spec\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done, rows = run(
        tmp_path, "--wrappers=ddp,bundled,ours:optim_grads,floor", "--isolated",
        "--calculate-per-token-loss",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert {row["subject"]: row["flag"] for row in rows} == {
        "ddp": False, "bundled:optim_grads_params": False, "ours:optim_grads": True, "floor": False,
    }  # fmt: skip
    assert "DIFFERS" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_ranks_with_experts_of_their_own(tmp_path: Path) -> None:
    """A mixture of experts with EP 2: all that run train alike, fsdp2 tells why it does not.
    Without bundled, whose norm is another one where experts have one data-parallel rank."""
    wrappers = "ddp,ours:optim_grads_params,ours-ag:optim_grads_params,fsdp2,floor"
    done, rows = run(
        tmp_path, f"--wrappers={wrappers}", "--calculate-per-token-loss", "--num-experts=4",
        "--expert-model-parallel-size=2", "--disable-bias-linear", "--moe-aux-loss-coeff=0.01",
        "--moe-token-dispatcher-type=alltoall",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    errors = {row["subject"]: row["error"] for row in rows if row["error"] is not None}
    assert list(errors) == ["fsdp2"] and "hold different experts" in errors["fsdp2"]
    assert "4 experts of 128, top 2, EP 2" in done.stdout
