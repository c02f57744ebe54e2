"""Every command and every piece of Python in README.md and docs/ does what it says: it is run, or
has a mark that says why not.

    ```bash            runs by default         ```python          runs by default
    ```bash slow       runs with --full        ```python plain    runs behind what it goes on from
    ```bash gpu        does not run here       ```python sharded  runs behind a model of that
                                               ```python sketch   compiles, its imports are there

Blocks of one document run in a folder of their own, one after the other. Nothing of them is changed
but what stands for something of the reader's: a path to Megatron-LM's script, and `...` behind it;
the first node, and the processes of each.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lib.integration.documented import BLOCKS, ROOT, Block
from tests.lib.ranks.ranks import rendezvous

CHECKS = ("__main__.py",)

BASH_MARKS = {
    "nodes": "the same command on each of two nodes: two launchers here, of one process",
    "slow": "minutes: runs with --full",
    "megatron-lm": "needs a checkout of Megatron-LM: runs with --full and MEGATRON_LM_PATH",
    "gpu": "needs GPUs",
    "install": "makes environments, or downloads packages",
    "tests": "runs this suite",
}
PYTHON_MARKS = {
    "plain": "goes on from a plain model, a mesh and data",
    "sharded": "goes on from a sharded model and its optimizer",
    "sketch": "names the reader's own model and optimizer: compiles",
    "bridge": "needs Megatron-Bridge: compiles",
    "transformers": "needs that: compiles",
    "elastic": "needs torchft: compiles",
}
ABSENT = {
    "bridge": ("megatron.bridge",),
    "transformers": ("transformers", "tokenizers"),
    "elastic": ("torchft",),
}
BY_DEFAULT, WITH_FULL = frozenset({"", "nodes"}), frozenset({"", "nodes", "slow", "megatron-lm"})

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --lr 1e-3 --train-iters 10 --mock-data"
)
"""What `...` behind Megatron-LM's script stands for."""

SMALL_LLAMA = (
    "--config configs/llama-1.5b.yaml --num-layers 1 --hidden-size 16 --ffn-hidden-size 24 "
    "--num-attention-heads 2 --num-query-groups 1 --seq-length 16 --max-position-embeddings 16 "
    "--mock-data --train-iters 2 --lr-warmup-iters 0 --global-batch-size 1 --use-megatron-fsdp "
    "--ckpt-format fsdp_dtensor --save checkpoints --save-interval 2"
)
"""What saves `checkpoints`: the vocabulary is Llama's, as commands name it."""

HF_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}

PLAIN = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from megatron_fsdp_adapter import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
class Block(nn.Linear):
    pass
def build():
    return nn.Sequential(Block(8, 8), Block(8, 8))
module = model = build()
data = [[torch.randn(2, 8) for _ in range(2)] for _ in range(2)]
sharded = fully_shard_model(build(), mesh, fsdp_unit_modules=[Block])
matrices = [param for param in sharded.parameters() if param.ndim == 2]
rest = [param for param in sharded.parameters() if param.ndim != 2]
"""
SHARDED = f"""{PLAIN}
from megatron_fsdp_adapter import export_shards, export_weights
model = sharded
optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
"""
BEFORE = {"plain": PLAIN, "sharded": SHARDED}
"""What a block with a mark goes on from."""
AFTER = "\ndist.destroy_process_group()\n"


BASH = [block for block in BLOCKS if block.language == "bash"]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def _programs(folder: Path) -> Path:
    """`python`, `torchrun` and this package's command, of this environment, for PATH."""
    folder.mkdir()
    for name, words in {
        "python": "",
        "torchrun": " -m torch.distributed.run",
        "megatron-fsdp-adapter": " -m megatron_fsdp_adapter",
    }.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{words} "$@"\n')
        program.chmod(0o755)
    return folder


def run_bash(text: str, folder: Path, timeout: float = 900.0) -> None:
    """Runs a block as if pasted into a shell; an AssertionError with what it printed if any of
    its commands fails."""
    environment = {
        **os.environ,
        "PATH": f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{text}\nended with {done.returncode}:\n{done.stdout[-6000:]}"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands take for granted: a checkpoint, texts, a Hugging Face model's config."""
    root = tmp_path_factory.mktemp("documented")
    _programs(root / "bin")
    folder = root / "seed"
    folder.mkdir()
    for name in ("scripts", "configs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    run_bash(f"python scripts/pretrain_gpt.py {SMALL_LLAMA}", folder)
    (folder / "runs").mkdir()
    for name in "ab":
        (folder / "runs" / name).symlink_to(folder / "checkpoints")
    (folder / "my_texts").mkdir()
    for number in range(40):
        (folder / "my_texts" / f"{number}.txt").write_text("A text of the reader's own. " * 2000)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(HF_CONFIG))
    return folder


@pytest.fixture(scope="session")
def folder_of(saved: Path) -> Callable[[str], Path]:
    """The folder of a document, a copy of `saved`."""

    @functools.cache
    def copied(document: str) -> Path:
        folder = saved.parent / document.replace("/", "-")
        return Path(shutil.copytree(saved, folder, symlinks=True))

    return copied


def run_block(block: Block, folder: Path) -> None:
    """Runs a block; an AssertionError with what it printed, if it fails."""
    if block.language == "bash":
        script = Path(os.environ.get("MEGATRON_LM_PATH", "."), "pretrain_gpt.py").resolve()
        text = block.text.replace("path/to/pretrain_gpt.py", str(script))
        text = re.sub(r"\s\.\.\.(?=\s)", f" {MODEL}", text)
        if "nodes" in block.marks:
            return run_on_nodes(text, folder)
        return run_bash(text, folder)
    (folder / "meeting").unlink(missing_ok=True)
    before = "".join(BEFORE[mark] for mark in block.marks)
    (folder / "block.py").write_text(f"{before}{block.text}{AFTER if before else ''}")
    return run_bash("python block.py", folder)


def run_on_nodes(text: str, folder: Path) -> None:
    """Runs a block twice at a time, as two nodes do; the store where they meet is here. An
    AssertionError as of `run_bash`."""
    text = re.sub(r"--nproc-per-node \S+", "--nproc-per-node 1 --rdzv-conf is_host=0", text)
    with rendezvous(2) as place, ThreadPoolExecutor(2) as pool:
        text = text.replace("node0:29500", f"127.0.0.1:{place['MASTER_PORT']}")
        for ended in [pool.submit(run_bash, text, folder) for _ in range(2)]:
            ended.result()


DEFAULT = [block for block in BASH if block.runs(BY_DEFAULT)]
FULL = [block for block in BASH if block.runs(WITH_FULL) and not block.runs(BY_DEFAULT)]


@pytest.mark.parametrize(
    "block",
    [*DEFAULT, *(pytest.param(block, marks=pytest.mark.full) for block in FULL)],
    ids=lambda block: block.name,
)
def test_a_documented_command_works(
    block: Block, folder_of: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    if "megatron-lm" in block.marks:
        request.getfixturevalue("megatron_lm")  # or it is skipped
    run_block(block, folder_of(block.document))


IN_PLACE_OF = {"megatron_fsdp": "megatron_fsdp_adapter.plain.megatron_fsdp"}
"""A package that need not be installed, and the module with its names."""


def resolve_imports(tree: ast.AST, absent: tuple[str, ...] = ()) -> None:
    """Imports what a piece of code imports, but of packages that are `absent`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not alias.name.startswith(absent):
                    importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(absent):
            module = importlib.import_module(IN_PLACE_OF.get(node.module or "", node.module or ""))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_documented_python_works(block: Block, folder_of: Callable[[str], Path]) -> None:
    tree = ast.parse(block.text, block.name)
    absent = (ABSENT[mark] for mark in block.marks if mark in ABSENT)
    resolve_imports(tree, tuple(itertools.chain.from_iterable(absent)))
    # Where a comment says that a name is from.
    for name in re.findall(r"# from (megatron_fsdp_adapter[.\w]*)", block.text):
        importlib.import_module(name)
    if block.runs(frozenset({"", *BEFORE})):
        run_block(block, folder_of(block.document))


def test_every_block_runs_or_says_why_not() -> None:
    known = {"bash": BASH_MARKS, "python": PYTHON_MARKS, "json": {}}
    for block in BLOCKS:
        assert block.language in known, f"{block.name}: a block of {block.language}"
        unknown = set(block.marks) - set(known[block.language])
        assert not unknown, f"{block.name}: {unknown} is none of {list(known[block.language])}"
    assert len(DEFAULT) >= 8, "blocks are found"
    assert FULL, "blocks are found"
