"""Measures all-reduce between hosts over links of a limited rate: the process group, and drivetrain's transports.

PYTHONPATH=tests python benchmarks/hosts.py [--hosts 2] [--ranks 2] [--rates 1gbit 100mbit] [--rounds 7] [--json FILE]

Network namespaces of this machine stand for hosts. `tc` limits the rate of each host's link; it adds no delay. The
command needs root. For each rate and way it prints the median time and the bytes that a host sends for each byte of the
gradient. It also prints the share of the link's rate that they use.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.hosts import INTERFACE, Hosts, enter  # type: ignore[import-not-found]

if TYPE_CHECKING:
    import torch

# The dtype on the wire, what a way that uses it is called, and the largest relative error of a sum of positive values.
WIRES = ((None, "", 0.0), ("bfloat16", ", bf16 on the wire", 0.0), ("float8_e5m2", ", fp8 on the wire", 0.65))
UNITS = {"gbit": 1e9, "mbit": 1e6}
LIMIT_S = 600.0  # of all ranks' measurements at one rate
WARM_UP = 2


@dataclass
class Row:
    """The figures of one way at one rate."""

    way: str
    rate: str
    mib: float  # size of the gradient
    seconds: float  # median over rounds, of the slowest rank
    sent: float  # bytes that a host sends for each byte of the gradient, the largest of all hosts
    least: float  # what an all-reduce between hosts must send: 2 (H - 1) / H
    used: float  # share of the link's rate


def bits_per_second(rate: str) -> float:
    """Returns the number of a rate as `tc` writes it, such as 1gbit. Raises ValueError for any other text."""
    for unit, factor in UNITS.items():
        if rate.endswith(unit) and rate.removesuffix(unit).replace(".", "", 1).isdigit():
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"--rates has {rate!r}, expected a number with one of the units {', '.join(UNITS)}, as in 1gbit")


def sent_bytes() -> int:
    """Returns the bytes that this host has sent over its link."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise RuntimeError(f"this host has no interface {INTERFACE!r}")


def rank_main(
    rank: int, world: int, ranks: int, names: list[str], numel: int, rounds: int, folder: str, queue: Any
) -> None:
    """Measures every way on one rank; rank 0 puts {way: [[seconds, largest bytes sent by a host]]} into the queue."""
    enter(names[rank // ranks])
    import torch
    import torch.distributed as dist

    from drivetrain.ddp import transport

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    cpu = torch.device("cpu")
    plain = torch.zeros(numel)
    ways: dict[str, tuple[torch.Tensor, Callable[[], object], float]] = {
        "gloo": (plain, lambda: dist.all_reduce(plain), 0.0)
    }
    carried = []  # what float8 rounds off is kept as for a wrapper's gradients
    for dtype, on_wire, tolerance in WIRES:
        comm = transport.make_comm("shm", group, cpu, getattr(torch, dtype) if dtype else None)
        values = comm.allocate(4 * numel).view(torch.float32)
        carried.append(comm.carry_errors(values))
        ways[f"drivetrain, {comm.name}{on_wire}"] = (values, partial(comm.all_reduce, values, mean=False), tolerance)
    # Small integers, which bfloat16 and every order of a sum represent exactly.
    inputs = [torch.arange(numel).add_(other).remainder_(16).float() for other in range(world)]
    expected = torch.stack(inputs).sum(0)
    results: dict[str, list[list[float]]] = {way: [] for way in ways}
    for number in range(WARM_UP + rounds):
        for way, (values, reduce, tolerance) in ways.items():
            values.copy_(inputs[rank])
            dist.barrier()
            sent = sent_bytes()
            begin = time.perf_counter()
            reduce()
            seconds = time.perf_counter() - begin
            if not torch.allclose(values, expected, rtol=tolerance, atol=0):
                raise RuntimeError(f"rank {rank}: the sum of {numel} elements by {way} is wrong")
            dist.barrier()
            figures = torch.tensor([seconds, sent_bytes() - sent], dtype=torch.float64)
            dist.all_reduce(figures, dist.ReduceOp.MAX)
            if number >= WARM_UP:
                results[way].append(figures.tolist())
    if rank == 0:
        queue.put(results)
        queue.close()
        queue.join_thread()  # its thread may not have written the results yet
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def measure(rate: str, num_hosts: int, ranks: int, mib: float, rounds: int) -> list[Row]:
    """Returns a row per way. Raises RuntimeError if a rank fails or takes too long."""
    numel = int(mib * (1 << 20)) // 4
    context = multiprocessing.get_context("spawn")
    with Hosts(num_hosts) as hosts, tempfile.TemporaryDirectory() as folder:
        for name in hosts.names:
            shape = ["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, "burst", "128kb"]
            subprocess.run(["ip", "netns", "exec", name, *shape, "limit", "16mb"], check=True, timeout=30)
        queue = context.Queue()
        world = num_hosts * ranks
        processes = [
            context.Process(target=rank_main, args=(r, world, ranks, hosts.names, numel, rounds, folder, queue))
            for r in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT_S
        try:
            while queue.empty() and all(process.exitcode in (None, 0) for process in processes):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the ranks did not finish within {LIMIT_S:g} s at {rate}")
                time.sleep(0.1)
            if queue.empty():
                failed = [r for r, process in enumerate(processes) if process.exitcode not in (None, 0)]
                raise RuntimeError(f"ranks {failed} failed at {rate}; see above")
            results = queue.get(timeout=10)
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    rows = []
    for way, figures in results.items():
        seconds = statistics.median(figure[0] for figure in figures)
        sent = statistics.median(figure[1] for figure in figures)
        least = 2 * (num_hosts - 1) / num_hosts
        rows.append(Row(way, rate, mib, seconds, sent / (4 * numel), least, 8 * sent / seconds / bits_per_second(rate)))
    return rows


def main() -> int:
    """Prints a table, and writes JSON if a file is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default: 2)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks per host (default: 2)")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"], help="rates (default: 1gbit 100mbit)")
    parser.add_argument("--mib", type=float, default=25.0, help="MiB of fp32 gradients (default: 25)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each way (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args()
    for rate in args.rates:
        bits_per_second(rate)
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"All-reduce of {args.mib:g} MiB fp32, {args.hosts} hosts of {args.ranks} ranks")
    for column in ("way", "rate", "time", "sent per byte", "least", "share of the link"):
        table.add_column(column, justify="left" if column in ("way", "rate") else "right")
    rows: list[Row] = []
    for rate in args.rates:
        with console.status(f"measuring at {rate}"):
            rows += measure(rate, args.hosts, args.ranks, args.mib, args.rounds)
    for row in rows:
        figures = [f"{row.seconds * 1e3:.0f} ms", f"{row.sent:.3f}", f"{row.least:.3f}", f"{row.used:.0%}"]
        table.add_row(row.way, row.rate, *figures)
    console.print(table)
    if args.json:
        facts = {"hosts": args.hosts, "ranks_per_host": args.ranks, "rounds": args.rounds}
        args.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
