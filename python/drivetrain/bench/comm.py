"""Measures all-reduce between ranks of one host: shared memory and the bfloat16 wire against gloo."""

import functools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track

from .. import _C
from ..ddp import transport
from .measure import Row, interleaved, ratio_row
from .ranks import RANKS, device_of, meet, on_ranks, slowest

# name, number of fp32 elements, and the targeted speedup
CASES = (
    ("1 KiB", 256, 3.0),
    ("64 KiB", 16 << 10, None),
    ("1 MiB", 256 << 10, None),
    ("25 MiB", 25 << 18, 5.0),
)
WIRE_NUMEL = 25 << 18
BOUND_NUMEL, BOUND_CALLS = 256, 1000  # of 1 KiB, without a pause
BOUND_TARGET_US = 1.8

# fp32 values [n], a function that reduces them in place, and the expected sum
_Call = tuple[torch.Tensor, Callable[[], Any], torch.Tensor]


def run(rounds: int) -> list[Row]:
    """Returns rows of times and bandwidths per size. Raises RuntimeError if a timed all-reduce gives a wrong sum."""
    rows = []
    for what, numel, target in track(CASES, description="all-reduce", transient=True):
        rows += rows_of(what, numel, target, on_ranks(functools.partial(measure, "cpu", numel, rounds)))
    gloo_s, hook_s, ours_s = on_ranks(functools.partial(_measure_wire, rounds))
    what = "all-reduce of 25 MiB fp32 over loopback, bf16 on the wire, result checked"
    rows.append(ratio_row(what, gloo_s, ours_s, unit="us"))
    return [*rows, ratio_row("  against torch's bf16 hook", hook_s, ours_s, unit="us")]


def run_bound(rounds: int) -> list[Row]:
    """Returns a row for unbound ranks, and one for ranks that are bound to a core before they construct the transport.

    There are none with fewer cores than ranks.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        return []
    rows = []
    for what, bound_to in (("that are not bound", []), ("bound to a core each before construction", cores)):
        theirs, ours, spins = on_ranks(functools.partial(_measure_bound, bound_to, rounds))
        how = "spinning" if spins else "sleeping"
        row = Row(f"all-reduce of 1 KiB, {RANKS} ranks {what} ({how} first)", "us", theirs, ours)
        if bound_to:
            row.target, row.met = f"<= {BOUND_TARGET_US:g} us, as where ranks spin unbound", ours <= BOUND_TARGET_US
        rows.append(row)
    return rows


def measure(device_type: str, numel: int, rounds: int) -> list[list[float]]:
    """Returns the seconds of the process group, and of shared memory or of our NCCL transport, per round."""
    device = device_of(device_type)
    comm = _comm("nccl" if device_type == "cuda" else "shm", device)
    inputs = _inputs(numel)
    expected = torch.stack(inputs).sum(0).to(device)
    theirs, ours = torch.empty_like(expected), comm.allocate(4 * numel, str(device)).view(torch.float32)
    calls = [
        (theirs, lambda: dist.all_reduce(theirs), expected),
        (ours, lambda: comm.all_reduce(ours, mean=False), expected),
    ]
    return _timed(calls, inputs[dist.get_rank()], rounds, device)


def _measure_wire(rounds: int) -> list[list[float]]:
    """Returns the seconds of gloo, of torch's bfloat16 hook over gloo, and of our bfloat16 wire, per round."""
    comm = _comm("torch", torch.device("cpu"), torch.bfloat16)
    inputs = _inputs(WIRE_NUMEL)
    rounded = torch.stack([values.bfloat16() for values in inputs]).sum(0).float()
    exact, theirs, ours = (torch.zeros(WIRE_NUMEL) for _ in range(3))

    def hook() -> None:
        compressed = theirs.bfloat16()
        dist.all_reduce(compressed)
        theirs.copy_(compressed)

    calls = [
        (exact, lambda: dist.all_reduce(exact), torch.stack(inputs).sum(0)),
        (theirs, hook, rounded),
        (ours, lambda: comm.all_reduce(ours, mean=False), rounded),
    ]
    return _timed(calls, inputs[dist.get_rank()], rounds, torch.device("cpu"))


def _measure_bound(cores: list[int], rounds: int) -> tuple[float, float, bool]:
    """Returns the microseconds of gloo and of shared memory on rank 0, and if waits begin by spinning."""
    if cores:
        os.sched_setaffinity(0, {cores[dist.get_rank()]})
    comm = _comm("shm", torch.device("cpu"))
    theirs, ours = torch.ones(BOUND_NUMEL), comm.allocate(4 * BOUND_NUMEL).view(torch.float32)

    def microseconds(call: Callable[[], object], calls: int) -> float:
        def repeated() -> None:
            for _ in range(calls):
                call()

        (times,) = interleaved([repeated], rounds, warm_up=2, prepare=lambda which: dist.barrier())
        return 1e6 * statistics.median(times) / calls

    gloo = microseconds(lambda: dist.all_reduce(theirs, dist.ReduceOp.MAX), BOUND_CALLS // 10)
    return gloo, microseconds(lambda: comm.all_reduce(ours, mean=False), BOUND_CALLS), comm.spins


def _comm(choice: str, device: torch.device, wire_dtype: torch.dtype | None = None) -> _C.Comm:
    assert dist.group.WORLD is not None
    comm = transport.make_comm(choice, dist.group.WORLD, device, wire_dtype)
    if choice == "shm" and comm.name != "shm":
        raise RuntimeError(f"transport is {comm.name!r}, expected 'shm': memory cannot be shared here ({comm.why_not})")
    return comm


def _inputs(numel: int) -> list[torch.Tensor]:
    """Returns every rank's values. They are integers, so their sum is exact in any order."""
    return [torch.arange(numel).mul_(r + 1).remainder_(1000).float() for r in range(dist.get_world_size())]


def _timed(calls: Sequence[_Call], own: torch.Tensor, rounds: int, device: torch.device) -> list[list[float]]:
    """Times each call on this rank's values per round, from a common start to the end of the slowest rank."""
    is_reduced = [False] * len(calls)

    def check(which: int) -> None:
        values, _, expected = calls[which]
        if is_reduced[which] and not torch.equal(values, expected):
            raise RuntimeError(f"a sum of {values.numel()} elements by call {which} of {len(calls)} is wrong")

    def prepare(which: int) -> None:
        meet()  # else a rank's check takes the core of a rank that is still measured
        check(which)
        calls[which][0].copy_(own)
        is_reduced[which] = True
        if device.type == "cuda":
            torch.cuda.synchronize()
        meet()

    times = interleaved([call for _, call, _ in calls], rounds, prepare=prepare, device=device)
    for which in range(len(calls)):
        check(which)
    return slowest(times)


def rows_of(what: str, numel: int, target: float | None, times: list[list[float]], num_ranks: int = RANKS) -> list[Row]:
    """Returns rows of the times, the bandwidth and the bandwidth per link of all-reduces of `numel` elements."""
    torch_s, ours_s = times
    least = round(1 / target, 3) if target else None
    row = ratio_row(f"all-reduce of {what} fp32, result checked", torch_s, ours_s, least, unit="us")
    theirs, ours = (4 * numel / statistics.median(seconds) / 1e9 for seconds in times)
    on_bus = 2 * (num_ranks - 1) / num_ranks  # bytes per link for each byte reduced, as nccl-tests defines busbw
    return [row, Row("  algbw", "GB/s", theirs, ours), Row("  busbw", "GB/s", theirs * on_bus, ours * on_bus)]
