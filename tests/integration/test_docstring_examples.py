"""The examples in the docstrings that the pages of the API are made of print what they say, on two
ranks.

Each example may use the names of the public API, `torch`, `nn`, `dist`, and these: `folder`, an
empty folder of both ranks; `gpt`, a GPTModel; `model` and `optimizer`, such a model after it was
wrapped, and Megatron's optimizer; `source`, a checkpoint of a run.
"""

from __future__ import annotations

import builtins
import doctest
import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

import megatron_fsdp_adapter
from megatron_fsdp_adapter import checkpoint, leave_fsdp2, uninstall
from megatron_fsdp_adapter.checkpoint.convert import convert
from megatron_fsdp_adapter.tools.inspection import describe, diff
from tests.lib.checkpoint.convert_cases import Model, fsdp_state, save_fsdp
from tests.lib.gpt.gpt import Case, build_model, build_trainer, init_megatron
from tests.lib.pages import ROOT
from tests.lib.ranks.launch import run_ranks

CHECKS = ()  # reads docstrings

OBJECT = re.compile(r"^::: (\S+)$", re.M)
WITHOUT = {
    "megatron_fsdp_adapter.elastic_optimizer": "needs torchft: docs/elastic.md has a program",
    "megatron_fsdp_adapter.apply_fsdp_overrides": "needs Megatron-Bridge: examples/",
}
"""Objects without an example, and the reason."""
OF_ONE_PROCESS = (convert,)
CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=24)
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def _documented() -> dict[str, Any]:
    """The objects of the pages, by their dotted names."""
    found = {}
    for page in sorted((ROOT / "docs").glob("api*.md")):
        for name in OBJECT.findall(page.read_text()):
            module, _, attribute = name.rpartition(".")
            found[name] = getattr(importlib.import_module(module), attribute)
    return found


def _names(folder: Path) -> dict[str, Any]:
    """The globals of an example."""
    public = {name: getattr(megatron_fsdp_adapter, name) for name in megatron_fsdp_adapter.__all__}
    public |= {name: getattr(checkpoint, name) for name in checkpoint.__all__}
    return {
        **public,
        "convert": convert,
        "describe": describe,
        "diff": diff,
        "dist": dist,
        "folder": folder,
        "nn": nn,
        "ProcessGroupCollection": ProcessGroupCollection,
        "torch": torch,
    }


def _failures(name: str, text: str, names: Mapping[str, Any]) -> str:
    """The report of an example's lines that print something else; empty if none does."""
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    example = doctest.DocTestParser().get_doctest(text, dict(names), name, None, 0)
    assert example.examples, f"{name} has no example, and WITHOUT has no reason"
    runner.run(example, out=report.append)
    return "".join(report)


def _without_announcements(original: Any) -> Any:
    """`print`, but for the lines that wrappers print on the first rank alone."""

    def output(*values: Any, **options: Any) -> None:
        if not str(values[0]).startswith(("fully_shard", "FullyShardedDataParallel: ")):
            original(*values, **options)

    return output


def _run(rank: int, world: int, root: Path) -> dict[str, str]:
    device = init_megatron()
    builtins.print = _without_announcements(print)
    found = {}
    for number, (name, value) in enumerate(_documented().items()):
        if name in WITHOUT:
            continue
        text = inspect.getdoc(value) or ""
        names = _names(root / str(number)) | {"source": root / "source"}
        if "gpt" in text:
            names["gpt"] = build_model(CASE, device)
        if "[model]" in text:
            trainer = build_trainer(CASE, "optim_grads_params", device)
            names |= {"model": trainer.wrapper, "optimizer": trainer.optimizer}
        if rank == 0 or value not in OF_ONE_PROCESS:
            found[name] = _failures(name, text, names)
        uninstall()
        leave_fsdp2()
        dist.barrier()
    return found


def test_examples_print_what_they_say(tmp_path: Path) -> None:
    save_fsdp(tmp_path / "source", fsdp_state(Model()))
    ranks = run_ranks(_run, 2, tmp_path, timeout=300.0)
    for rank, found in enumerate(ranks):
        failed = [report for report in found.values() if report]
        assert not failed, f"rank {rank}:\n" + "\n".join(failed)
    assert ranks[0].keys() | WITHOUT.keys() == _documented().keys()
