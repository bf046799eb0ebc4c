"""Measures small all-reduces between ranks that are bound to a core each before they construct the transport."""

import functools
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..ddp import transport
from .measure import Row
from .ranks import RANKS, on_ranks

NUMEL = 256  # float32: 1 KiB
CALLS = 1000  # per round, without a pause
TARGET_US = 1.8


def run(rounds: int) -> list[Row]:
    """Returns a row for unbound ranks and one for bound ranks; none if there are fewer cores than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        return []
    rows = []
    for what, bound_to in (("that are not bound", []), ("bound to a core each before construction", cores)):
        theirs, ours, spins = on_ranks(functools.partial(_measure, bound_to, rounds))
        how = "spinning" if spins else "sleeping"
        row = Row(f"all-reduce of 1 KiB, {RANKS} ranks {what} ({how} first)", "us", theirs, ours)
        if bound_to:
            row.target, row.met = f"<= {TARGET_US:g} us, as where ranks spin unbound", ours <= TARGET_US
        rows.append(row)
    return rows


def _measure(cores: list[int], rounds: int) -> tuple[float, float, bool]:
    """Returns the microseconds of gloo and of shared memory, and if waits begin by spinning."""
    if cores:
        os.sched_setaffinity(0, {cores[dist.get_rank()]})
    assert dist.group.WORLD is not None
    comm = transport.make_comm("shm", dist.group.WORLD, torch.device("cpu"))
    if comm.name != "shm":
        raise RuntimeError(f"transport is {comm.name!r}, expected 'shm': memory cannot be shared here ({comm.why_not})")
    theirs, ours = torch.ones(NUMEL), comm.allocate(4 * NUMEL).view(torch.float32)
    gloo = _microseconds(lambda: dist.all_reduce(theirs, dist.ReduceOp.MAX), rounds, CALLS // 10)
    shared = _microseconds(lambda: comm.all_reduce(ours, mean=False), rounds, CALLS)
    return gloo, shared, comm.spins


def _microseconds(call: Callable[[], object], rounds: int, calls: int) -> float:
    """Returns the median over rounds of a call's time on rank 0."""
    times = []
    for _ in range(rounds + 2):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    return 1e6 * statistics.median(times[2:])
