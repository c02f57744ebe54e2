"""What `estimate` says of Llama-3 8B against what two GPUs measure: FP8 weights beside FP8 products
of bf16 weights, with full recompute and without.

    python -m pytest -q -rA tests/gpu/test_gpu_estimate.py
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.cli import estimate
from tests.distributed.gpt import init_megatron
from tests.gpu.gpu_ranks import Check, Outcomes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

GIB = 2**30
LAYERS = int(os.environ.get("ESTIMATE_LAYERS", "32"))
STEPS = 3
STRATEGY = "optim_grads_params"
RECOMPUTE = (
    "--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1",
)  # fmt: skip
BESIDE = 64 * 2**20
"""Bytes beside the formula between steps: batches, rotary angles, scales of blocks, workspaces."""


def estimated(rank: int, world: int, words: list[str], precision: str, again: bool) -> Any:
    """Of ZeRO-3. `words`: options of the model that both commands have."""
    recipe = precision.partition("_")[2]
    more = [f"--fp8-recipe={recipe}", "--fp8-format=hybrid"] if recipe else []
    more += ["--fp8-param-gather"] if precision.startswith("fp8w") else []
    more += ["--recompute-granularity=full"] if again else []
    run = [f"--data-parallel-size={world}", f"--rank={rank}", "--json", "--params-dtype=bf16"]
    given = [*words, *more, *run, f"--data-parallel-sharding-strategy={STRATEGY}"]
    report = json.loads(estimate.run(estimate.make_parser().parse_args(given)))
    return report["strategies"][STRATEGY]


def measured(
    rank: int, world: int, words: list[str], precision: str, again: bool
) -> tuple[int, int | None]:
    """Bytes between two steps, gradients forgotten and nothing gathered ahead, and at the peak of
    three steps (None on a CPU)."""
    import benchmark
    from lib.bench_measure import free_memory, live_bytes, make_batches
    from lib.bench_subjects import Subject
    from lib.bench_wrappers import build, forget_fp8
    from lib.distributed import Place

    device = init_megatron()
    place = Place(rank, world, rank, world, device)
    arguments = [*words, *(RECOMPUTE if again else ())]
    options = benchmark.parse_arguments(arguments).options
    pool = make_batches(options, 1, place)

    def trained(layers: int) -> Any:
        one = benchmark.dataclasses.replace(options, num_layers=layers)
        runner = build(Subject("ours", STRATEGY, precision), one, place)
        for step in range(STEPS):
            runner.step(pool[step % len(pool)])
        return runner

    forget_fp8()
    trained(1).close()  # libraries take their workspaces
    forget_fp8()
    before = free_memory(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    runner = trained(options.num_layers)
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else None
    runner.zero()
    runner.model.engine.gather.release_all()
    gc.collect()
    held = live_bytes(device) - before
    runner.close()
    return held, peak


def compare(rank: int, world: int, words: list[str], precision: str, again: bool) -> str:
    """What is held between steps is what is estimated. What is beside the estimate at the peak,
    activations less kinds that are not there at once, is told."""
    expected = estimated(rank, world, words, precision, again)
    held, peak = measured(rank, world, words, precision, again)
    wanted = expected["between_steps"]
    told = f"{precision}, recompute {again}: held {held / GIB:.3f} GiB, estimated "
    told += f"{wanted / GIB:.3f}"
    assert wanted <= held + BESIDE and held <= 1.005 * wanted + BESIDE, told
    if peak is None:
        return told
    assert peak >= wanted, told
    parts = ", ".join(f"{kind} {count / GIB:.2f}" for kind, count in expected["bytes"].items())
    return f"{told}; peak {peak / GIB:.2f} GiB, estimated {expected['peak'] / GIB:.2f} ({parts})"


LLAMA = [f"--config={ROOT / 'configs' / 'llama3-8b.yaml'}", f"--num-layers={LAYERS}"]
CHECKS = {
    f"{precision}, {'full recompute' if again else 'no recompute'}": Check(
        compare, (LLAMA, precision, again)
    )
    for again in (False, True)
    for precision in ("fp8w_tensorwise", "fp8_tensorwise", "fp8w_blockwise")
}
OUTCOMES = Outcomes(CHECKS, timeout_s=500.0)
HAS_TE = importlib.util.find_spec("transformer_engine") is not None


@pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("name", CHECKS)
def test_what_is_held_is_what_is_estimated(name: str) -> None:
    OUTCOMES.expect(name)
