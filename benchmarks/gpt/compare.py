"""Trains one model with both engines from one seed, prints one table, and fails if their losses differ."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

from launch import ENGINES, run_ranks
from model import PRESETS
from report import console, mebibytes

Run = dict[str, Any]  # the JSON object of train.py --json

FIRST_STEPS = 20
TRAINING_TOLERANCE = 1e-4
HELD_OUT_TOLERANCE = 0.01


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Options that are not listed here go to train.py: --batch-size 4, --bf16, --device cpu, ...",
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="small", help="model shape (%(default)s)")
    add("--steps", type=int, default=60, help="optimizer steps per run (%(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and batches, for both engines (%(default)s)")
    add("--ranks", type=int, default=2, help="processes per run (%(default)s)")
    add("--repeat", type=int, default=1, help="runs per engine, in turns; the table shows medians (%(default)s)")
    add("--timeout", type=float, default=1800, help="seconds until a run counts as hung (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="file for the metrics of all runs, by engine")
    add("--plot", type=Path, metavar="FILE.png", help="image file for both loss curves; needs matplotlib")
    return parser.parse_known_args()


def train(engine: str, args: argparse.Namespace, extra: list[str]) -> Run:
    """Run train.py under torchrun with `engine` and return its metrics."""
    arguments = [f"--preset={args.preset}", f"--steps={args.steps}", f"--seed={args.seed}", "--sample-bytes=0", *extra]
    return run_ranks(
        Path(__file__).parents[2] / "examples" / "gpt" / "train.py",
        engine,
        arguments,
        ranks=args.ranks,
        timeout=args.timeout,
    )


def difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest absolute difference; nan if a loss is nan, so that it exceeds every tolerance."""
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return float("nan") if any(gap != gap for gap in gaps) else max(gaps)


def compare_losses(torch_run: Run, drivetrain_run: Run, table: Table) -> tuple[float, float]:
    """Add sampled losses to the table; return the largest training and the final held-out difference."""
    theirs, ours = torch_run["losses"], drivetrain_run["losses"]
    points = sorted({0, min(FIRST_STEPS, len(ours)) - 1, *(len(ours) * k // 4 - 1 for k in range(1, 5))} - {-1})
    for point in points:
        a, b = theirs[point], ours[point]
        table.add_row(f"training loss, step {point + 1}", f"{a:.5f}", f"{b:.5f}", f"{abs(a - b):.1e}")
    first = difference(theirs[:FIRST_STEPS], ours[:FIRST_STEPS])
    table.add_row(f"largest difference, first {FIRST_STEPS} steps", "", "", f"{first:.1e}")
    table.add_row("largest difference, all steps", "", "", f"{difference(theirs, ours):.1e}")
    for (step, a), (_, b) in zip(torch_run["held_out_losses"], drivetrain_run["held_out_losses"], strict=True):
        table.add_row(f"held-out loss, step {step}", f"{a:.5f}", f"{b:.5f}", f"{abs(a - b):.1e}")
    return first, difference([torch_run["held_out_losses"][-1][1]], [drivetrain_run["held_out_losses"][-1][1]])


def compare_costs(torch_runs: list[Run], drivetrain_runs: list[Run], table: Table) -> None:
    """Add step time, communication and memory to the table: medians over the runs of each engine."""

    def median(runs: list[Run], key: str) -> float:
        values: list[float] = [run[key] for run in runs]
        return statistics.median(values)

    def per_rank(runs: list[Run], key: str) -> list[int]:
        return [statistics.median_low(sizes) for sizes in zip(*(run[key] for run in runs), strict=True)]

    for label, key in (
        ("step time", "step_ms"),
        ("  without synchronization", "unsynced_step_ms"),
        ("communication left exposed", "exposed_communication_ms"),
    ):
        a, b = median(torch_runs, key), median(drivetrain_runs, key)
        table.add_row(label, f"{a:.2f} ms", f"{b:.2f} ms", f"{b - a:+.2f} ms")
    for label, key in (
        ("peak memory per rank", "peak_memory_bytes"),
        ("memory at rest", "rest_memory_bytes"),
    ):
        sizes, others = per_rank(torch_runs, key), per_rank(drivetrain_runs, key)
        gap = (max(others) - max(sizes)) / 2**20
        table.add_row(label, f"{mebibytes(sizes)} MiB", f"{mebibytes(others)} MiB", f"{gap:+.1f} MiB")


def verdict(label: str, gap: float, tolerance: float) -> bool:
    """Print and return whether a difference is within its tolerance."""
    passed = gap <= tolerance  # False for nan too
    word = "[green]PASS[/]" if passed else "[red]FAIL[/]"
    console.print(f"{word}  {label}: differ by {gap:.1e}, allowed {tolerance:g}")
    return passed


def plot(runs: dict[str, Run], path: Path) -> None:
    """Draw the training losses (thin) and held-out losses (dots) of both engines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for (engine, run), style in zip(runs.items(), ("-", "--"), strict=True):
        (line,) = axes.plot(run["losses"], style, linewidth=1, label=f"{engine}, training")
        axes.plot(
            *zip(*run["held_out_losses"], strict=True),
            "o",
            color=line.get_color(),
            label=f"{engine}, held out",
        )
    axes.set(
        xlabel="step",
        ylabel="nats per byte",
        title=f"{runs['torch']['preset']}, {runs['torch']['world_size']} ranks",
    )
    axes.legend()
    figure.savefig(path, dpi=150)
    console.print(f"wrote {path}")


def main() -> None:
    args, extra = parse_arguments()
    runs: dict[str, list[Run]] = {engine: [] for engine in ENGINES}
    for repeat in range(args.repeat):
        for engine in ENGINES:
            console.print(f"run {repeat + 1} of {args.repeat}, engine {engine} ...")
            runs[engine].append(train(engine, args, extra))
    first = {engine: of_engine[0] for engine, of_engine in runs.items()}
    table = Table(title=f"{args.preset}, {args.steps} steps, {args.ranks} ranks, seed {args.seed}")
    for column in ("", *ENGINES, "difference"):
        table.add_column(column, justify="right" if column else "left")
    training_gap, held_out_gap = compare_losses(first["torch"], first["drivetrain"], table)
    table.add_section()
    compare_costs(runs["torch"], runs["drivetrain"], table)
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps(runs))
    if args.plot:
        plot(first, args.plot)
    passed = [
        verdict(f"first {FIRST_STEPS} training losses", training_gap, TRAINING_TOLERANCE),
        verdict("final held-out loss", held_out_gap, HELD_OUT_TOLERANCE),
    ]
    if first["torch"]["bf16"]:
        console.print("The tolerances are meant for fp32; in bf16 they only inform.")
    sys.exit(0 if all(passed) or first["torch"]["bf16"] else 1)


if __name__ == "__main__":
    main()
