"""Measures the use of the host and of the GPU, where psutil and pynvml are installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from typing import Any

import torch


class System:
    """Samples CPU, memory and network of this process's host, and the GPU of this process.

    Without psutil and without pynvml the values of these are left out.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process: Any = None
        self._psutil: Any = None
        self._sent = (0, 0, time.monotonic())
        if importlib.util.find_spec("psutil") is not None:
            self._psutil = importlib.import_module("psutil")
            self._process = self._psutil.Process()
            self._process.cpu_percent()  # the first call only marks the time
            self._psutil.cpu_percent()
            self._sent = self._network()

    def sample(self) -> dict[str, float]:
        """Returns the values now, or since the last call: percent, bytes, bytes per second, watts."""
        values: dict[str, float] = {}
        if self._psutil is not None:
            before, now = self._sent, self._network()
            seconds = max(now[2] - before[2], 1e-9)
            self._sent = now
            values = {
                "cpu_percent": self._psutil.cpu_percent(),
                "process_cpu_percent": self._process.cpu_percent(),
                "process_memory_bytes": self._process.memory_info().rss,
                "memory_available_bytes": self._psutil.virtual_memory().available,
                "network_sent_bytes_per_s": (now[0] - before[0]) / seconds,
                "network_received_bytes_per_s": (now[1] - before[1]) / seconds,
            }
        if self._device.type == "cuda":
            values["gpu_peak_memory_bytes"] = torch.cuda.max_memory_allocated(self._device)
            with contextlib.suppress(Exception):  # pynvml is missing, or a driver's NVML, or the GPU reports no value
                values["gpu_busy_percent"] = torch.cuda.utilization(self._device)
                values["gpu_power_watts"] = torch.cuda.power_draw(self._device) / 1e3
        return values

    def _network(self) -> tuple[int, int, float]:
        counters = self._psutil.net_io_counters()
        sent, received = (counters.bytes_sent, counters.bytes_recv) if counters else (0, 0)
        return sent, received, time.monotonic()
