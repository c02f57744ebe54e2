"""Runs training scripts, unmodified, on several processes of this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.lib.integration import lm_log
from tests.lib.integration.warm_start import SERVE, Rank, Server
from tests.lib.ranks.ranks import rendezvous

ROOT = Path(__file__).parents[3]
HARNESSES = ROOT / "tests" / "lib" / "integration"

NO_FUSIONS = shlex.split(
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion"
)
NO_KERNELS = [*NO_FUSIONS, "--distributed-backend", "gloo"]
"""What a machine without a GPU lacks; nothing of it concerns the wrapper."""


@dataclass(frozen=True)
class Device:
    """What ranks of `pretrain_gpt.py` need on a kind of device. harness: the file that starts them;
    flags: in front of all others; environment: beside that of this process."""

    harness: str
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


CPU = Device("on_cpu.py", tuple(NO_KERNELS))
GPU = Device(
    "on_gpu.py",
    # Transformer Engine, if a later flag asks for it, has no fused kernel that these turn off.
    # Gradients that kernels accumulate are rounded in another order than stock DDP's.
    (*NO_FUSIONS, "--no-gradient-accumulation-fusion"),
    {
        "NVIDIA_TF32_OVERRIDE": "0",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1",  # stock's own, of delayed scaling
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHDYNAMO_DISABLE": "1",
    },
)
DEVICES = {"cpu": CPU, "cuda": GPU}

STEPS = 6
SMALL = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size 4 "
    "--clip-grad 100 "
    f"--lr 1e-3 --min-lr 1e-4 --lr-decay-iters 10 --train-iters {STEPS} --eval-interval 2 "
    "--eval-iters 1 --log-interval 1 --log-params-norm --tokenizer-type NullTokenizer "
    "--vocab-size 256 --num-workers 0 --distributed-timeout-minutes 2"
)
"""One microbatch a rank on 2 ranks, and no clipping: both wrappers then add the same numbers in the
same order, and every digit must agree."""
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-ffn-hidden-size 48 --disable-bias-linear"
)
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"


@dataclass(frozen=True)
class Run:
    """What a finished run left: status of the first rank that failed (0 if none) and its log."""

    status: int
    log: str

    @property
    def values(self) -> lm_log.Values:
        return lm_log.read(self.log)

    @property
    def end(self) -> str:
        """The last lines, without the list of modules that Python adds when it is aborted."""
        lines = [line for line in self.log.splitlines() if not line.startswith("Extension modules")]
        return "\n".join(lines)[-4000:]


def environment_of_ranks() -> dict[str, str]:
    """Of a rank, without its place."""
    mine = {}
    for name, value in os.environ.items():
        if name != "CUDA_DEVICE_MAX_CONNECTIONS":
            mine[name] = value
    path = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    return {
        **mine,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(path),
    }


@functools.cache
def _servers() -> dict[tuple[str, Path], Server]:
    """The processes of this run of tests that have imported what scripts of a folder need, by
    harness and folder."""
    return {}


def server_of(harness: str, folder: Path, added: Mapping[str, str] | None = None) -> Server:
    """The process that starts ranks of scripts of a folder by a harness. added: to its
    environment."""
    if (harness, folder) not in _servers():
        command = [sys.executable, "-W", "ignore", str(HARNESSES / harness), SERVE]
        server = Server(
            [*command, str(folder / "any")], {**environment_of_ranks(), **(added or {})}
        )
        _servers()[harness, folder] = server
    return _servers()[harness, folder]


def end_servers() -> None:
    """Ends them, and waits until they have ended."""
    for server in _servers().values():
        server.end()
    _servers().clear()


def start(
    harness: str,
    script: Path,
    arguments: list[str],
    world: int,
    log: Path,
    added: Mapping[str, str] | None = None,
) -> list[Rank]:
    """One process a rank, all writing to `log`. harness: the file that makes it run on a CPU, or on
    GPUs; added: to the environment of ranks."""
    added = added or {}
    server = server_of(harness, script.parent, added)
    meeting = contextlib.ExitStack()
    everywhere = {**environment_of_ranks(), **added, **meeting.enter_context(rendezvous(world))}
    asks = {"--tensor-model-parallel-size", "--context-parallel-size"} & {*arguments}
    if "--use-megatron-fsdp" not in arguments and asks:
        everywhere["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks stock runs for it
    log.touch()
    devices = torch.cuda.device_count() or world
    found = []
    for rank in range(world):
        # Megatron gives each rank the GPU of its local rank. Ranks may share one.
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % devices)}
        found.append(Rank(server, [str(script), *arguments], {**everywhere, **place}, log, meeting))
    return found


def finish(processes: list[Rank], log: Path, timeout: float) -> Run:
    """Waits for all ranks; when one fails, or the time (seconds) runs out, ends the others."""
    deadline = time.monotonic() + timeout
    while True:
        states = [process.poll() for process in processes]
        failed = [state for state in states if state]
        if failed or None not in states or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if failed:
        time.sleep(1.0)  # what the others have to say
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    timed_out = not failed and None in states
    return Run(failed[0] if failed else -int(timed_out), log.read_text())


def launch(checkout: Path, arguments: list[str], log: Path) -> list[Rank]:
    """Starts a training on 2 processes, for a test that ends it itself."""
    everything = [*SMALL, *NO_KERNELS, *arguments]
    return start("on_cpu.py", checkout / "pretrain_gpt.py", everything, 2, log)


def train(
    checkout: Path,
    arguments: list[str],
    world: int = 2,
    timeout: float = 600.0,
    script: str = "pretrain_gpt.py",
    device: Device = CPU,
) -> Run:
    """Trains with a script of the checkout and `arguments` beside the common ones."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        cache = ["--data-cache-path", f"{folder}/cache"]
        everything = [*SMALL, *device.flags, *cache, *arguments]
        ranks = start(device.harness, checkout / script, everything, world, log, device.environment)
        return finish(ranks, log, timeout)


def train_recipe(script: Path, arguments: list[str], world: int = 2, timeout: float = 600.0) -> Run:
    """Trains a recipe of Megatron-Bridge with `script`, tiny and on the CPU; it must not fail."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        recipe = [
            "--recipe",
            "llama32_1b_pretrain_config",
            "--config-file",
            str(HARNESSES / "bridge_cpu.yaml"),
        ]
        everything = [*recipe, *arguments, f"dataset.path_to_cache={folder}/cache"]
        run = finish(start("bridge_on_cpu.py", script, everything, world, log), log, timeout)
    assert run.status == 0, run.end
    return run


def run_worker(name: str, folder: Path, *cases: str) -> str:
    """The log of a worker of two ranks, with Megatron-Bridge, that has checked `cases`, one after
    the other."""
    log = folder / "log"
    words = [str(folder), *cases]
    run = finish(start("bridge_on_cpu.py", HARNESSES / name, words, 2, log), log, 900.0)
    assert run.status == 0, run.end
    return run.log
