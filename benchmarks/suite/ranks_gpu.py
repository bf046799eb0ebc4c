"""Measures all-reduce and DistributedDataParallel with one rank per GPU, against torch."""

import functools
import statistics
from collections.abc import Iterator

import torch
from torch import nn

from drivetrain.bench.comm import measure, rows_of
from drivetrain.bench.ddp import _GPT, Products, times_of
from drivetrain.bench.measure import Row, ratio_row
from drivetrain.bench.ranks import BACKENDS, device_of, on_ranks

SIZES = (("1 KiB", 256), ("1 MiB", 256 << 10), ("25 MiB", 25 << 18), ("256 MiB", 64 << 20))


def run_comm(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Yields rows per size with one rank per GPU. On a single GPU, two ranks share it if NCCL permits. They communicate
    through sockets then, so the rows show the cost of a call but not a bandwidth."""
    num_gpus = torch.cuda.device_count()
    ranks = max(num_gpus, 2)
    where = f"between {ranks} GPUs" if num_gpus > 1 else "between 2 ranks of one GPU, through sockets"
    for what, numel in SIZES[:1] if is_dry else SIZES:
        of_size = functools.partial(measure, device.type, numel, rounds)
        times = on_ranks(of_size, count=ranks, backend=BACKENDS[device.type])
        yield from rows_of(f"{what} {where},", numel, None, times, ranks)


def run_ddp(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Yields rows with one rank per GPU. On a single GPU, they show the cost of the wrappers without communication."""
    ranks = max(torch.cuda.device_count(), 1)
    where = "one GPU" if ranks == 1 else f"{ranks} GPUs"
    of_cases = functools.partial(_ddp_times, device.type, rounds, is_dry)
    for what, (plain, theirs, ours) in on_ranks(of_cases, count=ranks, backend=BACKENDS[device.type]).items():
        yield ratio_row(f"{what}, {where}", theirs, ours)
        added = [[b - a for a, b in zip(plain, wrapped, strict=True)] for wrapped in (theirs, ours)]
        yield Row("  beyond no DDP", "ms", *(1e3 * statistics.median(seconds) for seconds in added))


def _ddp_times(device_type: str, rounds: int, is_dry: bool) -> dict[str, list[list[float]]]:
    """Returns per case the seconds of forward and backward without a wrapper, with torch's and with ours, per round."""
    device = device_of(device_type)
    width, layers, time_steps = (48, 1, 16) if is_dry else (768, 12, 512)
    tokens = torch.randint(0, 256, (8, time_steps + 1), device=device)
    small = Products([(64,)] * (10 if is_dry else 1000))
    cases: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "forward and backward, GPT of 85 M in fp32": (_GPT(width, layers, time_steps), tokens),
        "forward and backward, 1,000 parameters of 64": (small, torch.randn(64, device=device)),
    }
    return {what: times_of(module.to(device), x, rounds) for what, (module, x) in cases.items()}
