"""Copies tensors of accelerators into pinned memory on a stream of its own, while the training goes on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError

_ALIGNMENT = 64
_LARGEST_CLONE = 16 << 20  # bytes of host tensors, such as counters of steps, that are copied at once
_POLL_S = 0.002


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
            stream = slabs.stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                for name, tensor in sources.items():
                    if tensor.device == device:
                        places[name].copy_(tensor, non_blocking=True)
                end = stream.record_event()
            torch.accelerator.current_stream(device).wait_event(end)
            self._ends.append((device, end))
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


class Slabs:
    """Lends pinned memory to one snapshot at a time, and keeps it and the streams of copies for the next one."""

    def __init__(self) -> None:
        self._slab: Tensor | None = None
        self._streams: dict[torch.device, Any] = {}

    def stream(self, device: torch.device) -> Any:
        """Returns the device's stream of copies."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    def lend(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a contiguous tensor of pinned memory for each tensor."""
        begins, end = {}, 0
        for name, tensor in tensors.items():
            begins[name] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._slab is None or self._slab.nbytes < end:
            self._slab = None  # first, so that both never exist at once
            self._slab = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=True)
        slab = self._slab
        return {
            name: slab[begin : begin + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
            for name, begin in begins.items()
        }

    def drop(self) -> None:
        """Forgets the memory, which a snapshot may still use."""
        self._slab = None


def can_copy(tensors: Iterable[Tensor]) -> bool:
    """Returns whether `DeviceCopies` serves: tensors are on accelerators with streams."""
    kinds = {tensor.device.type for tensor in tensors} - {"cpu"}
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type != "mps" and kinds == {current.type}
