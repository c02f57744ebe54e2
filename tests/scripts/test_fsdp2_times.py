"""The script that times `fully_shard`, and the parts into which it splits a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lib import step_parts

from tests.lib.scripts.script_runs import run_script

CHECKS = ()  # of a script


def event(name: str, above: Any = None, **kernels: float) -> Any:
    """An operator below another one, with the microseconds of its kernels."""
    found = [SimpleNamespace(name=kernel, duration=time) for kernel, time in kernels.items()]
    return SimpleNamespace(name=name, cpu_parent=above, kernels=found)


def test_each_kernel_counts_for_one_part() -> None:
    gather = event("FSDP::all_gather (layers.0)")
    copied_out = event("FSDP::all_gather_copy_out (layers.0)")
    reduce = event(step_parts.MARK + step_parts.SCALED)
    norm = event(step_parts.MARK + step_parts.NORM)
    events = [
        event("aten::_foreach_copy_", gather, cast=1000),
        event("c10d::allgather", gather, ncclDevKernel_AllGather_RING=2000),
        event("fsdp::split_with_sizes_copy", copied_out, split=3000),
        event("aten::mm", None, gemm=4000),
        event("aten::copy_", event(step_parts.MARK + step_parts.COPIED_IN), copy=5000),
        event("c10d::reduce_scatter", reduce, ncclDevKernel_ReduceScatter_Sum=6000),
        event("c10d::alltoall_base_", reduce, ncclDevKernel_SendRecv=500),
        event("aten::mul_", event("nothing", reduce), scale=7000),
        event("aten::_foreach_norm", norm, norm=8000),
        event("c10d::allreduce_", norm, ncclDevKernel_AllReduce=1),
        event("Optimizer.step", event(step_parts.MARK + step_parts.OPTIMIZER), adam=9000),
    ]
    found = step_parts.split(events, has_gpu=True)
    assert [*found] == [*step_parts.PARTS]
    assert [*found.values()] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.5, 7.0, 8.001, 9.0]


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
