"""Measures how the time and memory of DistributedDataParallel grow with the number of ranks on one machine."""

import functools
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from drivetrain.bench.measure import Row, interleaved, ratio_row
from drivetrain.bench.ranks import on_ranks
from drivetrain.ddp import control_block, tag_board
from drivetrain.ddp.distributed import DistributedDataParallel

MIB = 2**20
RESIDENT_RANKS = (2, 4, 8, 16)
GRADIENTS_MIB = 32
MOST_RESIDENT = 4.2  # times a rank's gradients: its own, and pages of other ranks that stay resident
CONSTRUCT_RANKS = (8, 64)
SIMULATED_RANKS = (8, 64, 1024)
RANKS_PER_HOST = 8

Memory = dict[str, float]  # MiB, by the kernel's name


def run(rounds: int) -> list[Row]:
    """Returns the rows. Raises RuntimeError if memory cannot be shared here."""
    rows = []
    for count in track(RESIDENT_RANKS, description="resident memory", transient=True):
        rows += _resident_rows(count, on_ranks(_resident, count=count))
    for count in track(CONSTRUCT_RANKS, description="construction", transient=True):
        rows += _construct_rows(count, on_ranks(_construct, count=count))
        rows += _board_rows(count, *on_ranks(_boards, count=count))
    rows.append(_agreement_row(*on_ranks(functools.partial(_agreement, rounds))))
    for count in SIMULATED_RANKS:
        rows += _bookkeeping_rows(count)
    return rows


def _memory() -> Memory:
    """Returns this process's memory. A page shared by n processes counts in full in VmRSS and RssShmem, and as 1/n in
    Pss."""
    gc.collect()
    status = Path("/proc/self/status").read_text() + Path("/proc/self/smaps_rollup").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "RssShmem", "Pss")}


def _added(wrap: Callable[[nn.Module], nn.Module], numel: int, steps: int) -> tuple[Memory, float]:
    """Returns the most memory of any rank after some steps, beyond a module without gradients, and the construction
    time."""
    module = nn.Linear(numel, 1, bias=False)
    dist.barrier()
    before = _memory()
    dist.barrier()
    begin = time.perf_counter()
    model = wrap(module)
    construction = time.perf_counter() - begin
    for _ in range(steps):
        model(torch.ones(1, numel)).sum().backward()
    dist.barrier()  # while all ranks live, because a rank that ends moves its share of common pages to the others
    after = _memory()
    dist.barrier()
    added = torch.tensor([after[name] - before[name] for name in after])
    slowest = torch.tensor([construction])
    dist.all_reduce(added, dist.ReduceOp.MAX)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(after, added.tolist(), strict=True)), slowest.item()


def _shared(module: nn.Module) -> DistributedDataParallel:
    model = DistributedDataParallel(module, transport="shm")
    logged = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if logged["transport"] != "shm":
        raise RuntimeError('transport is not "shm": memory cannot be shared on this machine')
    return model


def _resident() -> dict[str, Memory]:
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch": TorchDistributedDataParallel,
        "drivetrain": _shared,
    }
    for wrap in wrappers.values():  # imports and allocations that happen once
        _added(wrap, 1024, 2)
    return {engine: _added(wrap, GRADIENTS_MIB * MIB // 4, 12)[0] for engine, wrap in wrappers.items()}


def _resident_rows(count: int, memory: dict[str, Memory]) -> list[Row]:
    what = f"beyond a module without gradients, {count} ranks x {GRADIENTS_MIB} MiB of gradients"
    rows = [Row(f"{name} {what}", "MiB", memory["torch"][name], memory["drivetrain"][name]) for name in memory["torch"]]
    rows[1].target = f"<= {MOST_RESIDENT * GRADIENTS_MIB:.0f} MiB, whatever the number of ranks"
    rows[1].met = memory["drivetrain"]["RssShmem"] <= MOST_RESIDENT * GRADIENTS_MIB
    return rows


def _construct() -> dict[str, tuple[Memory, float]]:
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch": TorchDistributedDataParallel,
        "drivetrain": _shared,
    }
    results: dict[str, tuple[Memory, float]] = {}
    for engine, wrap in wrappers.items():
        _added(wrap, 16, 1)
        runs = [_added(wrap, 16, 1) for _ in range(3)]
        results[engine] = (runs[-1][0], statistics.median(seconds for _, seconds in runs))
    return results


def _construct_rows(count: int, results: dict[str, tuple[Memory, float]]) -> list[Row]:
    (theirs, their_s), (ours, our_s) = results["torch"], results["drivetrain"]
    return [
        Row(f"construction, a layer of 16 parameters, {count} ranks", "ms", their_s * 1e3, our_s * 1e3),
        Row(f"Pss of it and of a step, {count} ranks", "MiB", theirs["Pss"], ours["Pss"]),
    ]


def _host(ranks: int) -> bytes:
    """Returns this rank's host where every so many ranks take themselves for one."""
    return (dist.get_rank() // ranks).to_bytes(4, "little")


def _boards() -> tuple[float, float]:
    """Returns the seconds of the slowest rank to make a board of tags on one host, and on hosts of 8 ranks."""

    def slowest(host: bytes) -> float:
        times = []
        for _ in range(3):
            group = dist.new_group()
            dist.barrier()
            begin = time.perf_counter()
            tag_board.make_board(group, host)
            seconds = torch.tensor([time.perf_counter() - begin])
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times.append(seconds.item())
        return statistics.median(times)

    return slowest(_host(dist.get_world_size())), slowest(_host(RANKS_PER_HOST))


def _board_rows(count: int, on_one_host: float, on_hosts: float) -> list[Row]:
    what = "of it, the board of tags, once per process group"
    rows = [Row(f"{what}, {count} ranks", "ms", 0.0, on_one_host * 1e3)]
    if count > RANKS_PER_HOST:
        rows.append(Row(f"{what}, {count} ranks on hosts of {RANKS_PER_HOST} (simulated)", "ms", 0.0, on_hosts * 1e3))
    return rows


def _agreement(rounds: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of a small backward over gloo between two hosts, without and with their agreement."""
    models = []
    original = tag_board.make_board
    for make_board in (lambda group, host=None: None, functools.partial(original, host=_host(1))):
        tag_board.make_board = make_board
        models.append(DistributedDataParallel(nn.Linear(1024, 1), process_group=dist.new_group(), transport="torch"))
    tag_board.make_board = original

    def backward(model: nn.Module) -> None:
        model.zero_grad()
        model(torch.ones(1, 1024)).sum().backward()

    without, agreed = interleaved([functools.partial(backward, model) for model in models], 10 * rounds)
    return without, agreed


def _agreement_row(without: list[float], agreed: list[float]) -> Row:
    what = "forward and backward of 1,025 parameters, two hosts (simulated)"
    return ratio_row(f"{what}: without and with their agreement", without, agreed)


def _bookkeeping_rows(count: int) -> list[Row]:
    """Measures the memory of hang reports on one rank, from simulated records of `count` ranks on hosts of 8."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    block_of = functools.partial(control_block.ControlBlock, store, "", range(count), beat_s=60.0)
    for rank in range(count):
        block_of(rank=rank, host=f"host {rank // RANKS_PER_HOST}").publish(_record(rank))
    for rank in range(0, count, RANKS_PER_HOST):
        summary = {other: control_block.status_of(_record(other)) for other in range(rank, rank + RANKS_PER_HOST)}
        store.set(f"host {rank // RANKS_PER_HOST}/summary", json.dumps(summary))
    tracemalloc.start()
    block = block_of(rank=0, host="host 0")
    block.read()
    if None in block.seen:
        raise RuntimeError(f"some of {count} simulated ranks were not read")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    begin = time.perf_counter()
    block.read()
    seconds = time.perf_counter() - begin
    what = f"{count} ranks on hosts of {RANKS_PER_HOST} (simulated)"
    return [
        Row(f"memory of other ranks' records on a waiting rank, {what}", "KiB", 0.0, kept / 1024),
        Row(f"reading the records once, {what}", "ms", 0.0, seconds * 1e3),
    ]


def _record(rank: int) -> control_block.RankRecord:
    process: Any = {"host": "", "pid": rank, "started": 0}
    where = "in layers.3.mlp (train.py:88 in forward)"
    return control_block.RankRecord(
        beat=1, step=rank, position=3, awaited="", where=where, wait_s=0.5, process=process, has_failed=False
    )
