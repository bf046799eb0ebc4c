"""Measures the use of the host and of the GPU, where psutil and NVML are installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from typing import Any

import torch


class System:
    """Samples CPU, memory and network of this process's host, and the GPU of this process.

    Without psutil and without NVML the values of these are left out.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process: Any = None
        self._psutil: Any = None
        self._nvml: Any = None
        self._gpu: Any = None
        self._sent = (0, 0, time.monotonic())
        if importlib.util.find_spec("psutil") is not None:
            self._psutil = importlib.import_module("psutil")
            self._process = self._psutil.Process()
            self._process.cpu_percent()  # the first call only marks the time
            self._psutil.cpu_percent()
            self._sent = self._network()
        if device.type == "cuda" and importlib.util.find_spec("pynvml") is not None:
            pynvml: Any = importlib.import_module("pynvml")
            with contextlib.suppress(pynvml.NVMLError):  # a driver without NVML, as in some containers
                pynvml.nvmlInit()
                identity = torch.cuda.get_device_properties(device).uuid
                self._gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}".encode())
                self._nvml = pynvml

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
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):  # a value that this GPU does not report
                rates = self._nvml.nvmlDeviceGetUtilizationRates(self._gpu)
                values["gpu_busy_percent"] = rates.gpu
                values["gpu_power_watts"] = self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3
        if self._device.type == "cuda":
            values["gpu_peak_memory_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return values

    def _network(self) -> tuple[int, int, float]:
        counters = self._psutil.net_io_counters()
        sent, received = (counters.bytes_sent, counters.bytes_recv) if counters else (0, 0)
        return sent, received, time.monotonic()
