"""Draws a spike: losses and gradient norms of the steps around it, with its samples and without them."""

import importlib
import math
from pathlib import Path
from typing import Any

from .search import Explanation

_AROUND = 40  # steps before and after the spike


def draw(found: Explanation, path: Path) -> None:
    """Writes the picture to a file. It needs matplotlib."""
    figure_module: Any = importlib.import_module("matplotlib.figure")  # without pyplot's global state
    figure = figure_module.Figure(figsize=(9, 3.2), layout="constrained")
    spike = found.spike.index
    shown = range(max(0, spike - _AROUND), min(len(found.course), spike + _AROUND + 1))
    steps = [found.first + place + 1 for place in shown]
    for kind, panel in enumerate(figure.subplots(1, 2)):
        values = [found.course[place][kind] for place in shown]
        panel.plot(steps, [one if math.isfinite(one) else math.nan for one in values], color="#4c78a8")
        panel.axvline(found.first + spike + 1, color="#e45756", linewidth=1, label=f"step {found.first + spike + 1}")
        if found.guilty:
            panel.plot(
                [found.first + spike + 1], [found.after[kind]], "o", color="#54a24b", label="without the samples"
            )
        if min((one for one in values if math.isfinite(one)), default=0.0) > 0:
            panel.set_yscale("log")
        panel.set_xlabel("step")
        panel.set_title(("largest loss of a rank", "gradient norm")[kind], fontsize=9)
        panel.legend(fontsize=8)
    figure.savefig(path)
