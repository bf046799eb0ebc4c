"""Draws where the time of each step went."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from ..phases import LABELS
from .sinks.requirement import require
from .stream import Event
from .summary import names_of, read_events

_COLUMNS = 400  # longer runs are drawn by means over as many groups of steps
_COLORS = dict(
    zip(
        LABELS,
        ("#e45756", "#f58518", "#4c78a8", "#72b7b2", "#b279a2", "#eeca3b", "#54a24b", "#9d755d", "#bab0ac"),
        strict=True,
    )
)


def draw(files: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> None:
    """Draws one panel per run: milliseconds of every step, stacked by phase.

    Args:
        files: JSONL files of `Monitor`.
        path: The picture, whose suffix gives its format: .svg or .png.

    Raises:
        ImportError: matplotlib is missing.
        OSError: A file cannot be read or written.
        ValueError: A file is no event stream, or has no steps.
    """
    require("matplotlib", "drawing")
    figure_module: Any = importlib.import_module("matplotlib.figure")  # without pyplot's global state
    figure = figure_module.Figure(figsize=(9, 0.6 + 2.6 * len(files)), layout="constrained")
    panels = figure.subplots(len(files), 1, sharey=True, squeeze=False)[:, 0]
    for file, name, panel in zip(files, names_of(files), panels, strict=True):
        steps = [event for event in read_events(file) if event["type"] == "step"]
        if not steps:
            raise ValueError(f"{file} has no steps to draw")
        numbers, values = _grouped(steps)
        used = [phase for phase in LABELS if any(values[phase])]
        panel.stackplot(
            numbers,
            [values[phase] for phase in used],
            labels=[LABELS[phase] for phase in used],
            colors=[_COLORS[phase] for phase in used],
            step="mid",
        )
        panel.set_title(name, loc="left", fontsize=9)
        panel.set_ylabel("ms")
        panel.margins(x=0)
    panels[-1].set_xlabel("step")
    handles: dict[str, Any] = {}
    for panel in panels:
        found, labels = panel.get_legend_handles_labels()
        handles.update(zip(labels, found, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    figure.savefig(path)


def _grouped(steps: Sequence[Event]) -> tuple[list[float], dict[str, list[float]]]:
    """Returns step numbers, and milliseconds by phase."""
    size = -(-len(steps) // _COLUMNS)
    groups = [steps[begin : begin + size] for begin in range(0, len(steps), size)]
    numbers = [float(group[0]["step"]) for group in groups]
    values = {
        phase: [1e3 * sum(step["phases"][phase] for step in group) / len(group) for group in groups] for phase in LABELS
    }
    return numbers, values
