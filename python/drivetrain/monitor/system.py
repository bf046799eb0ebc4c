"""Measures the use of the host and of the GPU."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import torch

from ..memory import host_memory


def system_values(device: torch.device) -> dict[str, float]:
    """Returns load and memory of this process's host, and memory, percent and watts of the GPU that trains.

    Without pynvml, the GPU's percent and watts are left out.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    values: dict[str, float] = {
        "load_average": os.getloadavg()[0],
        "process_memory_bytes": pages * resource.getpagesize(),
        "memory_available_bytes": host_memory().available,
    }
    if device.type == "cuda":
        values["gpu_peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
        with contextlib.suppress(Exception):  # pynvml is missing, or a driver's NVML, or the GPU reports no value
            values["gpu_busy_percent"] = torch.cuda.utilization(device)
            values["gpu_power_watts"] = torch.cuda.power_draw(device) / 1e3
    return values
