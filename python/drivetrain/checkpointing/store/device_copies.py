"""Copies tensors of accelerators into pinned memory on a stream of its own, while the training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import _C
from .errors import CheckpointError
from .pinned_memory import PinnedMemory

_ALIGNMENT = 64
_LARGEST_CLONE = 16 << 20  # bytes of host tensors, such as counters of steps, that are copied at once
_POLL_S = 0.002
IDLE_S = 60.0

_logger = logging.getLogger("drivetrain")


class DeviceCopies:
    """One snapshot of tensors on accelerators. The host waits for nothing until `wait`.

    The copies begin when all work that the current streams have by now is done. Work that these streams get later
    waits for the copies. No other snapshot may use `slabs` until this one is written.

    Attributes:
        host: Where the tensors are once `wait` has returned, by name.
        has_all: False if tensors on the host are too large to be copied here: they must not change until they are read.
    """

    def __init__(self, tensors: Mapping[str, Tensor], slabs: Slabs) -> None:
        sources = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
        self._sources = list(sources.values())  # until they are copied
        self._ends: list[tuple[torch.device, Any]] = []
        self.has_all = sum(one.nbytes for name, one in tensors.items() if name not in sources) <= _LARGEST_CLONE
        places = slabs.lend(sources)
        for device in dict.fromkeys(tensor.device for tensor in self._sources):
            on_device = {name: one for name, one in sources.items() if one.device == device}
            self._ends.append((device, slabs.copy(device, places, on_device)))
        rest = {name: one.clone() if self.has_all else one for name, one in tensors.items() if name not in sources}
        self.host = {name: places[name] if name in places else rest[name] for name in tensors}

    def wait(self, timeout: float) -> None:
        """Waits on the host until all tensors are copied."""
        deadline = time.monotonic() + timeout
        for device, event in self._ends:
            while not event.query():  # event.synchronize() has no limit
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        f"tensors were not copied from {device} within {timeout:g} s: the device is busy or hangs."
                    )
                time.sleep(_POLL_S)
        self._sources.clear()
        self._ends.clear()  # in the thread that saves: to free an event is a call about its device


class Slabs:
    """Lends pinned memory to one snapshot at a time, and keeps it and the streams of copies for the next one.

    Args:
        idle_s: Seconds after which memory on CUDA is returned to the system if no snapshot has used it.
    """

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._memory: PinnedMemory | None = None  # on CUDA
        self._slab: Tensor | None = None  # on other accelerators, and in a build without CUDA
        self._nbytes = 0  # of the last snapshot on CUDA
        self._streams: dict[torch.device, Any] = {}

    def prepare(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Begins to page-lock memory for a snapshot on CUDA. Asks for its tensors if no snapshot has been taken yet."""
        if self._nbytes == 0:
            sources = [tensor for tensor in tensors() if tensor.device.type != "cpu"]
            self._nbytes = _layout(sources)[1] if _can_lock(sources) else 0
        if self._nbytes > 0:
            self._make(self._nbytes)

    def lend(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a contiguous tensor of host memory for each tensor."""
        begins, end = _layout(tensors.values())
        slab = self._lend_locked(end) if _can_lock(tensors.values()) else self._lend_torchs(end)
        return {
            name: slab[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), begin in zip(tensors.items(), begins, strict=True)
        }

    def copy(self, device: torch.device, places: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> Any:
        """Enqueues copies into lent tensors on the device's stream of copies. Returns the event of their end."""
        memory = self._memory
        # The end of torch's stream sets the thread's device, which may make a context on another GPU.
        with torch.accelerator.device_index(device.index):
            if device not in self._streams:
                self._streams[device] = torch.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                for name, source in sources.items():
                    pieces = [(places[name], source)] if memory is None else memory.pieces(places[name], source)
                    for place, part in pieces:
                        place.copy_(part, non_blocking=True)
                end = stream.record_event()
            torch.accelerator.current_stream(device).wait_event(end)
            if memory is not None:
                memory.ends[device] = end
        return end

    def give_back(self, is_dropped: bool = False) -> None:
        """Ends the use of the memory. Dropped memory is returned to the system, though a snapshot may still use it."""
        if self._memory is not None:
            self._memory.give_back(is_dropped)
        if is_dropped:
            self._memory = self._slab = None

    def close(self, timeout: float) -> None:
        """Returns the memory to the system, for which it waits at most `timeout` seconds."""
        memory = self._memory
        self.give_back(is_dropped=True)
        if memory is not None:
            memory.join(timeout)

    def _make(self, nbytes: int) -> PinnedMemory:
        """Returns memory for that many bytes, a part of which may be page-locked."""
        if self._memory is None or self._memory.nbytes < nbytes or not self._memory.keep():
            self.give_back(is_dropped=True)
            self._memory = PinnedMemory(nbytes, self._idle_s)
        return self._memory

    def _lend_locked(self, nbytes: int) -> Tensor:
        slab, self._nbytes = None, nbytes
        while slab is None:  # idle memory may go in between
            memory = self._make(nbytes)
            slab = memory.lend()
        if memory.locked_bytes < nbytes:
            _logger.info(
                "a save copies %.1f of %.1f MiB into memory that is not page-locked yet, which the training waits for",
                *((nbytes - memory.locked_bytes) / 2**20, nbytes / 2**20),
            )
        return slab

    def _lend_torchs(self, nbytes: int) -> Tensor:
        if self._slab is None or self._slab.nbytes < nbytes:
            self._slab = None  # first, so that both never exist at once
            self._slab = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._slab


def _layout(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """Returns where each tensor begins in a slab, and the bytes of all."""
    begins, end = [], 0
    for tensor in tensors:
        begins.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return begins, end


def _can_lock(tensors: Iterable[Tensor]) -> bool:
    """Returns whether this build page-locks memory for the tensors."""
    return bool(_C.cuda_versions()[0]) and torch.version.hip is None and any(one.is_cuda for one in tensors)


def can_copy(tensors: Iterable[Tensor]) -> bool:
    """Returns whether `DeviceCopies` serves: tensors are on accelerators with streams."""
    kinds = {tensor.device.type for tensor in tensors} - {"cpu"}
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type != "mps" and kinds == {current.type}
