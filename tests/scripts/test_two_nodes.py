"""Runs of two nodes: launchers of one process each on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.lib.ranks.ranks import rendezvous
from tests.lib.scripts.script_runs import ROOT, SCRIPTS, TINY, Log, Train

CHECKS = ()  # of scripts/slurm.sh, and of launchers

SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
command = sys.argv[1 + next(i for i, word in enumerate(sys.argv[1:]) if word[:1] != "-"):]
nodes = [subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(n)}) for n in range(2)]
sys.exit(max(node.wait() for node in nodes))
"""
PROGRAM = """
import os, sys
names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")
line = " ".join([*(os.environ[name] for name in names), *sys.argv[1:]])
sys.stdout.write(line + "\\n")  # one write: both processes have the same pipe
"""


def test_a_slurm_job_is_one_launcher_a_node(tmp_path: Path) -> None:
    """With a stand-in for srun, which runs its command twice, and for scontrol."""
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\necho b\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "PYTHON": sys.executable,
        "PROCESSES": "1",
        "MAX_RESTARTS": "2",
    }
    done = subprocess.run(
        ["bash", str(SCRIPTS / "slurm.sh"), "train.py", "--save", "a folder"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} 2 2 {os.getpid()} --save a folder" for rank in range(2)
    ]


def end(launcher: psutil.Popen) -> None:
    """Kills a launcher with its workers, as a node that is gone."""
    for process in [launcher, *launcher.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.wait()


Launch = Callable[[str], psutil.Popen]


@contextlib.contextmanager
def nodes(folder: Path, place: Mapping[str, str], *arguments: str) -> Iterator[Launch]:
    """A function that starts a node of a name, whose log is in `folder`; those that are left are
    ended."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-id=two",
        f"--rdzv-endpoint=127.0.0.1:{place['MASTER_PORT']}",
        "--rdzv-conf=is_host=0,last_call_timeout=20",
        str(SCRIPTS / "pretrain_gpt.py"),
        *arguments,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    started: list[psutil.Popen] = []

    def launch(name: str) -> psutil.Popen:
        with (folder / f"{name}.log").open("w") as log:
            started.append(psutil.Popen(command, stdout=log, stderr=log, env=environment))
        return started[-1]

    try:
        yield launch
    finally:
        for one in started:
            if one.is_running():
                end(one)


@pytest.mark.full
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_lost_node_costs_the_steps_since_the_last_checkpoint(
    train: Train, corpus: Path, tmp_path: Path, comes_back: bool
) -> None:
    """The same command goes on from there, on both nodes to the same bits, or on the one that is
    left. Its first start is with the same --load."""
    from loss_curves import read_log

    flags = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy=optim_grads_params")
    whole: Log = train("two-nodes-whole", *flags, "--train-iters=24", processes=2)
    log = tmp_path / "log.jsonl"
    root = tmp_path / "saved"
    arguments = (
        *TINY,
        *flags,
        "--train-iters=24",
        f"--train-data-path={corpus}_train",
        f"--valid-data-path={corpus}_valid",
        f"--data-cache-path={corpus.parent / 'cache'}",
        f"--loss-log-file={log}",
        f"--save={root}",
        f"--load={root}",
        "--save-interval=3",
    )
    with rendezvous(2) as place, nodes(tmp_path, place, *arguments) as launch:
        first = launch("first")
        second = launch("second")
        deadline = time.monotonic() + 240
        while not (root / "iter_0000006").is_dir() and time.monotonic() < deadline:
            time.sleep(0.1)
        end(second)
        ended = [first, *([launch("again")] if comes_back else [])]
        statuses = [one.wait(240) for one in ended]
    told = "".join((tmp_path / f"{name}.log").read_text() for name in ("first", "second"))
    assert statuses == [0] * len(ended), told[-4000:]
    assert "has no checkpoint yet: the run starts at its beginning" in told
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert f"resumed from {root} after iteration " in logs
    assert ("The random generators keep" in logs) == (not comes_back)
    resumed = read_log(log)
    assert resumed.keys() == whole.keys()
    for iteration, record in whole.items():
        relative = 0 if comes_back else 1e-4
        assert resumed[iteration]["loss"] == pytest.approx(record["loss"], rel=relative, abs=0)
