"""Writes the event stream for TensorBoard."""

from __future__ import annotations

import importlib
from typing import Any

from ..stream import Event, Sink
from .requirement import require
from .scalars import scalars


class TensorBoard(Sink):
    """Writes scalars by torch's SummaryWriter.

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
        """Writes the scalars of a step, and other messages as text."""
        for tag, value in scalars(event).items():
            self._writer.add_scalar(tag, value, event["step"], walltime=event["time"])
        if event["type"] in ("advice", "straggler", "hang"):
            self._writer.add_text(event["type"], event["text"], event["step"])

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()
