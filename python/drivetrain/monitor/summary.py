"""Adds up the steps of a run, and shows where the time went."""

import json
import os
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..notebook import html_table, text_table
from ..phases import LABELS
from .stream import VERSION, Event

_WARM_UP = 3  # steps that do not count, if there are more: memory is first touched, buckets and workers start
_STEPS_KEPT = 10_000
_BAR = 24  # characters
_COMMON = {"type"}
# Fields without which an event of a type cannot be read.
_NEEDED = {
    "step": _COMMON | {"wall_s", "phases", "samples", "complete"},
    "system": _COMMON | {"values"},
    "advice": _COMMON | {"phase", "text"},
    "straggler": _COMMON | {"phase", "text"},
    "hang": _COMMON | {"phase", "text"},
    "end": _COMMON | {"dropped"},
}


@dataclass(repr=False)
class Summary:
    """The phases that took the time of a run's steps.

    Attributes:
        name: Title of the run.
        num_steps: Steps that count. The first three do not, nor a step whose FLOPs were counted.
        wall_s: Their time in seconds.
        phase_s: Seconds by phase; their sum is `wall_s`.
        samples: Samples of this rank in these steps.
        mfu: Model FLOPs utilization of the last step; None if it is not known.
        hfu: Hardware FLOPs utilization, which counts recomputation.
    """

    name: str = "run"
    num_steps: int = 0
    wall_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LABELS, 0.0))
    samples: int = 0
    mfu: float | None = None
    hfu: float | None = None
    _walls: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT), repr=False)
    _num_warm_up: int = field(default=0, repr=False)
    _texts: dict[tuple[str, str], str] = field(default_factory=dict, repr=False)

    def take(self, event: Event) -> None:
        """Adds an event of the stream."""
        if event["type"] == "step" and event["complete"]:
            if self._num_warm_up < _WARM_UP:
                self._num_warm_up += 1
            elif not event.get("counted_flops"):
                self.num_steps += 1
                self.wall_s += event["wall_s"]
                self.samples += event["samples"]
                self._walls.append(event["wall_s"])
                for phase in LABELS:
                    self.phase_s[phase] += event["phases"][phase]
                self.mfu, self.hfu = event.get("mfu"), event.get("hfu")
        elif event["type"] in ("advice", "straggler", "hang"):
            self._texts[event["type"], event["phase"]] = event["text"]
            if event["type"] == "straggler":  # the network is not what the others wait for
                self._texts.pop(("advice", "communication"), None)
        elif event["type"] == "end":
            self.note_dropped(event["dropped"])

    def note_dropped(self, dropped: Mapping[str, int]) -> None:
        """Notes the events that sinks have not taken, by sink."""
        for sink, count in dropped.items():
            if count:
                self._texts["dropped", sink] = f"{sink} dropped {count} events"

    @property
    def notes(self) -> list[str]:
        """Returns the advice, the slow rank, and the number of dropped events."""
        return list(self._texts.values())

    def share(self, phase: str) -> float:
        """Returns the share of a phase in the time of the steps, 0 to 1."""
        return self.phase_s[phase] / self.wall_s if self.wall_s else 0.0

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step, of the last 10,000."""
        return statistics.median(self._walls) if self._walls else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples of this rank per second."""
        return self.samples / self.wall_s if self.wall_s else 0.0

    def heading(self) -> str:
        """Returns one line with the figures of the whole."""
        if not self.num_steps:
            return f"{self.name}: {self._num_warm_up} steps, and the first {_WARM_UP} warm up: no step counts yet"
        parts = [f"{self.name}: {self.num_steps} steps, median {1e3 * self.median_step_s:.1f} ms"]
        if self.samples:
            parts.append(f"{self.samples_per_s:,.0f} samples/s per rank")
        parts += [f"{name.upper()} {value:.1%}" for name in ("mfu", "hfu") if (value := getattr(self, name))]
        return ", ".join(parts)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Returns label, ms per step, share and a bar of every phase that took time."""
        rows = []
        for phase, label in LABELS.items():
            if self.phase_s[phase] > 0:
                share = self.share(phase)
                per_step = f"{1e3 * self.phase_s[phase] / self.num_steps:.2f}"
                rows.append((label, per_step, f"{share:.1%}", "█" * round(_BAR * share)))
        return rows

    def __str__(self) -> str:
        lines = [self.heading()]
        lines += [f"  {label:<24}{ms:>10} ms {share:>7}  {bar}" for label, ms, share, bar in self.rows()]
        return "\n".join(lines + [f"  {note}" for note in self.notes])

    __repr__ = __str__  # a prompt shows the table

    def _repr_html_(self) -> str:
        header = ("phase", "ms per step", "share", "")
        return html_table([self.heading(), *self.notes], header, self.rows(), has_text_at_the_end=True)


def summarize(events: Iterable[Event], name: str = "run") -> Summary:
    """Adds up events of one rank.

    Args:
        events: The events in order, as `read_events` returns them.
        name: The name that the summary shows for them.
    """
    summary = Summary(name)
    for event in events:
        summary.take(event)
    return summary


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """Reads a JSONL file. A last line without an end, which a run is still writing, is left out.

    Args:
        path: The file.

    Returns:
        Its events in order.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is not an event, or has a newer version than this drivetrain reads.
    """
    events = []
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n")[:-1], 1):
        event = _parsed(line)
        if event is None:
            raise ValueError(f"{path}, line {number}: {line[:60]!r} is not an event of drivetrain.Monitor")
        if (version := event["v"]) > VERSION:
            raise ValueError(
                f"{path}, line {number}: version {version} of the schema, and this drivetrain reads up to {VERSION}: "
                "upgrade drivetrain"
            )
        events.append(event)
    return events


def _parsed(line: str) -> Event | None:
    """Returns the event of a line; None if it is none. One of a newer version need only have the version."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("v"), int):
        return None
    if event["v"] > VERSION:
        return event
    kind = event.get("type")
    if not isinstance(kind, str) or not _NEEDED.get(kind, _COMMON) <= event.keys():
        return None
    return event


def names_of(files: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Returns titles of runs: the names of their files without suffix, or the paths where two names are equal."""
    names = [Path(file).stem for file in files]
    return names if len(set(names)) == len(names) else [str(Path(file).with_suffix("")) for file in files]


def compare(summaries: Sequence[Summary]) -> str:
    """Returns a table of milliseconds per step by phase, one column per run, and the ratio of the last to the first."""
    rows: list[tuple[str, ...]] = []

    def add(label: str, values: list[float], unit: str = "{:.2f}") -> None:
        ratio = f"{values[-1] / values[0]:.2f}" if values[0] else ""
        rows.append((label, *(unit.format(value) for value in values), ratio))

    for phase, label in LABELS.items():
        if any(summary.phase_s[phase] for summary in summaries):
            add(label, [1e3 * one.phase_s[phase] / max(one.num_steps, 1) for one in summaries])
    add("step", [1e3 * one.wall_s / max(one.num_steps, 1) for one in summaries])
    if all(one.samples for one in summaries):
        add("samples/s", [one.samples_per_s for one in summaries], "{:,.0f}")
    return text_table(("ms per step", *(one.name for one in summaries), "last / first"), rows)
