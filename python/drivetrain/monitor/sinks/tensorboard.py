"""Writes the event stream for TensorBoard."""

import importlib
import math
from typing import Any

import torch

from ...phases import LABELS
from ..stream import Event, Sink
from .requirement import require

_QUANTITIES = ("grad_norm", "relative_update", "param_norm", "largest_grad", "lost_updates")


class TensorBoard(Sink):
    """Writes scalars by torch's SummaryWriter, from which W&B can read them.

    Args:
        directory: The folder of the run, as for `SummaryWriter`.

    Raises:
        ImportError: The package tensorboard is missing.
    """

    def __init__(self, directory: str) -> None:
        require("tensorboard", "the sink tensorboard")
        self.name = f"tensorboard:{directory}"
        self._directory = directory
        self._writer: Any = None

    def open(self) -> None:
        """Creates the event file."""
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(self._directory)

    def write(self, event: Event) -> None:
        """Writes the scalars of a step or a sample of the system, histograms of statistics, and messages as text."""
        values: dict[str, float] = {}
        if event["type"] == "system":
            values = {f"system/{name}": value for name, value in event["values"].items()}
        elif event["type"] == "metrics":
            values = {name: float(value) for name, value in event["values"].items()}
        elif event["type"] == "statistics":
            values = {f"all/{quantity}": float(event["all"][quantity]) for quantity in _QUANTITIES}
            if event["noise"] is not None:
                values["all/noise_scale"] = float(event["noise"]["scale"])
            self._write_histograms(event)
        elif event["type"] == "step":
            values = {"step/milliseconds": 1e3 * event["wall_s"]}
            values |= {f"phase/{phase}_ms": 1e3 * event["phases"][phase] for phase in LABELS}
            rates = ("samples_per_s", "mfu", "hfu")
            values |= {f"throughput/{name}": event[name] for name in rates if event.get(name) is not None}
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, event["step"], walltime=event["time"])
        if event["type"] in ("advice", "straggler", "hang"):
            self._writer.add_text(event["type"], event["text"], event["step"])

    def _write_histograms(self, event: Event) -> None:
        """Writes each quantity twice: its distribution over parameters, and its values as bars over the depth."""
        at = {"global_step": event["step"], "walltime": event["time"]}
        for quantity in _QUANTITIES:
            found = [float(one[quantity]) for one in event["parameters"].values()]
            if finite := [value for value in found if math.isfinite(value)]:
                self._writer.add_histogram(f"parameters/{quantity}", torch.tensor(finite), **at)
            bars = {int(depth): float(one[quantity]) for depth, one in event["depths"].items()}
            bars = {depth: bar for depth, bar in bars.items() if math.isfinite(bar)}
            if bars:
                self._writer.add_histogram_raw(
                    f"depth/{quantity}",
                    min=min(bars) - 0.5,
                    max=max(bars) + 0.5,
                    num=len(bars),
                    sum=sum(bars.values()),
                    sum_squares=sum(bar**2 for bar in bars.values()),
                    bucket_limits=[depth + 0.5 for depth in bars],
                    bucket_counts=list(bars.values()),
                    **at,
                )

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()
