"""The table of recipes is what the sources say, where they are installed: a recipe that is new, or
gone, or that turns on something else, fails here.

    MEGATRON_LM_PATH=path/to/Megatron-LM python -m pytest tests/recipes
    python -m pytest --full tests/recipes            # Megatron-Bridge too: importing it takes long

After a look at what has changed: `python -m tests.recipes.table bridge path/to/Megatron-LM`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import of_bridge, of_megatron_lm, table


def stored(source: str) -> list[dict[str, Any]]:
    """The rows of a source that the table is of."""
    found = [row for row in table.read() if row["source"] == source]
    if not found:
        pytest.skip(f"the table has no rows of {source}")
    return found


def test_functional_configurations_of_megatron_lm_are_those_of_the_table() -> None:
    named = os.environ.get("MEGATRON_LM_PATH")
    if not named or not (Path(named) / of_megatron_lm.CASES).is_dir():
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout with its functional tests")
    rows = stored(of_megatron_lm.source_name(Path(named)))
    try:
        found = table.of_source(named)
    except RuntimeError as error:
        if "ModuleNotFoundError" in str(error) and "megatron" not in str(error).split()[-1]:
            pytest.skip(f"Megatron-LM's arguments need a package: {str(error).split()[-1]}")
        raise
    assert found == rows


@pytest.mark.full
def test_recipes_of_megatron_bridge_are_those_of_the_table() -> None:
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("megatron-bridge is not installed")
    rows = stored("Megatron-Bridge " + importlib.metadata.version("megatron-bridge"))
    assert table.of_source("bridge") == rows


def test_recipes_are_found_through_the_functions_they_call(tmp_path: Path) -> None:
    folder = tmp_path / "recipes" / "family"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text(textwrap.dedent("""
        def _shared(cfg):
            cfg.ddp.use_megatron_fsdp = True
        def on_config():
            cfg = make(); _shared(cfg); return cfg
        def derived_config():
            return on_config()
        def argument_config():
            return Config(use_megatron_fsdp=True)
        def off_config():
            cfg = make(); cfg.ddp.use_megatron_fsdp = False; return cfg
    """))
    module = "megatron.bridge.recipes.family.one"
    names = ("argument_config", "derived_config", "on_config")
    assert of_bridge.recipes_with_fsdp(tmp_path) == [(module, name) for name in names]


def test_a_configuration_becomes_the_command_line_of_its_test(tmp_path: Path) -> None:
    cases = tmp_path / of_megatron_lm.CASES
    contents = {
        "gpt/on": "MODEL_ARGS:\n  --use-megatron-fsdp: true\n  --bf16: false\n  --lr: 0.1\n"
                  "  --moe-layer-freq: ([0]*1 + [1]*1)\n  --recompute-modules: a b\n",
        "gpt/off": "MODEL_ARGS:\n  --use-megatron-fsdp: false\n",
        "gpt/another": "MODEL_ARGS:\n  --lr: 0.1\n",
        "rl/list": "MODEL_ARGS: []\n",
    }  # fmt: skip
    for name, text in contents.items():
        (cases / name).mkdir(parents=True)
        (cases / name / "model_config.yaml").write_text(text)
    [(name, content)] = of_megatron_lm.configurations(tmp_path)
    assert name == "gpt/on"
    assert of_megatron_lm.command_line(content["MODEL_ARGS"]) == [
        "--use-megatron-fsdp", "--lr", "0.1", "--moe-layer-freq", "([0]*1 + [1]*1)",
        "--recompute-modules", "a", "b",
    ]  # fmt: skip
