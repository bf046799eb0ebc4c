"""Draws docs/images/scaling.svg from the JSON of `python benchmarks/run.py scaling`.

python benchmarks/scaling_picture.py [FILE]    (default: benchmarks/results/clusters/scaling.json)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

REPOSITORY = Path(__file__).parents[1]
LINES = {
    "efficiency": "planned buckets",
    "efficiency_capped": "buckets of 25 MiB",
    "efficiency_jittered": "planned buckets, ranks vary by 1 %",
}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws the efficiency by number of ranks, and the simulated events, and writes both as SVG."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", width_ratios=(3, 2))
    ranks = [scale["ranks"] for scale in found["scales"]]
    for name, label in LINES.items():
        left.plot(ranks, [100 * scale[name] for scale in found["scales"]], marker="o", markersize=3, label=label)
    left.set_xscale("log", base=2)
    left.set_xticks(ranks, [str(count) for count in ranks], fontsize=7)
    left.set_xlabel("ranks")
    left.set_ylabel("weak-scaling efficiency, %")
    left.set_ylim(top=101)
    left.legend(fontsize=8)
    left.set_title(f"{found['workload']},\n{found['cluster']['name']}: predicted", fontsize=8)
    events = found["events"]
    right.barh(range(len(events)), [1e3 * seconds for seconds in events.values()], color="tab:orange")
    right.set_yticks(range(len(events)), list(events), fontsize=7)
    right.invert_yaxis()
    right.set_xlabel("step, ms")
    right.set_title("1,024 ranks, mean of ten simulated steps", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})  # keeps the file equal for equal figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "file", type=Path, nargs="?", default=REPOSITORY / "benchmarks" / "results" / "clusters" / "scaling.json"
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "images" / "scaling.svg")
    args = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "drivetrain"
    draw(json.loads(args.file.read_text()), args.output)


if __name__ == "__main__":
    main()
