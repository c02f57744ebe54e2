"""Recipes of the table that are accepted, made small by the rule of `doctor --prove`: each trains
like DDP of the same recipe, saves, loads under another strategy and goes on.

    MEGATRON_LM_PATH=path/to/Megatron-LM python -m pytest --full tests/recipes/test_recipes_train.py

On two gloo ranks no recipe keeps tensor parallelism, FP8, fusions or layers of Transformer
Engine: `left_out` of a proof says so. Where there are GPUs, the same tests take two of those.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_adapter.cli.prove import this_room
from megatron_fsdp_adapter.prove import run, source
from megatron_fsdp_adapter.prove.proof import read_certificate
from megatron_fsdp_adapter.prove.shrink import shrink
from tests.recipes import of_bridge, of_megatron_lm, table

pytestmark = pytest.mark.full
RANKS, STEPS, MORE = 2, 3, 1

ACCEPTED = [row for row in table.read() if row["class"] == "accepted"]
OF_MEGATRON_LM = [row for row in ACCEPTED if row["source"].startswith("Megatron-LM")]
OF_BRIDGE = [row for row in ACCEPTED if row["source"].startswith("Megatron-Bridge")]

def identity(row: Any) -> str:
    return f"{row['source']}: {row['name']}"


@pytest.fixture(scope="module")
def checkout() -> Path:
    named = os.environ.get("MEGATRON_LM_PATH")
    if not named or not (Path(named) / of_megatron_lm.CASES).is_dir():
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout with its functional tests")
    return Path(named)


@pytest.mark.parametrize("row", OF_MEGATRON_LM, ids=identity)
def test_functional_configuration_trains_like_ddp_saves_and_resumes(
    row: table.Row, checkout: Path, tmp_path: Path
) -> None:
    """Through the command line, as a user would ask. What the row turns on is what was proven."""
    if row["source"] != of_megatron_lm.source_name(checkout):
        pytest.skip(f"MEGATRON_LM_PATH is not {row['source']}")
    content = dict(of_megatron_lm.configurations(checkout))[row["name"]]
    proof = tmp_path / "proof.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_fsdp_adapter", "doctor", "--prove",
         f"--ranks={RANKS}", f"--steps={STEPS}", f"--more={MORE}", f"--proof={proof}",
         "--world-size=8", str(checkout / "pretrain_gpt.py"),
         *of_megatron_lm.command_line(content["MODEL_ARGS"])],
        cwd=table.ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = read_certificate(proof)
    assert found.holds
    for option in ("data_parallel_sharding_strategy", "calculate_per_token_loss"):
        asked = row["on"].get(option, False)
        assert found.options.get(option, False) == asked
    assert found.options["small"]["world_size"] == RANKS


@pytest.fixture(scope="module")
def bridge() -> None:
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("megatron-bridge is not installed")
    version = importlib.metadata.version("megatron-bridge")
    if not any(row["source"].endswith(f" {version}") for row in OF_BRIDGE):
        pytest.skip(f"the table has no rows of Megatron-Bridge {version}")


def recipe_options(name: str) -> dict[str, Any]:
    """Of a finished recipe; it is made in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.recipes.of_bridge", name],
        cwd=table.ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("OPTIONS")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(found[-1].removeprefix("OPTIONS"))


@pytest.mark.parametrize("row", OF_BRIDGE, ids=identity)
def test_recipe_trains_like_ddp_saves_and_resumes(
    row: table.Row, bridge: None, tmp_path: Path
) -> None:
    name = row["name"]
    made = source.of_options(recipe_options(name), name, of_bridge.world_size(name))
    room = this_room(RANKS)
    if name in table.NOT_BUILT:
        with pytest.raises(ValueError, match=table.NOT_BUILT[name]):
            shrink(made.options, room)
        return
    for option, value in row["on"].items():
        if isinstance(value, (bool, int)) and option in made.options:
            assert bool(made.options[option]) == bool(value), option
    plan = run.Plan(shrink(made.options, room), tmp_path, STEPS, MORE)
    rows = run.prove(plan, "nccl" if room.cuda else "gloo", 600.0)
    assert rows and [one for one in rows if not one.holds] == []
