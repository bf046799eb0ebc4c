"""Trains the GPT and the residual network to a set quality with both engines, and compares the time that it takes.

Runs are paired by seed: both engines start from equal weights and see equal batches in the same order. The time is the
sum of the training steps until the held-out result reaches the target. Evaluations between steps do not count. The
last column is the geometric mean of the ratios of all seeds, with a 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
sys.path.insert(0, str(Path(__file__).parents[1] / "gpt"))

from accuracy import t_quantile
from launch import ENGINES, positive, run_ranks
from report import console
from rich.table import Table

Run = dict[str, Any]  # the JSON object of --json


@dataclass(frozen=True)
class Goal:
    """A model to train, and the quality to reach."""

    script: str  # in the repository
    quality: str
    target: float
    option: str  # that sets the target
    arguments: tuple[str, ...]


GOALS = {
    "gpt": Goal(
        "examples/gpt/train.py",
        "held-out loss (nats per byte)",
        2.0,
        "--target-loss",
        ("--steps=300", "--evaluations=30", "--held-out-rows=128", "--sample-bytes=0"),
    ),
    "resnet": Goal(
        "benchmarks/tasks/image_classification.py",
        "held-out accuracy",
        0.95,
        "--target",
        ("--steps=160", "--evaluations=32"),
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Options that are not listed here go to the scripts: --batch-size 4, ..."
    )
    add = parser.add_argument
    add(
        "goals",
        nargs="*",
        choices=[*GOALS, []],
        default=[],
        metavar="GOAL",
        help=f"of {', '.join(GOALS)}; all by default",
    )
    add("--seeds", type=positive(int), default=5, help="pairs of runs (%(default)s)")
    add("--target", type=positive(float), help="quality to reach; each goal has its own default")
    add("--ranks", type=positive(int), default=2, help="processes per run (%(default)s)")
    add("--timeout", type=positive(float), default=600, help="seconds until a run counts as hung (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="file for the times of all runs")
    args, extra = parser.parse_known_args()
    args.extra = extra
    if args.seeds < 2:
        parser.error("--seeds: an interval needs 2 or more")
    if args.target and len(args.goals) != 1:
        parser.error("--target: name one goal, to which it belongs")
    return args


def train(goal: Goal, engine: str, seed: int, args: argparse.Namespace) -> Run:
    """Train with an engine until the target is reached, and return the metrics."""
    arguments = [*goal.arguments, f"{goal.option}={args.target or goal.target}", f"--seed={seed}", *args.extra]
    script = Path(__file__).parents[2] / goal.script
    return run_ranks(script, engine, arguments, ranks=args.ranks, timeout=args.timeout)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % interval."""
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def seconds_of(runs: Sequence[Run]) -> str:
    mean, low, _ = interval([run["seconds_to_target"] for run in runs])
    return f"{mean:.2f} ± {mean - low:.2f}"


def add_rows(table: Table, name: str, target: float, runs: dict[str, list[Run]]) -> None:
    """Add a goal's times and steps, if every run has reached the target."""
    table.add_section()
    table.add_row(f"[bold]{name}: {GOALS[name].quality} of {target:g}[/]", "", "", "")
    reached = [sum(run["seconds_to_target"] is not None for run in runs[engine]) for engine in ENGINES]
    table.add_row("seeds that reached it", *(f"{count} of {len(runs[ENGINES[0]])}" for count in reached), "")
    if min(reached) < len(runs[ENGINES[0]]):
        return
    pairs = zip(*(runs[engine] for engine in ENGINES), strict=True)
    logs = [math.log(ours["seconds_to_target"] / theirs["seconds_to_target"]) for theirs, ours in pairs]
    ratio, low, high = (f"{math.exp(value):.3f}" for value in interval(logs))
    table.add_row("seconds", *(seconds_of(runs[engine]) for engine in ENGINES), f"{ratio} \\[{low}, {high}]")
    steps = (statistics.fmean(len(run["losses"]) for run in runs[engine]) for engine in ENGINES)
    table.add_row("steps", *(f"{mean:.1f}" for mean in steps), "")


def main() -> None:
    args = parse_arguments()
    table = Table(title=f"time to quality, {args.ranks} ranks, {args.seeds} seeds")
    for column in ("", *ENGINES, "ratio"):
        table.add_column(column, justify="right" if column else "left")
    found: dict[str, dict[str, list[Run]]] = {}
    missed = []
    for name in args.goals or GOALS:
        goal = GOALS[name]
        runs: dict[str, list[Run]] = {engine: [] for engine in ENGINES}
        for seed in range(args.seeds):
            # A machine that slows down favors neither engine.
            for engine in ENGINES if seed % 2 else reversed(ENGINES):
                console.print(f"{name}, seed {seed}, engine {engine} ...")
                runs[engine].append(train(goal, engine, seed, args))
                if runs[engine][-1]["seconds_to_target"] is None:
                    missed.append(f"{name}: seed {seed} with engine {engine} did not reach the target")
        add_rows(table, name, args.target or goal.target, runs)
        kept = ("seconds_to_target", "step_ms", "losses")
        found[name] = {engine: [{key: run[key] for key in kept} for run in runs[engine]] for engine in ENGINES}
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps(found))
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
