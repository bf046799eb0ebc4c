"""Measures all-reduce between ranks of one host: shared memory and the bfloat16 wire against gloo, and on GPUs our NCCL
transport against the process group."""

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track

from .. import _C
from ..ddp import transport
from .measure import Row, Timer, median_interval
from .ranks import BACKENDS, RANKS, meet, on_ranks

# name, number of fp32 elements, and the targeted speedup
CASES = (
    ("1 KiB", 256, 3.0),
    ("64 KiB", 16 << 10, None),
    ("1 MiB", 256 << 10, None),
    ("25 MiB", 25 << 18, 5.0),
)
WIRE_NUMEL = 25 << 18
GPU_CASES = (("1 KiB", 256), ("1 MiB", 256 << 10), ("25 MiB", 25 << 18), ("256 MiB", 64 << 20))

# fp32 values [n], a function that reduces them in place, and the expected sum
_Call = tuple[torch.Tensor, Callable[[], Any], torch.Tensor]


def run(rounds: int) -> list[Row]:
    """Returns rows of times and bandwidths per size. Raises RuntimeError if a timed all-reduce gives a wrong sum."""
    rows = []
    for what, numel, target in track(CASES, description="all-reduce", transient=True):
        rows += _rows(what, numel, target, on_ranks(functools.partial(_measure, numel, rounds)))
    return rows + _wire_rows(on_ranks(functools.partial(_measure_wire, rounds)))


def _measure(numel: int, rounds: int) -> list[list[float]]:
    """Returns the seconds of gloo and of shared memory, per round."""
    comm = _comm("shm")
    if comm.name != "shm":
        raise RuntimeError(f"transport is {comm.name!r}, expected 'shm': memory cannot be shared here ({comm.why_not})")
    inputs, expected = _own_input(numel)
    theirs, ours = torch.zeros(numel), comm.allocate(4 * numel).view(torch.float32)
    return _timed(
        {
            "gloo": (theirs, lambda: dist.all_reduce(theirs), expected),
            "drivetrain": (ours, lambda: comm.all_reduce(ours, mean=False), expected),
        },
        inputs,
        rounds,
    )


def _measure_wire(rounds: int) -> list[list[float]]:
    """Returns the seconds of gloo, of torch's bfloat16 hook over gloo, and of our bfloat16 wire, per round."""
    comm = _comm("torch", torch.bfloat16)
    inputs = _inputs(WIRE_NUMEL)
    rounded = torch.stack([values.bfloat16() for values in inputs]).sum(0).float()
    exact, theirs, ours = (torch.zeros(WIRE_NUMEL) for _ in range(3))

    def hook() -> None:
        compressed = theirs.bfloat16()
        dist.all_reduce(compressed)
        theirs.copy_(compressed)

    return _timed(
        {
            "gloo": (exact, lambda: dist.all_reduce(exact), torch.stack(inputs).sum(0)),
            "gloo in bfloat16": (theirs, hook, rounded),
            "drivetrain": (ours, lambda: comm.all_reduce(ours, mean=False), rounded),
        },
        inputs,
        rounds,
    )


def _comm(choice: str, wire_dtype: torch.dtype | None = None) -> _C.Comm:
    assert dist.group.WORLD is not None
    return transport.make_comm(choice, dist.group.WORLD, torch.device("cpu"), wire_dtype)


def _inputs(numel: int, num_ranks: int = RANKS) -> list[torch.Tensor]:
    """Returns every rank's values. They are integers, so their sum is exact in any order."""
    return [torch.arange(numel).mul_(r + 1).remainder_(1000).float() for r in range(num_ranks)]


def _own_input(numel: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns a list with this rank's values at its place, and the sum of all ranks' values."""
    size, rank = dist.get_world_size(), dist.get_rank()
    inputs = [torch.empty(0)] * size
    expected = torch.zeros(numel)
    for r in range(size):
        values = torch.arange(numel).mul_(r + 1).remainder_(1000).float()
        expected += values
        if r == rank:
            inputs[r] = values
    return inputs, expected


def _timed(
    calls: dict[str, _Call], inputs: list[torch.Tensor], rounds: int, device: torch.device | None = None
) -> list[list[float]]:
    """Times each call per round, from a common start to the end of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 5):
        for name in calls if i % 2 else reversed(calls):
            values, call, expected = calls[name]
            values.copy_(inputs[dist.get_rank()])
            if values.is_cuda:
                torch.cuda.synchronize()
            meet()
            timer = Timer(device)
            with timer:
                call()
            meet()  # else a rank's check takes the core of a rank that is still measured
            slowest = torch.tensor(timer.seconds(), dtype=torch.float64)
            if not torch.equal(values, expected):
                raise RuntimeError(f"round {i}: the sum of {values.numel()} elements by {name} is wrong")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    return [values[5:] for values in times.values()]


def _wire_rows(times: list[list[float]]) -> list[Row]:
    exact_s, theirs_s, ours_s = times
    median_us = [statistics.median(values) * 1e6 for values in times]
    against = [
        median_interval([b / a for a, b in zip(torch_s, ours_s, strict=True)]) for torch_s in (exact_s, theirs_s)
    ]
    what = "all-reduce of 25 MiB fp32 over loopback, bf16 on the wire, result checked"
    return [
        Row(what, "us", median_us[0], median_us[2], *against[0]),
        Row("  against torch's bf16 hook", "us", median_us[1], median_us[2], *against[1]),
    ]


def run_gpu(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Yields rows per size with one rank per GPU. On a single GPU, two ranks share it if NCCL permits. They communicate
    through sockets then, so the rows show the cost of a call but not a bandwidth."""
    num_gpus = torch.cuda.device_count()
    ranks = max(num_gpus, 2)
    where = f"between {ranks} GPUs" if num_gpus > 1 else "between 2 ranks of one GPU, through sockets"
    for what, numel in GPU_CASES[:1] if is_dry else GPU_CASES:
        measure = functools.partial(_measure_gpu, device.type, numel, rounds)
        times = on_ranks(measure, count=ranks, backend=BACKENDS[device.type])
        yield from _rows(f"{what} {where},", numel, None, times, ranks)


def _measure_gpu(device_type: str, numel: int, rounds: int) -> list[list[float]]:
    """Returns the seconds of the process group's all-reduce and of our transport's, per round, on the slowest rank."""
    is_cuda = device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    assert dist.group.WORLD is not None
    comm = transport.make_comm("nccl" if is_cuda else "torch", dist.group.WORLD, device, None)
    inputs = [values.to(device) for values in _inputs(numel, dist.get_world_size())]
    expected = torch.stack(inputs).sum(0)
    theirs, ours = torch.empty_like(expected), comm.allocate(4 * numel, str(device)).view(torch.float32)
    return _timed(
        {
            "torch": (theirs, lambda: dist.all_reduce(theirs), expected),
            "drivetrain": (ours, lambda: comm.all_reduce(ours, mean=False), expected),
        },
        inputs,
        rounds,
        device,
    )


def _rows(what: str, numel: int, target: float | None, times: list[list[float]], num_ranks: int = RANKS) -> list[Row]:
    torch_s, ours_s = (statistics.median(values) for values in times)
    ratio, low, high = median_interval([b / a for a, b in zip(*times, strict=True)])
    algbw = 4 * numel / torch_s / 1e9, 4 * numel / ours_s / 1e9
    on_bus = 2 * (num_ranks - 1) / num_ranks  # bytes per link for each byte reduced, as nccl-tests defines busbw
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
