"""The table of recipes: `table.json`, and docs/recipes.md that is made of it.

    python -m tests.recipes.table bridge                    # recomputes the rows of one source
    python -m tests.recipes.table path/to/Megatron-LM

The source has to be installed for the Python that runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("table.json")
DOCS = ROOT / "docs" / "recipes.md"

CLASSES: Mapping[str, str] = {
    "accepted": "no option is refused, and a Hopper GPU computes it",
    "waits": "no option is refused, but the GPU has to compute more than Hopper does",
    "refused": "at least one option is refused",
    "other wrapper": "asks for PyTorch's FSDP2, not for Megatron's: runs as it is, without ours",
}

NOT_BUILT = {
    "qwen35_vl_35b_a3b_sft_2gpu_h100_bf16_fsdp": "experimental_attention_variant",
    "nemotron_3_5_lightning_pretrain_8k_fsdp": "is_hybrid_model",
}
"""Accepted recipes whose model a proof cannot build, and the option for which it says so."""

HEADER = """# Recipes that turn FSDP on

Every recipe of Megatron-Bridge that sets `use_megatron_fsdp`, and every functional test configuration of Megatron-LM that turns FSDP on, with what this package says to it. For the class nothing is trained: the recipe is made, completed as for a run
(`apply_fsdp_overrides`, or what `--use-megatron-fsdp` sets), validated by Megatron-Bridge where it is one of its recipes, and checked by the rules for options, on a pretended Hopper GPU. What only a model shows (its layers, its
initialisers, its groups) is not checked. Models' configurations, which recipes take from the hub, are made; sizes of Nemotron and Qwen are not theirs. The two
configurations that are refused for `ckpt_format` are refused by their own Megatron-LM as well.

Made by `python -m tests.recipes.table`, kept by `tests/recipes/test_recipe_table.py` (against the rules of today) and `tests/recipes/test_recipe_sources.py` (against the sources, where they are installed). Those that are accepted are trained
by the rule of [`doctor --prove`](prove.md), on two ranks, without what needs a GPU where there is none (`tests/recipes/test_recipes_train.py`): three steps like DDP of the same recipe, saved, and resumed under another strategy. "Trained" says which have been, on two CPU processes; not those of Qwen and Nemotron, whose layers a proof cannot build.
"""  # noqa: E501


def read() -> list[dict[str, Any]]:
    """The rows as they are stored."""
    return json.loads(TABLE.read_text())


def of_source(source: str) -> list[Row]:
    """The rows of "bridge" or of a folder of Megatron-LM, computed in a process of its own.
    RuntimeError with what it printed if it fails."""
    module, arguments = ("of_bridge", []) if source == "bridge" else ("of_megatron_lm", [source])
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.recipes.{module}", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("ROWS")]
    if done.returncode or not found:
        raise RuntimeError(f"the recipes of {source}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return merged([], json.loads(found[-1].removeprefix("ROWS")))


def merged(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """`old` with all rows of the sources of `new` replaced; sorted."""
    sources = {row["source"] for row in new}
    kept = [row for row in old if row["source"] not in sources]
    return sorted([*kept, *new], key=lambda row: (row["source"], row["name"]))


def refused_options(rows: Sequence[Row]) -> list[tuple[str, int, int, str]]:
    """(option, recipes that need it, recipes that need nothing else, reason), those that most need
    first."""
    counts = Counter(option for row in rows for option in row["refused"])
    alone = Counter(option for row in rows if len(row["refused"]) == 1 for option in row["refused"])
    reasons = {option: why for row in rows for option, why in row["refused"].items()}
    order = sorted(counts, key=lambda option: (-counts[option], option))
    return [(option, counts[option], alone[option], reasons[option]) for option in order]


def rendered(rows: Sequence[Row]) -> str:
    """docs/recipes.md."""
    sources = list(dict.fromkeys(row["source"] for row in rows))
    lines = [HEADER, "| class | " + " | ".join(sources) + " | meaning |",
             "|---|" + "---|" * (len(sources) + 1)]  # fmt: skip
    for name, meaning in CLASSES.items():
        numbers = [sum(row["class"] == name and row["source"] == source for row in rows)
                   for source in sources]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} | {meaning} |")
    lines += ["", "## Options that are refused", "", "| option | recipes | by it alone | reason |",
              "|---|---|---|---|"]  # fmt: skip
    lines += [f"| `{option}` | {count} | {alone} | {why} |"
              for option, count, alone, why in refused_options(rows)]  # fmt: skip
    for source in sources:
        lines += ["", f"## {source}", "", "| recipe | class | why | trained | turns on |"]
        lines += ["|---|---|---|---|---|"]
        lines += [_line(row) for row in rows if row["source"] == source]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    why = [f"`{option}`" for option in row["refused"]]
    why += [f"waits for {one}" for one in row["waits"]]
    on = [f"`{name}`" if value is True else f"`{name}={_text(value)}`"
          for name, value in row["on"].items()]  # fmt: skip
    told = [f"`{row['name']}`", row["class"], ", ".join(why) or "-", _trained(row), ", ".join(on)]
    return f"| {' | '.join(told)} |"


def _trained(row: Row) -> str:
    if row["class"] != "accepted":
        return "-"
    option = NOT_BUILT.get(row["name"])
    return f"no: `{option}`" if option else "yes"


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def main(argv: Sequence[str]) -> None:
    """Recomputes the rows of the sources and writes table and docs."""
    rows: list[Row] = list(read()) if TABLE.is_file() else []
    for source in argv:
        rows = merged(rows, of_source(source))
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")
    DOCS.write_text(rendered(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
