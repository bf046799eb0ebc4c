"""`TrainerMonitor` follows a framework's loop, and `ScriptMonitor` an unedited script, for `drivetrain run`."""

import atexit
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from .hooks import replace_iterations
from .monitor import Monitor
from .stream import Sink
from .summary import Summary

_OWN = ("model", "optimizer", "loader")


class TrainerMonitor(Monitor):
    """Follows a loop whose code belongs to a framework or a script.

    It ends at the end of the process if nothing else ends it, so that sinks get what they have not written.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._process = 0  # in which it runs; 0: it does not
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begins to monitor."""
        self.__enter__()
        self._process = os.getpid()
        atexit.register(self.finish)

    def fail(self, error: BaseException) -> None:
        """Notes what ended the training early. An exit with code 0 or without one is no failure."""
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._error = error

    def finish(self) -> None:
        """Undoes all that was replaced, and ends the last step and the monitor. Later calls do nothing."""
        if self._process != os.getpid():  # forked children inherit the call
            return
        self._process = 0
        atexit.unregister(self.finish)
        if self._num_batches:
            self._end_batches()
        self.__exit__(type(self._error) if self._error is not None else None, self._error, None)

    def mark(self, loader: Iterable[Any]) -> None:
        """Marks the waits of all later iterations over the loader, until the end."""
        self._hooks.callback(replace_iterations(loader, lambda make_iterator: self._batches(loader, make_iterator)))


class TrainerMonitorCallback:
    """Is the part of a callback that all frameworks share.

    Args:
        options: Arguments of `Monitor`.

    Raises:
        TypeError: `options` contains an object that the framework has itself, such as `model`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name in _OWN:
            if name in options:
                raise TypeError(
                    f"{name} is an argument of {type(self).__name__}, which takes it from the framework: omit it"
                )
        self._options = options
        self.monitor: TrainerMonitor | None = None  # of the last training

    def close(self) -> None:
        """Ends a monitor that an error of the training has left active."""
        if self.monitor is not None:
            self.monitor.finish()

    def summary(self) -> Summary:
        """Returns where the time of the last training went.

        Raises:
            RuntimeError: Nothing has been trained.
        """
        if self.monitor is None:
            raise RuntimeError(f"this {type(self).__name__} has seen no training: pass it to a Trainer and train")
        return self.monitor.summary()


class ScriptMonitor(TrainerMonitor):
    """A monitor over all optimizers and DataLoaders of this process, from its start to the end of the process.

    The time between a batch and the backward pass counts as forward. A step within which another DataLoader runs to its
    end, such as one for an evaluation, is left out.

    Args:
        to: Sinks, as for `Monitor`.
        progress: As for `Monitor`.
    """

    def __init__(self, to: Sequence[str | Sink], progress: bool = True) -> None:
        super().__init__(to=to, flops=None, progress=progress)
        self._optimizers = None
        self._progress_kind = "lines"  # a live line would disturb the script's own

    def start(self) -> None:
        """Begins, and ends when the process does."""
        super().start()
        plain = DataLoader.__iter__

        def marked(loader: DataLoader[Any]) -> Iterator[Any]:
            return iter(self._batches(loader, lambda: plain(loader)))

        DataLoader.__iter__ = marked  # type: ignore[method-assign, assignment]
