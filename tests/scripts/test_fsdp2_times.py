"""The script that times `fully_shard`, and the parts into which it splits a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lib import step_parts
from torch.autograd import DeviceType

from tests.lib.scripts.script_runs import run_script

CHECKS = ()  # of a script


def ranged(name: str, start: float, end: float, number: int = 0, **fields: Any) -> Any:
    """An event of a profile, on the host unless `fields` say otherwise."""
    time = SimpleNamespace(start=start, end=end)
    common = {"device_type": DeviceType.CPU, "is_user_annotation": False}
    return SimpleNamespace(**{"name": name, "id": number, "time_range": time, **common, **fields})


CUDA = {"device_type": DeviceType.CUDA}
RANGES = [
    ranged("FSDP::all_gather (layers.0)", 0, 100),
    ranged("FSDP::all_gather_copy_out (layers.0)", 100, 200),
    ranged(step_parts.MARK + step_parts.COPIED_IN, 310, 320),
    ranged("autograd::engine::evaluate_function: ViewBackward0", 300, 400),
    ranged(step_parts.MARK + step_parts.SCALED, 400, 500),
    ranged(step_parts.MARK + step_parts.NORM, 500, 600),
    ranged(step_parts.MARK + step_parts.OPTIMIZER, 600, 700),
    # The same on the device.
    ranged(step_parts.MARK + step_parts.NORM, 0, 9000, is_user_annotation=True, **CUDA),
]
KERNELS = (
    # When it was launched, its microseconds and its part.
    ("cast", 10, 1000, step_parts.CASTS),
    ("ncclDevKernel_AllGather_RING", 20, 2000, step_parts.GATHERS),
    ("split", 110, 3000, step_parts.COPIED_OUT),
    ("gemm", 210, 4000, step_parts.COMPUTE),
    ("_sum_rows", 315, 5000, step_parts.COPIED_IN),
    ("gemm", 350, 100, step_parts.COMPUTE),
    ("ncclDevKernel_ReduceScatter_Sum", 410, 6000, step_parts.REDUCTIONS),
    ("ncclDevKernel_SendRecv", 415, 500, step_parts.REDUCTIONS),
    ("_sum_rows", 420, 7000, step_parts.SCALED),
    ("norm", 510, 8000, step_parts.NORM),
    ("ncclDevKernel_AllReduce", 520, 1, step_parts.NORM),
    ("adam", 610, 9000, step_parts.OPTIMIZER),
)


def test_each_kernel_counts_for_the_part_in_which_it_was_launched() -> None:
    events = [*RANGES]
    expected = dict.fromkeys(step_parts.PARTS, 0.0)
    for number, (name, launched, time, part) in enumerate(KERNELS, start=1):
        events.append(ranged("cudaLaunchKernel", launched, launched + 1, number))
        events.append(ranged(name, 5000, 5000 + time, number, **CUDA))
        expected[part] += time / 1000
    assert step_parts.split(events, has_gpu=True) == pytest.approx(expected)


@pytest.mark.full
def test_the_script_prints_a_line_and_parts_of_each_side() -> None:
    options = ("--shape", "tiny", "--layers", "2", "--steps", "1", "--rounds", "1", "--parts")
    done = run_script("fsdp2_times.py", *options, processes=2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for side in ("torch", "fully_shard_model", "fully_shard", "fp32_sums", "floor"):
        own = [line for line in lines if line.split()[0] == side and "losses" in line]
        assert len(own) == 1, done.stdout
    assert sum("ms of kernels: casts of weights" in line for line in lines) == 5
