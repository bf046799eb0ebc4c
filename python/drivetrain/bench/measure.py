"""Paired timing and the table that shows it."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass
class Row:
    """One line of a benchmark: torch's figure, ours, their ratio and the target."""

    what: str
    unit: str
    torch: float
    ours: float
    ratio: float | None = None  # median of the paired ratios ours / torch
    low: float | None = None  # its 95 % interval
    high: float | None = None
    target: str = ""
    met: bool | None = None  # None: reported, no target

    def as_dict(self) -> dict[str, object]:
        """The row as plain data, for JSON."""
        return asdict(self)


def interleaved(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    warm_up: int = 5,
    prepare: Callable[[int], object] = lambda which: None,
) -> list[list[float]]:
    """Seconds of each call in each round, one list per call; who goes first alternates.

    prepare: called with a call's index before the call, not timed.
    """
    for _ in range(warm_up):
        for which, call in enumerate(calls):
            prepare(which)
            call()
    times: list[list[float]] = [[] for _ in calls]
    for i in range(rounds):
        order = range(len(calls)) if i % 2 else reversed(range(len(calls)))
        for which in order:
            prepare(which)
            begin = time.perf_counter()
            calls[which]()
            times[which].append(time.perf_counter() - begin)
    return times


def median_interval(values: Sequence[float], resamples: int = 2000) -> tuple[float, float, float]:
    """The median and its 95 % percentile-bootstrap interval (fixed seed)."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return statistics.median(values), medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def ratio_of_medians(
    below: Sequence[float], above: Sequence[float], resamples: int = 2000
) -> tuple[float, float, float]:
    """median(above) / median(below) of paired values that may be near zero, and its 95 % bootstrap interval."""
    rng = random.Random(0)
    indices = range(len(below))
    ratios = []
    for _ in range(resamples):
        chosen = rng.choices(indices, k=len(below))
        ratios.append(statistics.median(above[i] for i in chosen) / statistics.median(below[i] for i in chosen))
    ratios.sort()
    ratio = statistics.median(above) / statistics.median(below)
    return ratio, ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples)]


def ratio_row(what: str, torch_s: Sequence[float], ours_s: Sequence[float], target: float, *, strict_end: bool) -> Row:
    """A row of times in ms. strict_end: the interval's upper end must reach the target, not only the median."""
    ratio, low, high = median_interval([b / a for a, b in zip(torch_s, ours_s, strict=True)])
    return Row(
        what,
        "ms",
        statistics.median(torch_s) * 1e3,
        statistics.median(ours_s) * 1e3,
        ratio,
        low,
        high,
        f"{'upper end ' if strict_end else ''}<= {target:g}",
        (high if strict_end else ratio) <= target,
    )


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Prints the rows; as Markdown would too, so that they can be pasted."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "torch", "drivetrain", "ratio [95 %]", "target", ""):
        table.add_column(column, justify="left" if column in ("what", "target") else "right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]"
        verdict = {True: "[green]met", False: "[red]missed", None: ""}[row.met]
        table.add_row(row.what, f"{row.torch:.2f} {row.unit}", f"{row.ours:.2f} {row.unit}", ratio, row.target, verdict)
    Console(width=None if Console().is_terminal else 140).print(table)
