"""Running the scripts as a person does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"

Log = dict[int, dict[str, float]]
"""What a run logged, by iteration."""

Train = Callable[..., Log]

TINY = (
    "--num-layers=2",
    "--hidden-size=48",
    "--num-attention-heads=4",
    "--group-query-attention",
    "--num-query-groups=2",
    "--ffn-hidden-size=88",
    "--swiglu",
    "--normalization=RMSNorm",
    "--position-embedding-type=rope",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
    "--seq-length=32",
    "--micro-batch-size=2",
    "--global-batch-size=8",
    "--train-iters=12",
    "--lr=3e-3",
    "--hidden-dropout=0",
    "--attention-dropout=0",
    "--eval-interval=6",
    "--eval-iters=2",
    "--log-interval=6",
)


def run_script(
    name: str, *arguments: str, processes: int = 1, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Runs scripts/NAME as a person does; with several processes under torchrun."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(SCRIPTS / name), *arguments]
    environment = dict(os.environ)
    found_before = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), found_before])
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONWARNINGS"] = "ignore"
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
