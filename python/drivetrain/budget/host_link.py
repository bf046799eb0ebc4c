"""Measures the link between a device and its host's memory, over which activations are offloaded."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import torch
from torch import nn

_LARGE_BYTES = 16 << 20  # one millisecond at 16 GB/s
_SMALL_BYTES = 512
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class HostLink:
    """Bandwidth and latency of copies between a device and pinned host memory.

    Attributes:
        out_bytes_per_second: from the device to the host.
        in_bytes_per_second: from the host to the device.
        copy_seconds: the latency of a copy, whatever its size.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    copy_seconds: float

    def out_seconds(self, num_bytes: int) -> float:
        return self.copy_seconds + num_bytes / self.out_bytes_per_second

    def in_seconds(self, num_bytes: int) -> float:
        return self.copy_seconds + num_bytes / self.in_bytes_per_second

    def __str__(self) -> str:
        return (
            f"{self.out_bytes_per_second / 1e9:.1f} GB/s to the host, {self.in_bytes_per_second / 1e9:.1f} GB/s back, "
            f"{1e6 * self.copy_seconds:.0f} us a copy"
        )


def link_of(model: nn.Module) -> HostLink | None:
    """Returns the slowest link of the devices that hold the model; None on the CPU, where no copy leaves the host."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    found = [device for device in devices if device.type not in ("cpu", "meta")]
    return min((measured_link(device) for device in found), key=lambda link: link.out_bytes_per_second, default=None)


@functools.cache
def measured_link(device: torch.device) -> HostLink:
    """Measures the link of a device once per process, which takes a few milliseconds."""
    large, small = (_copy_seconds(device, num_bytes) for num_bytes in (_LARGE_BYTES, _SMALL_BYTES))
    out_bytes_per_second, in_bytes_per_second = (
        _LARGE_BYTES / max(of_large - of_small, 1e-9) for of_large, of_small in zip(large, small, strict=True)
    )
    return HostLink(out_bytes_per_second, in_bytes_per_second, max(small))


class _CopySeconds(NamedTuple):
    """The seconds of a copy to the host, and of one back."""

    out: float
    back: float


def _copy_seconds(device: torch.device, num_bytes: int) -> _CopySeconds:
    """Returns the shortest seconds of a few copies to the host and back. The first round only warms up."""
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    on_host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    shortest = _CopySeconds(float("inf"), float("inf"))
    for _ in range(1 + _ROUNDS):
        events = [torch.Event(device, enable_timing=True) for _ in range(3)]
        events[0].record()
        on_host.copy_(on_device, non_blocking=True)
        events[1].record()
        on_device.copy_(on_host, non_blocking=True)
        events[2].record()
        events[2].synchronize()
        out, back = (begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events))
        shortest = _CopySeconds(min(shortest.out, out), min(shortest.back, back))
    return shortest
