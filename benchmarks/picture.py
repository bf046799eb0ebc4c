"""Draws docs/images/step_time.svg: ratios of drivetrain to torch, from the JSON of `drivetrain bench`.

python benchmarks/picture.py [FOLDER]    (default: benchmarks/results/cpu, with one file per topic)
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

REPOSITORY = Path(__file__).parents[1]
COLORS = {"optim": "tab:blue", "accumulate": "tab:green", "ddp": "tab:orange", "comm": "tab:red"}
OTHER_SIDE = re.compile(r"\bagainst\b|without and with")
TITLES = {"optim": "optimizers", "accumulate": "gradient accumulation", "ddp": "DDP", "comm": "all-reduce"}


def read(folder: Path) -> dict[str, Any]:
    """Reads every file of the folder into one dictionary: the rows of each topic, and facts about the machine.

    Raises:
        SystemExit: The folder has no JSON file.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit(
            f"{folder} has no JSON file: write one with `drivetrain bench optim --json {folder}/optim.json`"
        )
    found: dict[str, Any] = {}
    for file in files:
        found |= json.loads(file.read_text())
    return found


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Selects the rows that compare drivetrain with torch.

    Indented rows explain the row above. Rows that name another side, such as "AVX2 against AVX-512", need their text.
    """
    return [
        row
        for row in rows
        if row["ratio"] is not None and not row["what"].startswith(" ") and not OTHER_SIDE.search(row["what"])
    ]


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws one bar per row, with its 95 % interval, and writes the chart as SVG."""
    bars = [(topic, row) for topic in COLORS if topic in found for row in shown(found[topic])]
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.27 * len(bars)), layout="constrained")
    for topic, color in COLORS.items():
        places = [place for place, (of, _) in enumerate(bars) if of == topic]
        if not places:
            continue
        rows = [bars[place][1] for place in places]
        ratios = [row["ratio"] for row in rows]
        intervals = [
            [max(0.0, row["ratio"] - (row["low"] or row["ratio"])) for row in rows],
            [max(0.0, (row["high"] or row["ratio"]) - row["ratio"]) for row in rows],
        ]
        axes.barh(places, ratios, xerr=intervals, color=color, ecolor="0.4", label=TITLES[topic])
    axes.axvline(1, color="0.2", linewidth=1)
    axes.set_yticks(range(len(bars)), [textwrap.fill(row["what"], 60) for _, row in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("drivetrain / torch; left of the line, drivetrain is faster")
    axes.legend(loc="upper right", fontsize=8)
    axes.set_title(f"torch {found['torch']}, {found['isa']}, two CPU cores", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})  # keeps the file equal for equal figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=REPOSITORY / "benchmarks" / "results" / "cpu")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "images" / "step_time.svg")
    args = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "drivetrain"
    draw(read(args.folder), args.output)


if __name__ == "__main__":
    main()
