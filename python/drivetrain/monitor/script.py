"""Monitors an unedited script: `drivetrain run --monitor`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from .hooks import Iterations
from .monitor import Monitor
from .progress import Progress
from .stream import Sink


class ScriptMonitor(Monitor):
    """A monitor over all optimizers and DataLoaders of this process, from its entry to the end of the process.

    The time between a batch and the backward pass counts as forward. A step within which another DataLoader runs to its
    end, such as one for an evaluation, is left out.

    Args:
        to: Sinks, as for `Monitor`.
    """

    def __init__(self, to: Sequence[str | Sink]) -> None:
        super().__init__(to=to, flops=None)
        self._optimizers = None
        self._process = os.getpid()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begins, and ends when the process does."""
        self.__enter__()
        plain = DataLoader.__iter__

        def marked(loader: DataLoader[Any]) -> Iterator[Any]:
            return self._batches(Iterations(plain, loader), loader).marked_iterator()

        DataLoader.__iter__ = marked  # type: ignore[method-assign, assignment]
        atexit.register(self._finish)

    def fail(self, error: BaseException) -> None:
        """Notes what ended the script. An exit with code 0 or without one is no failure."""
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._error = error

    def _finish(self) -> None:
        if os.getpid() == self._process:  # forked children inherit the call
            error = self._error
            self.__exit__(None if error is None else type(error), error, None)

    def _make_progress(self) -> Progress:
        return Progress("lines")  # a live line would disturb the script's own
