"""Writes the event stream for TensorBoard."""

from __future__ import annotations

import importlib
from typing import Any

from ...phases import LABELS
from ..stream import Event, Sink
from .requirement import require


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
        """Writes the scalars of a step or a sample of the system, and other messages as text."""
        values: dict[str, float] = {}
        if event["type"] == "system":
            values = {f"system/{name}": value for name, value in event["values"].items()}
        elif event["type"] == "metrics":
            values = {name: float(value) for name, value in event["values"].items()}
        elif event["type"] == "step":
            values = {"step/milliseconds": 1e3 * event["wall_s"]}
            values |= {f"phase/{phase}_ms": 1e3 * event["phases"][phase] for phase in LABELS}
            rates = ("samples_per_s", "mfu", "hfu")
            values |= {f"throughput/{name}": event[name] for name in rates if event.get(name) is not None}
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, event["step"], walltime=event["time"])
        if event["type"] in ("advice", "straggler", "hang"):
            self._writer.add_text(event["type"], event["text"], event["step"])

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()
