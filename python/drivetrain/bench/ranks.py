"""Starts fresh ranks with one thread each, for benchmarks that need a process group."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
JOIN_TIMEOUT_S = 600
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # by the device's type


def on_ranks(
    measure: Callable[[], Any],
    count: int = RANKS,
    backend: str = "gloo",
    timeout_s: float = JOIN_TIMEOUT_S,
    killed: int | None = None,
) -> Any:
    """Runs `measure` on `count` fresh ranks over `backend` and returns rank 0's result.

    `measure` kills rank `killed` with SIGKILL, if one is given.

    Over NCCL, ranks take GPUs in turn. With fewer GPUs than ranks, several share one if NCCL permits it.

    Raises:
        RuntimeError: A rank failed, or took longer than `timeout_s`.
    """
    # Ranks fork from a server that has imported torch once, which would take each of them seconds.
    context: Any = mp.get_context("forkserver")  # the typed base class lacks Process
    context.set_forkserver_preload(["torch._dynamo", "drivetrain"])
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        ranks = [context.Process(target=_rank, args=(r, count, backend, folder, measure, queue)) for r in range(count)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout_s)
        failed = [r for r, process in enumerate(ranks) if process.exitcode != (-signal.SIGKILL if r == killed else 0)]
        for process in ranks:
            process.kill()
        if failed:
            raise RuntimeError(f"the benchmark's ranks {failed} failed or took over {timeout_s:g} s; see above")
        return queue.get()


def _rank(rank: int, count: int, backend: str, folder: str, measure: Callable[[], Any], queue: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "nccl" in backend:
        num_gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % num_gpus)
        if count > num_gpus:  # presents each rank as its own host, because NCCL refuses two on one GPU
            os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_MULTI_RANK_GPU_ENABLE="1")
    store = dist.FileStore(str(Path(folder) / "store"), count)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    result = measure()
    if rank == 0:
        queue.put(result)
    dist.barrier()
    dist.destroy_process_group()
    # Skips interpreter shutdown, which sometimes ends in std::terminate, with torch's own class too (cause unknown).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def meet() -> None:
    """Synchronizes ranks to about a microsecond if each has a core: a barrier, then a common start time."""
    start = torch.tensor([time.monotonic() + 200e-6], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    while time.monotonic() < start.item():
        pass


def slowest(times: list[list[float]]) -> list[list[float]]:
    """Returns the seconds of calls by round on the rank that took longest. All ranks must call it."""
    found = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def device_of(device_type: str) -> torch.device:
    """Returns this rank's device of a type, "cpu" or "cuda"."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
