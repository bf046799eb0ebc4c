"""Draws the memory of a rank over a step."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..monitor.sinks.requirement import require

if TYPE_CHECKING:
    from .result import Plan

_GIB = 2**30
_COLORS = {"forward": "#4c78a8", "backward": "#72b7b2", "optimizer": "#54a24b"}


class Picture:
    """A figure of matplotlib that notebooks show without pyplot."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        memory = io.BytesIO()
        self.figure.savefig(memory, format="png", dpi=110)
        return memory.getvalue()


def draw(plan: Plan, path: Path | None) -> Picture:
    """Draws allocated and reserved memory over the time of the plan's last step; see `Plan.plot`."""
    if path is not None and path.suffix not in (".svg", ".png"):
        raise ValueError(f"path is {path}, expected a name that ends in .svg or .png")
    require("matplotlib", "drawing")
    figure_module: Any = importlib.import_module("matplotlib.figure")  # without pyplot's global state
    figure = figure_module.Figure(figsize=(9, 3.6), layout="constrained")
    panel = figure.subplots()
    times, allocated, reserved, spans = _series(plan)
    for phase, (begin, end) in spans.items():
        panel.axvspan(begin, end, color=_COLORS[phase], alpha=0.12, label=phase, linewidth=0)
    panel.step(times, allocated, where="post", color="#333333", label="allocated")
    if plan.device.kind == "cuda":
        panel.step(times, reserved, where="post", color="#e45756", linewidth=1, label="reserved")
    fixed = plan.memory.fixed_bytes / _GIB
    capacity = plan.memory.capacity / _GIB - fixed
    if capacity < 1.5 * max(reserved, default=0.0):
        panel.axhline(capacity, color="#e45756", linestyle="--", linewidth=1, label="capacity")
    panel.set_xlabel("ms of the step")
    panel.set_ylabel("GiB")
    panel.set_ylim(bottom=0)
    panel.margins(x=0)
    panel.legend(fontsize=8, loc="upper right")
    if path is not None:
        figure.savefig(path)
    return Picture(figure)


def _series(plan: Plan) -> tuple[list[float], list[float], list[float], dict[str, tuple[float, float]]]:
    """Returns the times in ms, both memories in GiB, and the span of each phase."""
    clock = 0.0
    times, allocated, reserved = [], [], []
    spans: dict[str, tuple[float, float]] = {}
    for moment in plan.memory.timeline:
        begin = clock
        if moment.op >= 0:
            clock += 1e3 * plan.time.op_seconds[moment.op]
            phase = plan.trace.ops[moment.op].phase
            spans[phase] = (spans.get(phase, (begin, 0.0))[0], clock)
        times.append(begin)
        allocated.append(moment.allocated / _GIB)
        reserved.append(moment.reserved / _GIB)
    return times, allocated, reserved, spans
