"""Draws the picture of README.md, docs/overview.svg, from the table docs/overview.yaml.

python scripts/overview.py                       # after a change of the table
python scripts/overview.py --out overview.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parents[1] / "docs"
OURS = "#2f6fd6"
PEER = "#9aa7b4"
TEXT = "#1b2733"
FAINT = "#5b6b7b"
STYLE = {
    "font.family": ["sans-serif"],
    "font.size": 10,
    "text.color": TEXT,
    "svg.fonttype": "none",
    "svg.hashsalt": "overview",
}
"""Settings of matplotlib. With them text stays text, and the same table gives the same file."""


def bars(axes: Axes, title: str, values: list[float], colors: list[str]) -> None:
    """Horizontal bars from zero, each with its value behind it."""
    drawn = axes.barh(range(len(values)), values, height=0.62, color=colors)
    axes.bar_label(drawn, fmt="%.1f", padding=4)
    axes.set_title(title, loc="left", fontsize=10, color=FAINT)
    axes.set_xlim(0, 1.15 * max(values))
    axes.tick_params(axis="x", colors=FAINT, labelsize=8)
    axes.tick_params(axis="y", length=0, labelcolor=TEXT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def draw(table: dict[str, Any], path: Path) -> None:
    """Writes the picture of a table to a file, in the format of its suffix."""
    rows = table["rows"]
    matplotlib.rcParams.update(STYLE)
    figure, (times, memory) = pyplot.subplots(
        1, 2, figsize=(9.8, 3.1), sharey=True, width_ratios=(1.3, 1)
    )
    colors = [OURS if row.get("ours") else PEER for row in rows]
    bars(times, "milliseconds per step", [row["ms"] for row in rows], colors)
    bars(memory, "peak GiB per GPU", [row["gib"] for row in rows], colors)
    times.set_yticks(range(len(rows)), [row["name"] for row in rows])
    for label, row in zip(times.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.get("ours") else "normal")
    floor = table["floor"]
    alone = f"forward and backward alone: {floor}"
    times.axvline(floor, color=TEXT, linewidth=1, linestyle=(0, (4, 3)))
    times.text(floor - 5, len(rows) - 0.38, alone, ha="right", va="center", fontsize=8)
    times.set_ylim(len(rows) - 0.05, -0.45)
    title = f"{table['model']}, {table['machine']}"
    figure.suptitle(title, x=0.012, ha="left", fontsize=11.5, weight="bold")
    figure.text(0.012, 0.86, table["setting"], fontsize=9, color=FAINT)
    source = f"{table['versions']}; commit {table['commit']}, {table['date']}; one run"
    figure.text(0.012, 0.025, source, fontsize=8, color=FAINT)
    figure.tight_layout(rect=(0, 0.05, 1, 0.94), w_pad=2.5)
    undated = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=undated, dpi=150)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Draws the picture. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--table", type=Path, default=DOCS / "overview.yaml", help="the numbers")
    parser.add_argument("--out", type=Path, default=DOCS / "overview.svg", help="SVG or PNG")
    options = parser.parse_args(argv)
    draw(yaml.safe_load(options.table.read_text()), options.out)
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
