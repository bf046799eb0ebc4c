"""All-reduce between the CPU ranks of one host: shared memory against gloo."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track

from .. import transport
from .measure import Row, median_interval
from .ranks import RANKS, meet, on_ranks

# what, elements of fp32, how many times as fast it should be
CASES = (
    ("1 KiB", 256, 3.0),
    ("64 KiB", 16 << 10, None),
    ("1 MiB", 256 << 10, None),
    ("25 MiB", 25 << 18, 5.0),
)


def run(rounds: int) -> list[Row]:
    """Rows per size: the times, and from them the bandwidths; raises if a result of a timed all-reduce was wrong."""
    rows = []
    for what, numel, target in track(CASES, description="all-reduce", transient=True):
        rows += _rows(what, numel, target, on_ranks(functools.partial(_measure, numel, rounds)))
    return rows


def _measure(numel: int, rounds: int) -> list[list[float]]:
    """Seconds of gloo and of shared memory, per round: of the rank that takes longer, from all having come."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    comm = transport.make_comm("shm", group, torch.device("cpu"))
    if comm.name != "shm":
        raise RuntimeError(f"memory cannot be shared here, so there is nothing to measure: {comm.why_not}")
    theirs, ours = torch.zeros(numel), comm.allocate(4 * numel).view(torch.float32)
    calls: list[tuple[torch.Tensor, Callable[[], Any]]] = [
        (theirs, lambda: dist.all_reduce(theirs)),
        (ours, lambda: comm.all_reduce(ours, mean=False)),
    ]
    # Whole numbers, so that the sum is exact in any order.
    inputs = [torch.arange(numel).mul_(r + 1).remainder_(1000).float() for r in range(RANKS)]
    expected = torch.stack(inputs).sum(0)
    times: list[list[float]] = [[], []]
    for i in range(rounds + 5):
        for which in (0, 1) if i % 2 else (1, 0):
            values, call = calls[which]
            values.copy_(inputs[rank])
            meet()
            begin = time.perf_counter()
            call()
            seconds = time.perf_counter() - begin
            if not torch.equal(values, expected):
                raise RuntimeError(
                    f"round {i}: the sum of {numel} elements by {('gloo', 'drivetrain')[which]} is wrong"
                )
            slowest = torch.tensor([seconds], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[which].append(slowest.item())
    return [values[5:] for values in times]


def _rows(what: str, numel: int, target: float | None, times: list[list[float]]) -> list[Row]:
    torch_s, ours_s = (statistics.median(values) for values in times)
    ratio, low, high = median_interval([b / a for a, b in zip(*times, strict=True)])
    algbw = 4 * numel / torch_s / 1e9, 4 * numel / ours_s / 1e9
    on_bus = 2 * (RANKS - 1) / RANKS  # what every link carries, per byte reduced
    return [
        Row(
            f"all-reduce of {what} fp32, result checked",
            "us",
            torch_s * 1e6,
            ours_s * 1e6,
            ratio,
            low,
            high,
            f"<= {1 / target:.3f}" if target else "",
            ratio <= 1 / target if target else None,
        ),
        Row("  algbw", "GB/s", algbw[0], algbw[1]),
        Row("  busbw", "GB/s", algbw[0] * on_bus, algbw[1] * on_bus),
    ]
