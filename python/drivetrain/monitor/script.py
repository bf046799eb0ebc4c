"""Monitors an unedited script: `drivetrain run --monitor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from .progress import Progress
from .stream import Sink
from .trainers import TrainerMonitor


class ScriptMonitor(TrainerMonitor):
    """A monitor over all optimizers and DataLoaders of this process, from its start to the end of the process.

    The time between a batch and the backward pass counts as forward. A step within which another DataLoader runs to its
    end, such as one for an evaluation, is left out.

    Args:
        to: Sinks, as for `Monitor`.
    """

    def __init__(self, to: Sequence[str | Sink]) -> None:
        super().__init__(to=to, flops=None)
        self._optimizers = None

    def start(self) -> None:
        """Begins, and ends when the process does."""
        super().start()
        plain = DataLoader.__iter__

        def marked(loader: DataLoader[Any]) -> Iterator[Any]:
            return iter(self._batches(loader, lambda: plain(loader)))

        DataLoader.__iter__ = marked  # type: ignore[method-assign, assignment]

    def _make_progress(self) -> Progress:
        return Progress("lines")  # a live line would disturb the script's own
