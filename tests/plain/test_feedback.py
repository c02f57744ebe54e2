"""The line that `fully_shard` prints of a model, and the warning if none was sharded."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_fsdp_adapter import fully_shard, leave_fsdp2, use_as_fsdp2
from megatron_fsdp_adapter.plain import feedback
from tests.lib.plain.plain import net, tokens
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("plain/feedback.py",)


@on_ranks(2)
def test_a_model_is_announced_when_it_runs_first(rank: int) -> None:
    model = net()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        before = written.getvalue()
        for step in range(2):
            model(tokens(step, 0, rank)).backward()
    assert before == ""
    expected = (
        "fully_shard: Net has 4 units over 2 ranks, 0.004 of 0.007 MiB of parameters on each; "
        "parameters in float32, compute in bfloat16, gradients reduced in float32\n"
    )
    assert written.getvalue() == (expected if rank == 0 else "")


@on_ranks(2)
def test_replicas_and_bytes_are_in_the_line(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(torch.nn.Linear(3, 5), mesh=mesh)
    written = io.StringIO()
    with patch.object(feedback, "MIB", 1), contextlib.redirect_stdout(written):
        model(torch.ones(1, 3)).sum().backward()
    text = "Linear has 1 unit over 2 replicas of 1 rank, 80.000 of 80.000 MiB"
    assert (text in written.getvalue()) is (rank == 0)


def _step() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    torch.optim.SGD([param]).step()


@pytest.mark.parametrize(
    ("does", "warns"),
    [
        ((use_as_fsdp2, _step), True),
        ((use_as_fsdp2,), False),  # a launcher
        ((_step, use_as_fsdp2), False),
        ((use_as_fsdp2, _step, feedback.note_sharding), False),
        ((use_as_fsdp2, leave_fsdp2, _step), False),
    ],
)
def test_a_program_that_has_trained_unsharded_is_warned(
    does: Any, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = feedback._Door()
    monkeypatch.setattr(feedback, "_door", door)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for one in does:
            one()
        leave_fsdp2()
        door.close()
    assert [str(one.message) for one in found] == [feedback.NOTHING] * warns


def test_the_warning_comes_at_exit() -> None:
    code = f"import runpy; names = runpy.run_path({__file__!r}); "
    code += "names['use_as_fsdp2'](); names['_step'](); print('end')"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
    )
    assert done.stdout == "end\n", done.stderr
    assert "nothing called it" in done.stderr
