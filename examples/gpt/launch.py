"""Starts an example: its engine, its process group, its ranks, and checked numbers on its command line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ENGINES = ("torch", "drivetrain")


def engine_modules(name: str) -> tuple[type[nn.parallel.DistributedDataParallel], ModuleType]:
    """Return the DistributedDataParallel and the module of optimizers of an engine, or exit with the cure."""
    if name == "torch":
        return nn.parallel.DistributedDataParallel, torch.optim
    try:
        import drivetrain
    except ImportError as error:
        sys.exit(f"--engine {name}: {error}. Install it with `pip install .`, or pass --engine torch.")
    return drivetrain.DistributedDataParallel, drivetrain.optim


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return an argparse type that accepts only numbers above zero."""

    def parse(text: str) -> float:
        if (value := kind(text)) <= 0:
            raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
        return value

    parse.__name__ = kind.__name__  # argparse quotes the name: "invalid int value"
    return parse


def start_process_group(device_choice: str) -> torch.device:
    """Join torchrun's process group, or create a group of one process; return this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device_choice == "cuda" or (device_choice == "auto" and torch.cuda.is_available()):
        if local_ranks > torch.cuda.device_count():
            sys.exit(f"{local_ranks} ranks need a GPU each and {torch.cuda.device_count()} are here: try --device cpu")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device_id)
    else:
        dist.init_process_group(backend, init_method="tcp://localhost:0", rank=0, world_size=1, device_id=device_id)
    return device


def end_process_group() -> None:
    """Leave the process group once no thread of it holds tensors.

    DDP keeps gloo's threads alive. A thread that frees a collective's tensors while Python shuts down aborts the
    process ("terminate called without an active exception"). The pause lets the threads free them.
    """
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()


def run_ranks(script: Path, engine: str, arguments: Sequence[str], *, ranks: int, timeout: float) -> dict[str, Any]:
    """Run an example under torchrun and return the metrics that it writes by --json, or exit with its output."""
    name = f"{script.name} --engine {engine}"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "metrics.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(script), f"--engine={engine}", f"--json={result}", *arguments]
        # Examples set their threads themselves. The variable keeps torchrun from warning about them.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as late:
            sys.exit(f"{name} did not end within {timeout:.0f} s; its output:\n{late.output}")
        if done.returncode:
            sys.exit(f"{name} failed with exit code {done.returncode}; its output:\n{done.stdout}")
        metrics: dict[str, Any] = json.loads(result.read_text())
        return metrics
