"""`TrainerMonitor` follows a loop that a framework runs; `TrainerMonitorCallback` is the base of each callback."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .. import _C
from ..phases import number_of
from .hooks import Batches, replace_iterations
from .monitor import Monitor
from .summary import Summary

_DATA = number_of("data")
_OWN = ("model", "optimizer", "loader")


class TrainerMonitor(Monitor):
    """Follows a loop whose code belongs to a framework.

    It ends at the end of the process if the framework does not end it, so that sinks get what they have not written.

    Args:
        model: The module whose calls are the forward passes.
        optimizers: The optimizers, wrapped by Accelerate or not.
        loader: The loader of the training, for advice.
        options: Other arguments of `Monitor`.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        loader: Iterable[Any] | None,
        **options: Any,
    ) -> None:
        # Accelerate's optimizers hold the one whose hooks run, and skip its step inside of an accumulation.
        own = [getattr(one, "optimizer", one) for one in optimizers]
        super().__init__(model, own, getattr(loader, "base_dataloader", loader), **options)
        self._restores: list[Callable[[], None]] = []
        self._is_running = False

    def start(self) -> None:
        """Begins to monitor."""
        self.__enter__()
        self._is_running = True
        atexit.register(self.finish)

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the last step and the monitor. Later calls do nothing.

        Args:
            error: The exception that has ended the training early.
        """
        atexit.unregister(self.finish)
        self.restore()
        if self._is_running:
            self._is_running = False
            self.pause()
            self.__exit__(type(error) if error is not None else None, error, None)

    def restore(self) -> None:
        """Undoes all that was replaced."""
        for restore in self._restores:
            restore()
        self._restores.clear()

    def mark(self, loader: Iterable[Any]) -> None:
        """Marks the waits of all later iterations over the loader, until the end."""

        def marked(batches: Iterable[Any]) -> Batches:
            return self._batches(batches, loader)

        self._restores.append(replace_iterations(loader, marked))

    def call_at_end(self, restore: Callable[[], None]) -> None:
        """Calls a function when the monitor ends, which undoes what a callback has replaced."""
        self._restores.append(restore)

    def begin_wait(self) -> None:
        """Ends the step if it is over, and begins the wait for a batch."""
        self._before_batch()
        _C.trace_begin(_DATA)

    def end_wait(self) -> None:
        """Ends the wait for a batch."""
        _C.trace_end(_DATA)

    def take(self, batch: Any) -> None:
        """Counts a batch as part of the step."""
        self._take_batch(batch)

    def pause(self) -> None:
        """Ends the last step. Work before the next wait, such as an evaluation, belongs to no step."""
        self._end_batches()

    def pause_if_over(self) -> None:
        """Does the work of `pause`, unless the step needs further batches."""
        if self._is_step_over():
            self.pause()


class TrainerMonitorCallback:
    """Is the part of a callback that all frameworks share.

    Args:
        options: Arguments of `Monitor`.

    Raises:
        TypeError: `options` contains an object that the framework has itself, such as `model`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        refuse_own(options, type(self).__name__)
        self._options = options
        self.monitor: TrainerMonitor | None = None  # of the last training

    def summary(self) -> Summary:
        """Returns where the time of the last training went.

        Raises:
            RuntimeError: Nothing has been trained.
        """
        if self.monitor is None:
            raise RuntimeError(f"this {type(self).__name__} has seen no training: pass it to a Trainer and train")
        return self.monitor.summary()


def refuse_own(options: dict[str, Any], what: str) -> None:
    """Raises TypeError if `options` has an argument of `Monitor` that the framework gives.

    Args:
        options: Arguments for `Monitor`.
        what: The class that got them, for the message.
    """
    for name in _OWN:
        if name in options:
            raise TypeError(f"{name} is an argument of {what}, which takes it from the framework: omit it")
