"""Measures each rank's GPU for `drivetrain doctor`: copies to and from it, and products, against the median rank."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from drivetrain.cli.finding import Finding, not_applicable, passed, warn

_COPIED = 2**26  # bytes
_SIZE = 4096  # of the product's square matrices
_ROUNDS = 5  # the fastest one counts
_SLOW = 0.7  # of the median rank's rate
_UNITS = {"to the device": 1e9, "from the device": 1e9, "products": 1e12}
_NAMES = {"to the device": "GB/s", "from the device": "GB/s", "products": "TFLOP/s"}


def measure(device: torch.device | None = None, size: int = _SIZE, copied: int = _COPIED) -> dict[str, float] | None:
    """Returns bytes per second of copies to and from a device, and FLOP/s of its products in bfloat16.

    Args:
        device: None: this rank's GPU.
        size: Rows and columns of the product's matrices.
        copied: Bytes of the copies.

    Returns:
        The rates by name; None without a GPU.
    """
    if device is None:
        if not torch.cuda.is_available():
            return None
        device = own_gpu()
    host = torch.empty(copied, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(copied, dtype=torch.uint8, device=device)
    a = torch.rand(size, size, device=device).bfloat16()
    return {
        "to the device": copied / _fastest(lambda: there.copy_(host, non_blocking=True), device),
        "from the device": copied / _fastest(lambda: host.copy_(there, non_blocking=True), device),
        "products": 2 * size**3 / _fastest(lambda: torch.mm(a, a), device),
    }


def own_gpu() -> torch.device:
    """Returns this rank's GPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _fastest(call: Callable[[], Any], device: torch.device) -> float:
    def seconds() -> float:
        begin = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter() - begin

    seconds()
    return min(seconds() for _ in range(_ROUNDS))


def slow_rank(rates: Mapping[int, Mapping[str, float] | None]) -> int | None:
    """Returns a rank whose GPU is too slow compared with the median rank's."""
    found = _slowest(_measured(rates))
    return None if found is None else found[1]


def _measured(rates: Mapping[int, Mapping[str, float] | None]) -> dict[int, Mapping[str, float]]:
    return {rank: of_rank for rank, of_rank in rates.items() if of_rank is not None}


def _slowest(measured: Mapping[int, Mapping[str, float]]) -> tuple[str, int, float] | None:
    """Returns the first rate that is too low: its name, the slowest rank, and the median rank's rate."""
    for what in _UNITS if measured else ():
        of_ranks = {rank: of_rank[what] for rank, of_rank in measured.items()}
        typical = statistics.median_high(of_ranks.values())
        slow = min(of_ranks, key=lambda rank: of_ranks[rank])
        if of_ranks[slow] < _SLOW * typical:
            return what, slow, typical
    return None


def judge(rates: Mapping[int, Mapping[str, float] | None], hosts: Sequence[str]) -> list[Finding]:
    """Compares each rank's rates with the median rank's.

    Args:
        rates: The results of `measure`, by rank.
        hosts: The host of each rank.
    """
    measured = _measured(rates)
    if not measured:
        return [not_applicable("devices", "no rank has a GPU")]
    if len(measured) < len(rates):
        without = next(rank for rank in rates if rank not in measured)
        cure = "look at CUDA_VISIBLE_DEVICES and nvidia-smi there"
        return [warn("devices", f"rank {without} on {hosts[without]} sees no GPU, and other ranks do", cure)]
    if (found := _slowest(measured)) is not None:
        what, slow, typical = found
        text = (
            f"{what}: rank {slow} on {hosts[slow]} reaches {measured[slow][what] / _UNITS[what]:.1f} {_NAMES[what]}, "
            f"the median rank {typical / _UNITS[what]:.1f}"
        )
        cure = "look there for other processes, clocks and temperature (nvidia-smi -q), and the PCIe link's width"
        return [warn("devices", text, cure)]
    spans = [
        f"{what} {min(of_rank[what] for of_rank in measured.values()) / unit:.1f} {_NAMES[what]} or more"
        for what, unit in _UNITS.items()
    ]
    return [passed("devices", ", ".join(spans))]
