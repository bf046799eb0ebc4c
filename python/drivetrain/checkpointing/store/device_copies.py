"""Copies tensors of accelerators into pinned memory on a stream of its own, while the training goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
    waits for the copies.

    Attributes:
        host: Where the tensors are once `wait` has returned, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], slabs: Slabs) -> None:
        """
        Args:
            tensors: Tensors to copy. Tensors on the host are copied before this returns.
            slabs: Lends the pinned memory. No other snapshot may use it until this one is written.
        """
        self._sources = [tensor for tensor in tensors.values() if tensor.device.type != "cpu"]  # until they are copied
        self._ends: list[tuple[torch.device, Any]] = []
        places = slabs.lend({name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"})
        self.host = {name: places[name] if name in places else tensor.clone() for name, tensor in tensors.items()}
        for device in dict.fromkeys(tensor.device for tensor in self._sources):
            stream = slabs.stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                for name in places:
                    if tensors[name].device == device:
                        places[name].copy_(tensors[name], non_blocking=True)
                end = stream.record_event()
            torch.accelerator.current_stream(device).wait_event(end)
            self._ends.append((device, end))

    def wait(self, timeout: float) -> None:
        """Waits on the host until all tensors are copied.

        Raises:
            CheckpointError: That took longer than `timeout` seconds.
        """
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


def can_copy(tensors: Mapping[str, Tensor]) -> bool:
    """Returns whether `DeviceCopies` serves: tensors are on accelerators with streams, and few bytes on the host."""
    kinds = {tensor.device.type for tensor in tensors.values()} - {"cpu"}
    host_bytes = sum(tensor.nbytes for tensor in tensors.values() if tensor.device.type == "cpu")
    current = torch.accelerator.current_accelerator()
    is_plain = all(tensor.layout == torch.strided for tensor in tensors.values())
    has_streams = current is not None and current.type != "mps" and kinds == {current.type}
    return has_streams and is_plain and host_bytes <= _LARGEST_CLONE
