"""Trains every task with both engines from one seed, and prints losses, time per step and memory in one table."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

from launch import ENGINES, positive, run_ranks
from report import console
from rich.table import Table

TASKS = ("image_classification", "recommender", "diffusion", "fine_tuning")
# A network with batch normalization and a high learning rate multiplies a last bit by 10 or more in each step. So only
# the first losses are comparable.
FIRST_STEPS = 4
TOLERANCE = 1e-3

Run = dict[str, Any]  # the JSON object of a task's --json


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "tasks", nargs="*", choices=[*TASKS, []], default=[], metavar="TASK", help=f"all by default: {', '.join(TASKS)}"
    )
    add("--steps", type=positive(int), help="optimizer steps per run; each task has its own default")
    add("--ranks", type=positive(int), default=2, help="processes per run (%(default)s)")
    add("--repeat", type=positive(int), default=1, help="runs per engine, in turns; times are medians (%(default)s)")
    add("--timeout", type=positive(float), default=1800, help="seconds until a run counts as hung (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="file for the metrics of all runs, by task and engine")
    return parser.parse_args()


def train(task: str, engine: str, args: argparse.Namespace) -> Run:
    """Run a task under torchrun and return its metrics, or exit with its output."""
    arguments = [f"--steps={args.steps}"] if args.steps else []
    script = Path(__file__).with_name(f"{task}.py")
    return run_ranks(script, engine, arguments, ranks=args.ranks, timeout=args.timeout)


def largest_difference(runs: dict[str, list[Run]]) -> float:
    """Return the largest difference of the first losses between the engines; nan if a loss is nan."""
    pairs = zip(*(runs[engine][0]["losses"][:FIRST_STEPS] for engine in ENGINES), strict=True)
    gaps = [abs(theirs - ours) for theirs, ours in pairs]
    return float("nan") if any(gap != gap for gap in gaps) else max(gaps)


def add_rows(table: Table, task: str, runs: dict[str, list[Run]]) -> None:
    """Add a task's losses, results and costs to the table."""

    def both(name: str, values: list[float], digits: int, unit: str = "") -> None:
        theirs, ours = values
        ratio = f"{ours / theirs:.2f}" if theirs else ""
        table.add_row(name, f"{theirs:.{digits}f}{unit}", f"{ours:.{digits}f}{unit}", ratio)

    table.add_section()
    table.add_row(f"[bold]{task.replace('_', ' ')}[/]", "", "", "")
    first = [runs[engine][0] for engine in ENGINES]
    steps = len(first[0]["losses"])
    tail = max(1, steps // 10)
    both(
        f"mean loss of the last {tail} of {steps} steps", [statistics.fmean(run["losses"][-tail:]) for run in first], 4
    )
    for name in first[0]["results"]:
        both(name, [run["results"][name] for run in first], 4)
    times = [statistics.median(run["step_ms"] for run in runs[engine]) for engine in ENGINES]
    memory = [statistics.median(max(run["peak_memory_bytes"]) for run in runs[engine]) for engine in ENGINES]
    both("time per step", times, 1, " ms")
    both("peak memory per rank", [size / 2**20 for size in memory], 0, " MiB")


def main() -> None:
    args = parse_arguments()
    table = Table(title=f"{args.ranks} ranks")
    for column in ("", *ENGINES, "ratio"):
        table.add_column(column, justify="right" if column else "left")
    all_runs: dict[str, dict[str, list[Run]]] = {}
    failed = []
    for task in args.tasks or TASKS:
        runs: dict[str, list[Run]] = {engine: [] for engine in ENGINES}
        for repeat in range(args.repeat):
            for engine in ENGINES:
                console.print(f"{task}, run {repeat + 1} of {args.repeat}, engine {engine} ...")
                runs[engine].append(train(task, engine, args))
        all_runs[task] = runs
        add_rows(table, task, runs)
        gap = largest_difference(runs)
        table.add_row(f"largest difference of the first {FIRST_STEPS} losses", "", f"{gap:.1e}", "")
        if not gap <= TOLERANCE:  # true for nan as well
            failed.append(f"{task}: the first {FIRST_STEPS} losses differ by {gap:.1e}, allowed {TOLERANCE:g}")
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps(all_runs))
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
