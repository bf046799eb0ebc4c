"""Starts saves of a training state, keeps optimizers from changing what is not copied yet, and measures the costs."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .device_copies import DeviceCopies, Slabs, can_copy
from .errors import CheckpointError
from .load import Checkpoint
from .save import Save
from .state import TrainingState
from .store import Store

_logger = logging.getLogger("drivetrain")


class Saver:
    """Saves a training state, one save at a time.

    Args:
        store: The store of the checkpoints.
        state: The state to save.
        is_background: Copies tensors that only optimizer steps change while the training goes on.
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

    def __init__(self, store: Store, state: TrainingState, is_background: bool, timeout: float) -> None:
        self.began_at = time.monotonic()
        self.begun_step = self.saved_step = -1
        self.stall = 0.0
        self.duration: float | None = None
        self.nbytes = 0
        self.error: BaseException | None = None
        self.checkpoint: Checkpoint | None = None
        self._store, self._state = store, state
        self._is_background, self._timeout = is_background, timeout
        self._save: Save | None = None
        self._slabs = Slabs()
        self._copies: DeviceCopies | None = None  # of the save under way, if its tensors are on accelerators
        self._uncopied: dict[str, tuple[Tensor, int]] = {}  # tensors under the copy, and their versions at its begin
        self._handles: list[Any] = []

    def open(self) -> None:
        """Makes the steps of optimizers wait for copies under way."""
        self._handles = [one.register_step_pre_hook(self._before_step) for one in self._state.optimizers]

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def is_busy(self) -> bool:
        """Returns True while a save is under way."""
        return self._save is not None

    def begin(self, step: int, header: Mapping[str, Any]) -> None:
        """Begins a save. Waits for the copy of all tensors that the next forward or backward pass may change.

        On an accelerator its stream waits, not the host.

        Raises:
            TypeError: A value has no encoding. No other error is raised: `error` then has it.
        """
        assert self._save is None, "a save is under way"
        began = self.began_at = time.monotonic()
        self.begun_step = step
        snapshot = self._state.capture(header)
        steady = snapshot.steady if self._is_background else set()
        try:
            if can_copy(snapshot.tensors):
                self._begin_on_device(step, snapshot.tensors, snapshot.state, steady)
            else:
                self._begin_on_host(step, snapshot.tensors, snapshot.state, steady)
        except (CheckpointError, OSError, MemoryError, torch.AcceleratorError, torch.OutOfMemoryError) as error:
            self._end(error)
        self.stall = time.monotonic() - began

    def _begin_on_host(self, step: int, given: Mapping[str, Tensor], state: Any, steady: set[str]) -> None:
        tensors = _on_host(given)
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        save = self._save = self._store.save(step, tensors, state)
        shared = {name for name in steady if tensors[name] is given[name]}
        save.wait_copied(self._timeout, names=[name for name in tensors if name not in shared])
        self._uncopied = {name: (tensors[name], tensors[name]._version) for name in shared}

    def _begin_on_device(self, step: int, given: Mapping[str, Tensor], state: Any, steady: set[str]) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in given.values())
        copies = DeviceCopies(given, given.keys() - steady, self._slabs)
        self._save = self._store.save(step, copies.host, state, ready=copies.wait)
        copies.order_early()
        self._copies = copies
        self._uncopied = {name: (given[name], given[name]._version) for name in steady}

    def settle(self) -> None:
        """Waits until every tensor may change. On an accelerator its stream waits, not the host.

        Raises:
            CheckpointError: The copy did not end in time.
        """
        if not self._uncopied or self._save is None:
            return
        began = time.monotonic()
        uncopied, self._uncopied = self._uncopied, {}
        written = [name for name, (tensor, version) in uncopied.items() if tensor._version != version]
        reason = (
            f"{written[0]!r} was written between Checkpointer.step() and the next optimizer step, while it was "
            "copied in the background. Pass snapshot='blocking' to Checkpointer."
            if written
            else ""
        )
        if self._copies is not None:
            if written:  # whether the device copied first is unknown
                self._save.discard(reason)
            self._copies.order()
            return
        if written:
            self._save.discard_unless_copied(written, reason)
        self._save.wait_copied(self._timeout, names=list(uncopied))
        self.stall += time.monotonic() - began

    def poll(self) -> bool:
        """Takes the result of a save that has ended; returns whether one has."""
        if self._save is None or not self._save.done():
            return False
        self._end(self._save.exception())
        return True

    def wait(self) -> None:
        """Waits for the save under way, if there is one. `error` tells how it ended."""
        if self._save is None:
            return
        try:
            self.checkpoint = self._save.result(self._timeout)
        except CheckpointError as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        save, self._save, self._uncopied, self._copies = self._save, None, {}, None
        if save is not None and not save.done():
            self._slabs.drop()
        self.error = error
        if error is None and save is not None:
            self.saved_step = save.step
            self.duration = save.write_s if save.write_s is not None else time.monotonic() - self.began_at

    def _before_step(self, *_: Any) -> None:
        self.settle()


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
