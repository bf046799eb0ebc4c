"""Measures a training run: time per step, memory per rank, and the communication left exposed."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass
class StepTimer:
    """Times the body of each `with` without making the host wait: CUDA events are read only at the end."""

    device: torch.device
    _seconds: list[float] = field(default_factory=list)
    _events: list[tuple[torch.Event, torch.Event]] = field(default_factory=list)

    def _event(self) -> torch.Event:
        return torch.Event(self.device, enable_timing=True)

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            self._events.append((self._event(), self._event()))
            self._events[-1][0].record()
        else:
            self._seconds.append(-time.perf_counter())

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            self._events[-1][1].record()
        else:
            self._seconds[-1] += time.perf_counter()

    def median_ms(self, skip: int = 0) -> float:
        """Return the median duration without the first `skip` ones; nan if none is left."""
        return 1e3 * statistics.median(self._read()[skip:] or [float("nan")])

    def total_s(self) -> float:
        """Return the sum of all durations."""
        return sum(self._read())

    def _read(self) -> list[float]:
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds = [start.elapsed_time(end) / 1e3 for start, end in self._events]
        return self._seconds


def _proc_bytes(file: str, key: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/{file} has no line {key}")


def _counted_for_others_bytes() -> int:
    """Return the part of this process's shared resident memory that is attributed to other ranks.

    A rank's own part is its proportional set size: each shared page, divided by the number of processes that map it.
    """
    return _proc_bytes("status", "RssShmem:") - _proc_bytes("smaps_rollup", "Pss_Shmem:")


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak, so that memory for loading the data does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # Writing 5 sets VmHWM back to VmRSS (proc(5)). If that is forbidden, the peak includes the loading.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def nccl_memory_bytes() -> tuple[int, int]:
    """Return current and peak memory of drivetrain's transport "nccl", which torch's figures do not include."""
    native = sys.modules.get("drivetrain._C")  # absent under torch's own engine
    return native.nccl_memory_bytes() if native else (0, 0)


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + nccl_memory_bytes()[1]
    # Shared memory is allocated from the first step on, so its present size applies to the peak too.
    return _proc_bytes("status", "VmHWM:") - _counted_for_others_bytes()


def memory_at_rest_bytes(device: torch.device) -> int:
    """Return the memory that stays allocated between two steps: weights, optimizer state and kept gradients."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) + nccl_memory_bytes()[0]
    return _proc_bytes("status", "VmRSS:") - _counted_for_others_bytes()


def exposed_communication_ms(
    step: Callable[[bool], object], device: torch.device, num_rounds: int = 15
) -> tuple[float, float]:
    """Return the median ms of a step that synchronizes gradients and of the same step under `no_sync`.

    Their difference is the communication that backward did not hide. `step(synchronize)` runs one whole
    training step. The replicas' weights diverge here: call this last.
    """
    timers = {True: StepTimer(device), False: StepTimer(device)}
    for _ in range(num_rounds):
        # Both kinds alternate, so that noise affects them equally. The barrier removes skew between ranks.
        for synchronize, timer in timers.items():
            if dist.get_world_size() > 1:
                dist.barrier()
            with timer:
                step(synchronize)
    return timers[True].median_ms(skip=2), timers[False].median_ms(skip=2)


def gather(value: object) -> list[object]:
    """Return every rank's `value`, in order of ranks."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
