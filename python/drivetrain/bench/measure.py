"""Times calls in interleaved pairs, and prints the table of ratios."""

import contextlib
import gc
import json
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .. import _C, __version__

_RESAMPLES = 2000


@dataclass
class Row:
    """One row of a benchmark: torch's figure, drivetrain's, their ratio, and the target."""

    what: str
    unit: str
    torch: float
    ours: float | None = None  # None: only torch's side exists, for example a copy
    ratio: float | None = None  # median of the paired ratios ours / torch
    low: float | None = None  # of the 95 % interval
    high: float | None = None
    target: str = ""
    met: bool | None = None  # None: no target
    roofline: float | None = None  # what the bytes that drivetrain must move take (roofline.py), if known

    def as_dict(self) -> dict[str, object]:
        """Returns the row as plain data for JSON."""
        return asdict(self)


def interleaved(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    warm_up: int = 5,
    prepare: Callable[[int], object] = lambda which: None,
    device: torch.device | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Times calls in rounds and returns the seconds, one list per call. The order of calls alternates.

    Args:
        calls: Called once per round each.
        rounds: Timed rounds.
        warm_up: Rounds before them that are not timed.
        prepare: Called with a call's index before that call, outside the timing.
        device: For a CUDA device, times its current stream by events, so calls need not synchronize.
        clock: Times the host. With time.process_time, the work of other processes is excluded.
    """
    for _ in range(warm_up):
        for which, call in enumerate(calls):
            prepare(which)
            call()
    timers = [Timer(device, clock) for _ in calls]
    with small_collections():
        for i in range(rounds):
            order = range(len(calls)) if i % 2 else reversed(range(len(calls)))
            for which in order:
                prepare(which)
                with timers[which]:
                    calls[which]()
    return [timer.seconds() for timer in timers]


@contextlib.contextmanager
def small_collections() -> Iterator[None]:
    """Excludes existing objects from Python's garbage collections. Traversing all imported objects takes tens of
    milliseconds, in whichever call triggers a collection. Objects that the calls create are still collected."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Timer:
    """Times the body of each `with`, by the host's clock or by events in the device's current stream."""

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._is_cuda = device is not None and device.type == "cuda"
        self._seconds: list[float] = []
        self._events: list[tuple[torch.Event, torch.Event]] = []

    def __enter__(self) -> None:
        if self._is_cuda:
            self._events.append((torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)))
            self._events[-1][0].record()
        else:
            self._seconds.append(-self._clock())

    def __exit__(self, *exception: object) -> None:
        if self._is_cuda:
            self._events[-1][1].record()
        else:
            self._seconds[-1] += self._clock()

    def seconds(self) -> list[float]:
        """Returns the seconds of each body, in order. Synchronizes the device once."""
        if self._events:
            torch.cuda.synchronize()
        return self._seconds + [begin.elapsed_time(end) / 1e3 for begin, end in self._events]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and the ends of its 95 % percentile-bootstrap interval (fixed seed)."""
    return _interval(lambda chosen: statistics.median(values[i] for i in chosen), len(values))


def ratio_of_medians(below: Sequence[float], above: Sequence[float]) -> tuple[float, float, float]:
    """Returns median(above) / median(below) and the ends of its 95 % bootstrap interval, for values that may be near
    zero."""

    def ratio(chosen: Sequence[int]) -> float:
        divisor = statistics.median(below[i] for i in chosen)  # 0 as a difference of quantized GPU times may be
        return statistics.median(above[i] for i in chosen) / divisor if divisor else math.inf

    return _interval(ratio, len(below))


def _interval(statistic: Callable[[Sequence[int]], float], count: int) -> tuple[float, float, float]:
    rng = random.Random(0)
    found = sorted(statistic(rng.choices(range(count), k=count)) for _ in range(_RESAMPLES))
    return statistic(range(count)), found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES)]


def ratio_row(
    what: str,
    torch_s: Sequence[float],
    ours_s: Sequence[float],
    target: float | None = None,
    *,
    strict_end: bool = False,
    unit: str = "ms",
    beyond: Sequence[float] | None = None,
) -> Row:
    """Returns a row of times in ms or us.

    With `strict_end`, the upper end of the interval must meet the target, not only the median. With `beyond`, the times
    of both sides are those beyond a third side's, and may be near zero.
    """
    scale = {"ms": 1e3, "us": 1e6}[unit]
    if beyond is None:
        interval = median_interval([b / a for a, b in zip(torch_s, ours_s, strict=True)])
    else:
        torch_s, ours_s = ([b - a for a, b in zip(beyond, side, strict=True)] for side in (torch_s, ours_s))
        interval = ratio_of_medians(torch_s, ours_s)
    row = Row(what, unit, scale * statistics.median(torch_s), scale * statistics.median(ours_s), *interval)
    ratio, _, high = interval
    if target is not None:
        row.target = f"{'upper end ' if strict_end else ''}<= {target:g}"
        row.met = (high if strict_end else ratio) <= target
    return row


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Prints the rows as a table."""
    table = Table(title=title, title_justify="left")
    has_rooflines = any(row.roofline is not None for row in rows)
    rooflines = ("roofline",) if has_rooflines else ()
    for column in ("measurement", "torch", "drivetrain", *rooflines, "ratio [95 %]", "target", ""):
        table.add_column(column, justify="left" if column in ("measurement", "target") else "right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        if row.low is not None:
            ratio += f" [{row.low:.3f}, {row.high:.3f}]"
        verdict = {True: "[green]met", False: "[red]missed", None: ""}[row.met]
        ours = "" if row.ours is None else f"{row.ours:.2f} {row.unit}"
        roofline = [f"{row.roofline:.2f} {row.unit}" if row.roofline is not None else ""] if has_rooflines else []
        table.add_row(row.what, f"{row.torch:.2f} {row.unit}", ours, *roofline, ratio, row.target, verdict)
    Console(width=None if Console().is_terminal else 140).print(table)


def lacks_folder(file: Path | None, command: str) -> bool:
    """Says on stderr that there is no folder for the file of `--json`, and returns whether that is so."""
    is_missing = file is not None and not file.absolute().parent.is_dir()
    if is_missing:
        print(f"{command}: --json is {file}, and there is no folder for it", file=sys.stderr)
    return is_missing


def write_rows(file: Path, results: Mapping[str, Sequence[Row]]) -> None:
    """Writes the rows of each topic, and facts about the machine, as JSON."""
    facts = {"torch": torch.__version__, "drivetrain": __version__, "isa": _C.isa(), "machine": platform.machine()}
    rows = {topic: [row.as_dict() for row in rows] for topic, rows in results.items()}
    file.write_text(json.dumps({**facts, **rows}, indent=2) + "\n")
