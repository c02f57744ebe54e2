"""The runner, with a script and a small Megatron-LM of the test's own beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_fsdp_adapter.checkpoint import latest_iteration

CHECKS = ("launch/runner.py", "launch/megatron_lm.py", "__main__.py")

ROOT = Path(__file__).parents[2]
Outcome = subprocess.CompletedProcess[str]

ARGUMENTS = """
import argparse, os, time

def last_of_two(place):
    "The first rank goes on 3 seconds after the second one."
    if os.environ["RANK"] == "1":
        open(place, "w").close()
        return
    while not os.path.exists(place):
        time.sleep(0.05)
    time.sleep(3)

def add_megatron_arguments(parser):
    if "SECOND_RANK_IS_HERE" in os.environ:
        last_of_two(os.environ["SECOND_RANK_IS_HERE"])
    for flag in ("--use-megatron-fsdp", "--use-distributed-optimizer", "--overlap-grad-reduce",
                 "--overlap-param-gather", "--use-torch-fsdp2"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--ckpt-format", default="torch_dist")
    parser.add_argument("--data-parallel-sharding-strategy", default="no_shard")
    parser.add_argument("--num-distributed-optimizer-instances", type=int, default=1)
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--fp8-format", dest="fp8")
    parser.add_argument("--no-gradient-accumulation-fusion", action="store_false",
                        dest="gradient_accumulation_fusion")
    return parser

if "NO_GPU" in os.environ:  # as the real ones import torch, to ask it for a GPU's capability
    from types import SimpleNamespace
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=bool))

def parse_args(*unused):
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()

def validate_args(args, defaults={}):
    return args
"""
SCRIPT = """
import os, sys
import helper_beside_the_script
from megatron.training.training import megatron_FSDP, parse_args
assert __name__ == "__main__" and sys.argv[0].endswith("train.py")
for _ in range(2):
    args = parse_args()
from megatron.training import training
import megatron_fsdp_adapter
ours = megatron_fsdp_adapter.FullyShardedDataParallel
print("wrapper", training.megatron_FSDP is ours)
print("connections", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
print("args", sorted(vars(args).items(), key=str))
from megatron.core.distributed import DistributedDataParallelConfig
print("field", hasattr(DistributedDataParallelConfig(), "megatron_fsdp_grad_comm_dtype"))
sys.exit(7)
"""
TRAINING = """
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import (
    FullyShardedDataParallel as megatron_FSDP,
)
from megatron.training.arguments import parse_args
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    package = folder / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import training\n")
    (package / "arguments.py").write_text(ARGUMENTS)
    (package / "training.py").write_text(TRAINING)
    (folder / "helper_beside_the_script.py").write_text("")
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


RUNNER = ("-m", "megatron_fsdp_adapter")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *RUNNER)
BESIDE_ANOTHER = (
    "-c",
    "import megatron.core; from megatron_fsdp_adapter.__main__ import main; "
    "raise SystemExit(main())",
)
"""The runner in a process that has imported a core."""


def run(
    *argv: str, python: tuple[str, ...] = RUNNER, cwd: Path = ROOT, **environment: str
) -> Outcome:
    inherited = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *python, *argv],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **environment},
    )


OWN = (
    "from megatron.core.distributed import FullyShardedDataParallel as a\n"
    "from megatron_fsdp_adapter import FullyShardedDataParallel as b, install\n"
    "install()\nprint(a is b)\n"
)
REFUSED = (
    "from megatron_fsdp_adapter.core.problems import RefusedByAllRanks, raise_problems\n"
    "raise_problems('The schedule', ['lr=1: is 2'], RefusedByAllRanks)\n"
)
AS_PYTHON = """
import atexit, inspect, multiprocessing, os, pickle, sys, threading, traceback
from dataclasses import dataclass

@dataclass
class Config:
    value: "int | Undefined" = 1

def twice(config):
    return Config(config.value * 2)

def at_the_end(what):
    source = inspect.getsource(twice).splitlines()[1].strip()
    try:
        raise ValueError(what)
    except ValueError:
        line = traceback.format_exc().splitlines()[-2].strip()
    print(what, pickle.loads(pickle.dumps(Config(5))), source, line)

def after_the_last_line(function, *arguments):
    threading.main_thread().join()
    return function(*arguments)

if __name__ == "__main__":
    main = sys.modules["__main__"]
    assert vars(main) is globals()
    own = {name for name in vars(main) if name[:2] == "__"} - {"__annotations__"}
    print(sorted(own), main.__file__, main.__spec__)
    print(Config.__annotations__, sys.argv, sys.path[0], os.getcwd() in sys.path)
    import psutil
    print(psutil.__file__)
    for kind in ("spawn", "fork"):
        with multiprocessing.get_context(kind).Pool(1) as pool:
            print(kind, pool.map_async(twice, [Config(4)]).get(60))
    atexit.register(at_the_end, "atexit")
    threading.Thread(target=after_the_last_line, args=(at_the_end, "thread")).start()
    import time
    from torch import distributed
    from megatron_fsdp_adapter.checkpoint import AsyncSaver, storage
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    write = storage._write_file
    # Not until the main thread ends: Python waits for this one before.
    storage._write_file = lambda *arguments: (time.sleep(0.5), write(*arguments))[1]
    AsyncSaver().save(sys.argv[1], 7, {"config": Config(6)})
    sys.exit(5)
"""
FLAG = "--use-megatron-fsdp"
CONTRADICTIONS = (FLAG, "--use-torch-fsdp2", "--ckpt-format", "zarr")
MISSPELT = (FLAG, "--num-experts", "two")
Runs = Callable[[str], Outcome]


def as_python(folder: Path) -> tuple[str, Path]:
    """A script, as named from another folder that has a module of a package's name; that folder."""
    (folder / "of script").mkdir()
    (folder / "of script" / "facts.py").write_text(AS_PYTHON)
    (folder / "current").mkdir()
    (folder / "current" / "psutil.py").write_text("")
    return "../of script/facts.py", folder / "current"


@pytest.fixture(scope="module")
def runs(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """What became of each, by name. Two run at a time: most of it is the import of Megatron."""
    own = tmp_path_factory.mktemp("own") / "own.py"
    own.write_text(OWN)
    # Without a Megatron-LM beside it.
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "checkout"
    shutil.copytree(script.parent, elsewhere, ignore=shutil.ignore_patterns("megatron"))
    alone = str(elsewhere / "train.py")
    core = tmp_path_factory.mktemp("core")
    (core / "megatron" / "core").mkdir(parents=True)
    (core / "train.py").touch()
    facts, current = as_python(tmp_path_factory.mktemp("facts"))
    packages = str(Path(torch.__file__).parents[1])
    tail = tmp_path_factory.mktemp("tail") / "tail.py"
    tail.write_text("import os, sys; print(sys.path.index(os.getcwd()) > 0)")
    train = str(script)
    path = f"{ROOT}{os.pathsep}{script.parent}"
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with ThreadPoolExecutor(2) as pool:
        started = {}

        def start(name: str, *argv: str, **how: Any) -> None:
            started[name] = pool.submit(run, *argv, **how)

        own_options = ("--megatron-fsdp-grad-comm-dtype", "bf16")
        own_options += ("--outer-dp-sharding-strategy", "no_shard")
        start("flag", train, FLAG, *own_options)
        start("no flag", train)
        start("first rank", train, *CONTRADICTIONS, **one, RANK="0")
        start("second rank", train, *CONTRADICTIONS, **one, RANK="1")
        start("own", str(own))
        start("elsewhere", alone, PYTHONPATH=path)
        start("elsewhere, flag", alone, FLAG, PYTHONPATH=path)
        start("no GPU", train, FLAG, "--fp8-format", "hybrid", **one, NO_GPU="1")
        # Two ranks, of which the second is ready to end before the first.
        meeting = tmp_path_factory.mktemp("meeting") / "here"
        start("under torchrun", train, *MISSPELT, python=TORCHRUN, SECOND_RANK_IS_HERE=str(meeting))
        refused = own.with_name("refused.py")
        refused.write_text(REFUSED)
        start("refused by all", str(refused), python=TORCHRUN)
        start("as python", facts, str(current / "a"), cwd=current)
        start("python", facts, str(current / "b"), python=(), cwd=current)
        # Neither installed nor on PYTHONPATH: it is found in the current folder alone.
        start("only here", str(tail), python=("-S", *RUNNER), PYTHONPATH=packages)
        # A Megatron-LM that imports a package which is absent.
        lacking = tmp_path_factory.mktemp("lacking") / "checkout"
        shutil.copytree(script.parent, lacking)
        with (lacking / "megatron" / "training" / "arguments.py").open("a") as file:
            file.write("import absent_package.part\n")
        lacks = str(lacking / "train.py")
        start("lacking", lacks, FLAG)
        start("lacking, no flag", lacks)
        start("lacking, doctor", "doctor", lacks, FLAG)
        start("lacking, proof", "doctor", "--prove", lacks, FLAG)
        start("lacking, own", str(own), PYTHONPATH=f"{ROOT}{os.pathsep}{lacking}")
        start("another core", str(core / "train.py"), python=BESIDE_ANOTHER)
        yield lambda name: started[name].result()


# Core's own from 0.17 on.
HAS_FIELD = "megatron_fsdp_grad_comm_dtype" in vars(DistributedDataParallelConfig())
TOLD: dict[str, tuple[int, tuple[str, ...], str]] = {
    # Hooks reach names that were imported before.
    "flag": (7, ("wrapper True\nconnections 8\n", "field True",
                 "('use_distributed_optimizer', True)", "('ckpt_format', 'fsdp_dtensor')",
                 "('megatron_fsdp_grad_comm_dtype', torch.bfloat16)"), ""),
    "no flag": (7, ("wrapper False\nconnections None\n", f"field {HAS_FIELD}\n",
                    "('ckpt_format', 'torch_dist')"), ""),
    # A script without Megatron-LM.
    "own": (0, ("True\n",), ""),
    # Megatron-LM's modules on the path, as from 0.19 on in megatron-core's wheel, and not beside
    # the script.
    "elsewhere": (7, ("wrapper False\n",), ""),
    "elsewhere, flag": (7, ("wrapper True\n",), ""),
    # Megatron-LM's modules on the path, of which the script needs nothing.
    "lacking, own": (0, ("True\n",), ""),
    # The package stays on the path, behind everything else.
    "only here": (0, ("True\n",), ""),
    # `megatron` has no __init__: a core imported from elsewhere would be mixed with the script's
    # own training modules.
    "another core": (1, (), "has a megatron-core, but"),
}  # fmt: skip
"""A run, its status, and what it prints and says in the end."""


@pytest.mark.parametrize("name", TOLD)
def test_a_script_runs_with_the_wrapper_if_it_is_asked_for(runs: Runs, name: str) -> None:
    """The table of changes is printed once; the script's exit status goes through."""
    status, printed, error = TOLD[name]
    done = runs(name)
    assert done.returncode == status, done.stderr
    assert error in done.stderr, done.stderr
    for text in printed:
        assert text in done.stdout, done.stdout
    assert done.stdout.count(" sets\n") == done.args.count(FLAG)


def test_contradictions_are_one_message_on_one_rank(runs: Runs) -> None:
    done = runs("first rank")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n  - ") == 3, done.stderr
    silent = runs("second rank")
    assert silent.returncode == 2
    assert silent.stdout == ""
    # torch warns where it finds a compiler for CUDA and no GPU.
    for line in silent.stderr.splitlines():
        assert "torch/utils/cpp_extension" in line


def test_without_a_gpu_all_problems_are_one_message(runs: Runs) -> None:
    """Before: a traceback of Megatron-LM's own arguments, and of two problems the first."""
    done = runs("no GPU")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    problems = done.stderr.partition("cannot be used with this configuration:\n  - ")[2]
    found = problems.split("\n  - ")
    starts = ("CUDA_DEVICE_MAX_CONNECTIONS='1'", "fp8='hybrid'", "there is no CUDA device")
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(start)
    assert "scripts/pretrain_gpt.py" in found[2]
    assert "doctor --prove" in found[2]


def test_an_argument_that_is_misspelt_is_one_line_on_one_rank(runs: Runs) -> None:
    """Before: the usage of all of Megatron-LM's arguments, on each rank, and then the error."""
    says = "argument --num-experts: invalid int value: 'two'"
    both = runs("under torchrun")
    assert both.returncode != 0, both.stderr
    assert re.search(r"exitcode +: 2 ", both.stderr), both.stderr
    assert "usage:" not in both.stdout + both.stderr
    # Once by rank 0, and in the last lines of torchrun's own report.
    assert both.stderr.count(f"train.py: {says}") == 2, both.stderr
    assert f"\ntrain.py: {says}\n" in f"\n{both.stderr}", both.stderr
    assert says in both.stderr.splitlines()[-2], both.stderr


def test_what_all_ranks_refuse_is_one_message(runs: Runs) -> None:
    """Before: a traceback on each rank."""
    both = runs("refused by all")
    assert both.returncode != 0, both.stderr
    assert re.search(r"exitcode +: 2 ", both.stderr), both.stderr
    assert 'refused.py", line' not in both.stderr, both.stderr
    # Once by rank 0, and in torchrun's own report.
    assert both.stderr.count("megatron_fsdp_adapter: The schedule") == 2, both.stderr
    assert both.stderr.count("  - lr=1: is 2") == 2, both.stderr


LACKING = {
    "lacking": "megatron_fsdp_adapter",
    "lacking, no flag": "megatron_fsdp_adapter",
    "lacking, doctor": "doctor",
    "lacking, proof": "doctor --prove",
}
"""A run, and the command that its message names."""


@pytest.mark.parametrize("name", LACKING)
def test_a_package_that_megatron_lm_lacks_is_one_line(runs: Runs, name: str) -> None:
    """Before: a traceback of Megatron-LM's imports."""
    done = runs(name)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    says = "absent_package is not installed, but Megatron-LM imports it."
    remedy = "Run pip install absent_package"
    assert done.stderr.splitlines()[-1] == f"{LACKING[name]}: {says} {remedy}"


def test_a_script_is_what_it_is_to_python(runs: Runs) -> None:
    """Module, path, workers of multiprocessing; and after its last line threads, functions of
    atexit and a save in the background still find its names."""
    ours = runs("as python")
    pythons = runs("python")
    assert ours.returncode == pythons.returncode == 5, ours.stderr
    roots = [Path(done.args[-1]) for done in (ours, pythons)]
    assert ours.stdout.replace(str(roots[0]), str(roots[1])) == pythons.stdout
    assert "spawn [Config(value=8)]\nfork" in ours.stdout
    assert "thread Config(" in ours.stdout
    assert [latest_iteration(root) for root in roots] == [7, 7]
