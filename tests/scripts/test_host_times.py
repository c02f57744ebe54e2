"""host_times.py: what the host does in a step, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from script_runs import run_script

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import host_times
from lib.bench_host import HostProfile


def run_of(*microseconds: tuple[float, float]) -> dict[str, object]:
    """One step each of the floor and of ours."""
    (bare, _), (mine, optimizer) = microseconds
    ours = {"calls": {"events made": 3}, "seconds": [(mine / 1e6, optimizer / 1e6)]}
    return {"layers": 2, "wrappers": {
        "floor": {"calls": {}, "seconds": [(bare / 1e6, 0.0)]}, "ours:optim": ours,
    }}  # fmt: skip


def test_the_table_has_what_a_layer_costs_over_the_bare_model() -> None:
    runs = [run_of((1000, 0), (1500, 70)), run_of((1000, 0), (1400, 60))]
    _, row, calls = host_times.table({"here": runs}).splitlines()
    assert row.split() == ["here", "ours:optim", "200", "200", "60"]
    assert calls.endswith("events made 3")


@pytest.mark.full
def test_wrappers_are_measured_without_a_gpu() -> None:
    done = run_script(
        "host_times.py", "--in-process", "--steps=2", "--num-layers=2",
        "--wrappers=floor,ours:optim_grads_params",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["wrappers"]
    assert set(found) == {"floor", "ours:optim_grads_params"}
    assert len(found["floor"]["seconds"]) == 2 and not found["floor"]["calls"]
    calls = found["ours:optim_grads_params"]["calls"]
    assert 0 < calls["events made"] < calls["events recorded"]


def test_a_profile_of_the_host_has_the_hooks_of_backward(tmp_path: Path) -> None:
    def a_hook_of_backward(grad: torch.Tensor) -> None:
        pass

    def step() -> None:
        value = torch.ones(2, requires_grad=True) * 2
        value.register_hook(a_hook_of_backward)
        value.sum().backward()

    host = HostProfile()
    host.run(step)
    host.run(step)
    host.write(tmp_path, "ours", 2)
    (line,) = {
        line for line in (tmp_path / "ours.txt").read_text().splitlines() if "a_hook_of" in line
    }
    assert line.split()[0] == "2"
    assert (tmp_path / "ours.pstats").is_file()
