"""A conversion holds a few blocks in memory, not the model: the kernel enforces it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_fsdp_adapter.checkpoint.convert import convert
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import Contents, write_folder
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor
from tests.lib.checkpoint.convert_cases import Model, arguments, fsdp_state, save_fsdp, shapes

CHECKS = ("checkpoint/convert/dcp_files.py", "checkpoint/convert/lazy.py")

MIB = 2**20
ROWS = 2**20  # of 16 fp32 numbers: embedding and output layer have 64 MiB each
BLOCK = 2 * MIB
BOUND = 2 * BLOCK + 5 * BLOCK  # blocks are the chunks of the source
SLACK = 8 * MIB
"""Of the interpreter. The allocator has none, as it is set to return what is freed."""

PROGRAM = """
import resource, sys
from pathlib import Path
from megatron_fsdp_adapter.checkpoint.convert import convert
warm, source, target, to, block, allowed = sys.argv[1:]
convert(Path(warm), Path(target + "_warm"), to, block_bytes=int(block))  # imports, pools, caches
used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + int(allowed),) * 2)
report = convert(Path(source), Path(target), to, block_bytes=int(block))
print(report["nbytes"])
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Format -> (a small checkpoint, one with two tensors of 64 MiB in chunks of 2 MiB)."""
    root = tmp_path_factory.mktemp("large")
    model = Model()  # in bf16: what torch_dist gets is cast
    small = save_fsdp(root / "small", fsdp_state(model))
    large = root / "large"
    folder = large / "iter_0000003"
    folder.mkdir(parents=True)
    tensors = {}
    for name, (rows, *width) in shapes(model).items():
        large_one = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        tensor = constant((ROWS if large_one else rows, *width))
        if "linear_fc1" not in name:
            tensors["model", f"module.{name}"] = tensor
            continue
        for half in ("_w", "_v"):
            tensors["model", f"module.{name}{half}"] = constant((rows // 2, *width))
    objects = {("args",): arguments(model), ("iteration",): 3}
    write_folder(folder, Contents(tensors, objects), BLOCK, lambda name, nbytes: None)
    (large / "latest_checkpointed_iteration.txt").write_text("3")
    convert(large, root / "large_td", "torch_dist", block_bytes=BLOCK)
    convert(small, root / "small_td", "torch_dist")
    return {
        "fsdp_dtensor": (small, large),
        "torch_dist": (root / "small_td", root / "large_td"),
    }


def constant(shape: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(shape, torch.float32, lambda offsets, out: out.fill_(0.5))


def run(
    pair: tuple[Path, Path], target: Path, to: str, block: int
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *map(str, pair), str(target), to]
    exact = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
    return subprocess.run(
        [*command, str(block), str(BOUND + SLACK)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **exact},
    )


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("fsdp_dtensor", "torch_dist"),
        pytest.param("torch_dist", "fsdp_dtensor", marks=pytest.mark.full),
    ],
)
def test_the_bound_holds_under_a_limit_of_the_kernel(
    tmp_path: Path, sources: dict[str, tuple[Path, Path]], source: str, to: str
) -> None:
    done = run(sources[source], tmp_path / "out", to, BLOCK)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 2 * 32 * MIB


@pytest.mark.full
def test_the_limit_is_felt(tmp_path: Path, sources: dict[str, tuple[Path, Path]]) -> None:
    """The same with blocks of a whole tensor does not get by."""
    done = run(sources["fsdp_dtensor"], tmp_path / "out", "torch_dist", 64 * MIB)
    assert done.returncode != 0 and "memory" in done.stderr, done.stderr[-2000:]
