"""Draws docs/elastic-kills.png, a run of replicas of which some are killed, from a record.

python scripts/elastic_picture.py                       # docs/elastic-kills.json
MEGATRON_LM_PATH=... python -m tests.lib.elastic.lm --kills 3 --record lines.json
python scripts/elastic_picture.py --lines lines.json    # a new record, and its picture
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD = DOCS / "elastic-kills.json"
LOSS, QUORUM, KILL, TEXT = "#2f6fd6", "#1b9e77", "#d62728", "#1b2733"

Line = dict[str, Any]


def record_of(logs: list[list[Line]]) -> dict[str, list[list[float]]]:
    """Kills and committed steps of the lines that replicas have written. Times begin with the first
    step; the loss of a step is the mean of its replicas'."""
    lines = [line for log in logs for line in log if line["committed"]]
    begin = min(line["time"] for line in lines)
    kills = []
    for log in logs:
        for line, after in pairwise(log):
            if line["pid"] != after["pid"]:
                kills.append([round(line["time"] - begin, 3)])
    steps = []
    for step in sorted({line["step"] for line in lines}):
        found = [line for line in lines if line["step"] == step]
        loss = sum(float.fromhex(line["loss"]) for line in found) / len(found)
        end = max(line["time"] for line in found) - begin
        steps.append([round(end, 3), step + 1, round(loss, 6), len(found[0]["replicas"])])
    return {"kills": sorted(kills), "steps": steps}


def draw(record: dict[str, list[list[float]]], path: Path) -> None:
    """Writes the picture of a record to a file."""
    times, _, losses, sizes = zip(*record["steps"], strict=True)
    pyplot.rcParams.update({"font.size": 9, "text.color": TEXT, "axes.labelcolor": TEXT})
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, 4.2), sharex=True, height_ratios=(2, 1)
    )
    above.plot(times, losses, ".-", color=LOSS, linewidth=1, markersize=4)
    above.set_ylabel("loss of each committed step")
    below.plot(times, sizes, ".", color=QUORUM, markersize=5)
    below.step(times, sizes, where="post", color=QUORUM, linewidth=1)
    below.set_ylabel("replicas")
    below.set_ylim(0, max(sizes) + 0.5)
    below.set_yticks(range(int(max(sizes)) + 1))
    below.set_xlabel("seconds since the first step; dashed: a rank of a replica is killed")
    axes: Axes
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        for [time] in record["kills"]:
            axes.axvline(time, color=KILL, linewidth=1, linestyle=(0, (4, 3)))
    figure.tight_layout()
    figure.savefig(path, dpi=130, facecolor="white")  # white, also on a dark page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=Path, help="what tests.lib.elastic.lm has recorded")
    parser.add_argument("--out", type=Path, default=DOCS / "elastic-kills.png")
    given = parser.parse_args()
    if given.lines:
        record = record_of(json.loads(given.lines.read_text()))
        lines = ",\n".join(json.dumps(step) for step in record["steps"])
        kills = json.dumps(record["kills"])
        RECORD.write_text(f'{{"kills": {kills}, "steps": [\n{lines}\n]}}\n')
    draw(json.loads(RECORD.read_text()), given.out)


if __name__ == "__main__":
    main()
