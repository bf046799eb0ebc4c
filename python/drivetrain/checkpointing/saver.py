"""Starts saves of a training state from copies of its values, and measures the costs."""

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from .preemption.interval import Interval
from .state.training_state import TrainingState
from .store.device_copies import DeviceCopies, Slabs, can_copy
from .store.errors import CheckpointError
from .store.reading import Checkpoint
from .store.save import Save
from .store.store import Store

_logger = logging.getLogger("drivetrain")
_CLOSE_S = 10.0  # to return memory, which goes on without the caller


class Saver:
    """Saves a training state, one save at a time, and adapts `every` to the costs of saves.

    Attributes:
        began_at: time.monotonic() when the last save began; of the construction before.
        begun_step: The step of the last save that began, -1 before.
        saved_step: The step of the last complete save, -1 before.
        error: The error of the last save; None after a success.
        checkpoint: The last complete save, if `wait` saw its end.
    """

    def __init__(
        self, store: Store, state: TrainingState, timeout: float, every: Interval, grace: float, logs_errors: bool
    ) -> None:
        self.store = store
        self.began_at = time.monotonic()
        self.begun_step = self.saved_step = -1
        self.error: BaseException | None = None
        self.checkpoint: Checkpoint | None = None
        self._state, self._timeout, self._every = state, timeout, every
        self._grace, self._logs_errors = grace, logs_errors
        self._stall, self._nbytes = 0.0, 0  # of the last save: for how long it held up the training
        self._save: Save | None = None
        self._slabs = Slabs()

    @property
    def has_failed(self) -> bool:
        """Returns True if the last save has failed, and the log does not say so."""
        return self.error is not None and not self._logs_errors

    @property
    def is_busy(self) -> bool:
        """Returns True while a save is in progress."""
        return self._save is not None

    def begin(self, step: int, header: Mapping[str, Any]) -> None:
        """Begins a save. Every tensor may change as soon as this returns.

        Nothing less is safe: scripts write parameters anywhere between two optimizer steps, for example to validate
        averaged weights, and no counter shows writes to `.data`. On an accelerator its stream waits, not the host.
        """
        assert self._save is None, "a save is in progress"
        began = self.began_at = time.monotonic()
        self.begun_step = step
        snapshot = self._state.capture(header)
        self._nbytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
        try:
            if can_copy(snapshot.tensors.values()):
                copies = DeviceCopies(snapshot.tensors, self._slabs)
                self._save = self.store.save(step, copies.host, snapshot.state, ready=copies.wait)
                must_wait = not copies.has_all
            else:
                on_host = {name: tensor.cpu() for name, tensor in snapshot.tensors.items()}
                self._save, must_wait = self.store.save(step, on_host, snapshot.state), True
            if must_wait:
                self._save.wait_copied(self._timeout)
        except (CheckpointError, OSError, MemoryError, torch.AcceleratorError, torch.OutOfMemoryError) as error:
            self._end(error)
        self._stall = time.monotonic() - began

    def prepare(self, header: Mapping[str, Any]) -> None:
        """Page-locks memory for a save of tensors on a GPU that will begin soon. Nothing waits for it."""
        if self._save is None and any(param.is_cuda for param in self._state.model.parameters()):
            with contextlib.suppress(TypeError, NotImplementedError):  # the save itself raises it, if it is still true
                self._slabs.prepare(lambda: self._state.capture(header).tensors.values())

    def close(self) -> None:
        """Returns the memory of copies to the system."""
        self._slabs.close(_CLOSE_S)

    def poll(self) -> None:
        """Takes the result of a save that has ended, if one has."""
        if self._save is not None and self._save.done():
            self._end(self._save.exception())

    def wait(self) -> None:
        """Waits for the current save, if there is one. `error` tells how it ended."""
        if self._save is None:
            return
        try:
            self.checkpoint = self._save.result(self._timeout)
        except CheckpointError as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        save, self._save = self._save, None
        self._slabs.give_back(is_dropped=save is not None and not save.done())
        self.error = error
        if error is not None and self._logs_errors:
            _logger.error("the training goes on without this checkpoint: %s", error)
        if error is None and save is not None:
            self.saved_step = save.step
            duration = save.write_s if save.write_s is not None else time.monotonic() - self.began_at
            self._every.measured(self._stall, duration)
            if duration > self._grace:
                mib, grace, self._grace = self._nbytes / 2**20, self._grace, math.inf  # warns once
                _logger.warning(
                    "a save of %.1f MiB took %.1f s (%.1f MiB/s), and the grace period is %.0f s: the save on a "
                    "preemption would not complete. Choose a faster disk, or an earlier notice.",
                    *(mib, duration, mib / duration, grace),
                )
