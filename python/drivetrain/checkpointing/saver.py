"""Starts saves of a training state from copies of its values, and measures the costs."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .state.training_state import TrainingState
from .store.device_copies import DeviceCopies, Slabs, can_copy
from .store.errors import CheckpointError
from .store.reading import Checkpoint
from .store.save import Save
from .store.store import Store

_logger = logging.getLogger("drivetrain")


class Saver:
    """Saves a training state, one save at a time.

    Args:
        store: The store of the checkpoints.
        state: The state to save.
        timeout: Limit in seconds on every wait.

    Attributes:
        began_at: time.monotonic() when the last save began; of the construction before.
        begun_step: The step of the last save that began, -1 before.
        saved_step: The step of the last complete save, -1 before.
        stall: Seconds for which the last save held up the training.
        duration: Seconds from the begin of the last complete save until it was durable; None before.
        nbytes: Bytes of this rank in the last save.
        error: The error of the last save; None after a success.
        checkpoint: The last complete save, if `wait` saw its end.
    """

    def __init__(self, store: Store, state: TrainingState, timeout: float) -> None:
        self.began_at = time.monotonic()
        self.begun_step = self.saved_step = -1
        self.stall = 0.0
        self.duration: float | None = None
        self.nbytes = 0
        self.error: BaseException | None = None
        self.checkpoint: Checkpoint | None = None
        self._store, self._state = store, state
        self._timeout = timeout
        self._save: Save | None = None
        self._slabs = Slabs()

    @property
    def is_busy(self) -> bool:
        """Returns True while a save is in progress."""
        return self._save is not None

    def begin(self, step: int, header: Mapping[str, Any]) -> None:
        """Begins a save. Every tensor may change as soon as this returns.

        Nothing less is safe: scripts write parameters anywhere between two optimizer steps, for example to validate
        averaged weights, and no counter shows writes to `.data`. On an accelerator its stream waits, not the host.

        Raises:
            TypeError: A value has no encoding. No other error is raised: `error` then has it.
        """
        assert self._save is None, "a save is in progress"
        began = self.began_at = time.monotonic()
        self.begun_step = step
        snapshot = self._state.capture(header)
        self.nbytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
        try:
            if can_copy(snapshot.tensors):
                copies = DeviceCopies(snapshot.tensors, self._slabs)
                self._save = self._store.save(step, copies.host, snapshot.state, ready=copies.wait)
            else:
                self._save = self._store.save(step, _on_host(snapshot.tensors), snapshot.state)
                self._save.wait_copied(self._timeout)
        except (CheckpointError, OSError, MemoryError, torch.AcceleratorError, torch.OutOfMemoryError) as error:
            self._end(error)
        self.stall = time.monotonic() - began

    def poll(self) -> bool:
        """Takes the result of a save that has ended; returns whether one has."""
        if self._save is None or not self._save.done():
            return False
        self._end(self._save.exception())
        return True

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
        if save is not None and not save.done():
            self._slabs.drop()
        self.error = error
        if error is None and save is not None:
            self.saved_step = save.step
            self.duration = save.write_s if save.write_s is not None else time.monotonic() - self.began_at


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of the CPU as they are, and copies of others in pinned memory, complete on return."""
    found: dict[str, Tensor] = {}
    devices = set()
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            found[name] = tensor
            continue
        devices.add(tensor.device)
        found[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        found[name].copy_(tensor, non_blocking=True)
    for device in devices:
        torch.accelerator.synchronize(device)
    return found
