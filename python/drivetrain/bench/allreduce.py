"""Measures all-reduce by size over every transport, and prints the columns of nccl-tests' all_reduce_perf."""

import argparse
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ddp import transport
from ..memory import bytes_of
from .ranks import BACKENDS, device_of, on_ranks

GROUP = "group"  # the process group itself: gloo on the CPU, NCCL on GPUs
CHOICES = (GROUP, *(choice for choice in transport.CHOICES if choice != "auto"))
_WARM_UPS = 3
_LEAST_CALLS, _MOST_CALLS = 3, 50
_TIMED_S = 0.2  # for the calls of one size, unless the least number takes longer
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

HEADER = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)"""


@dataclass(frozen=True)
class SideResult:
    """One of the two sides of a line.

    Attributes:
        us: Microseconds of a call, the mean of all calls and ranks.
        algbw: Bytes of the buffer over the time, in GB/s.
        busbw: algbw * 2 (n - 1) / n: bytes per link, which the number of ranks does not change.
        num_wrong: Elements of all ranks that are not the sum.
    """

    us: float
    algbw: float
    busbw: float
    num_wrong: int


@dataclass(frozen=True)
class Line:
    """A size: with the copy from another tensor (out of place), and in place."""

    num_bytes: int
    out_of_place: SideResult
    in_place: SideResult

    def __str__(self) -> str:
        sides = "".join(
            f"  {side.us:7.2f}  {side.algbw:6.2f}  {side.busbw:6.2f}  {side.num_wrong:6d}"
            for side in (self.out_of_place, self.in_place)
        )
        return f"{self.num_bytes:12d}  {self.num_bytes // 4:12d}  {'float':>8}  {'sum':>6}  {-1:6d}{sides}"


@dataclass(frozen=True)
class Result:
    """The lines that one transport gave, or the reason why it cannot be used here."""

    transport: str
    lines: list[Line]
    why_not: str = ""


def sizes(least: str, most: str, factor: int) -> list[int]:
    """Returns bytes from `least` to `most`, each `factor` times the one before.

    Raises:
        ValueError: A size is no size or below 4 bytes, the sizes are in the wrong order, or the factor is below 2.
    """
    first, last = bytes_of(least, sys.maxsize, "--minbytes"), bytes_of(most, sys.maxsize, "--maxbytes")
    if first < 4:
        raise ValueError(f"--minbytes is {least}, expected 4 bytes or more, which hold one float32")
    if last < first:
        raise ValueError(f"--maxbytes is {most}, expected --minbytes ({least}) or more")
    if factor < 2:
        raise ValueError(f"--stepfactor is {factor}, expected 2 or more")
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return [size // 4 * 4 for size in found]


def run(args: argparse.Namespace) -> int:
    """Prints a table per transport. Returns 0, 1 if a sum is wrong or no transport can be used, 2 for wrong arguments.

    Under torchrun the launcher's ranks take part, and rank 0 prints. Otherwise, ranks start on this machine.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        in_bytes = sizes(args.minbytes, args.maxbytes, args.stepfactor)
        if args.transport not in (None, *CHOICES):
            raise ValueError(f"--transport is {args.transport!r}, expected one of: {', '.join(map(repr, CHOICES))}")
        if args.ranks < 2:
            raise ValueError(f"--ranks is {args.ranks}, expected 2 or more")
    except ValueError as error:
        print(f"bench allreduce: {error}", file=sys.stderr)
        return 2
    measure = functools.partial(measured, in_bytes, device_type, args.transport)
    if all(os.environ.get(name) for name in _LAUNCHER):
        results, shape = _under_launcher(measure, device_type)
    else:
        results, shape = on_ranks(measure, count=args.ranks, backend=BACKENDS[device_type])
    if results is None:  # another rank prints
        return 0
    for result in results:
        _print(result, shape)
    if args.json is not None:
        tables = {result.transport: asdict(result) for result in results}
        args.json.write_text(json.dumps({"torch": torch.__version__, "ranks": shape, "allreduce": tables}, indent=2))
    are_right = all(_num_wrong(result) == 0 for result in results)
    return 0 if are_right and any(result.lines for result in results) else 1


def _under_launcher(measure: Callable[[], Any], device_type: str) -> tuple[list[Result] | None, str]:
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(BACKENDS[device_type])
    try:
        results, shape = measure()
        return (results if dist.get_rank() == 0 else None), shape
    finally:
        dist.destroy_process_group()


def measured(sizes_: Sequence[int], device_type: str, only: str | None) -> tuple[list[Result], str]:
    """Measures every transport between the ranks of the process group.

    Args:
        sizes_: Bytes of the buffers.
        device_type: "cpu" or "cuda".
        only: The one transport to measure; None measures all.

    Returns:
        The results, and how many ranks on how many hosts took part.
    """
    device = device_of(device_type)
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    shape = f"{len(names)} ranks on {len(set(names))} host{'s' if len(set(names)) > 1 else ''}"
    return [_result(choice, sizes_, device) for choice in CHOICES if only in (None, choice)], shape


def _result(choice: str, sizes_: Sequence[int], device: torch.device) -> Result:
    if choice == GROUP:
        return Result(choice, [_line(size, dist.all_reduce, None, device) for size in sizes_])
    assert dist.group.WORLD is not None
    if choice == "shm" and device.type != "cpu":
        return Result(choice, [], "shared memory carries parameters of the CPU")
    try:
        comm = transport.make_comm(choice, dist.group.WORLD, device, None)
    except (RuntimeError, NotImplementedError) as error:  # every rank raises it
        return Result(choice, [], str(error).partition("\n")[0])
    if choice == "shm" and comm.name != "shm":
        return Result(choice, [], comm.why_not or "the ranks cannot share memory")

    def allocate(num_bytes: int) -> Tensor:
        return comm.allocate(num_bytes, str(device)).view(torch.float32)

    return Result(choice, [_line(size, lambda t: comm.all_reduce(t, mean=False), allocate, device) for size in sizes_])


def _line(
    size: int, reduce: Callable[[Tensor], Any], allocate: Callable[[int], Tensor] | None, device: torch.device
) -> Line:
    count = size // 4
    buffer = allocate(size) if allocate is not None else torch.empty(count, device=device)
    # Small whole numbers, so that the sum is exact in any order.
    source = (torch.arange(count, device=device) % 7 + dist.get_rank()).float()
    ranks = dist.get_world_size()
    expected = (torch.arange(count, device=device) % 7 * ranks + ranks * (ranks - 1) // 2).float()
    sides = []
    for is_in_place in (False, True):

        def call(copies: bool = not is_in_place) -> None:
            if copies:
                buffer.copy_(source)
            reduce(buffer)

        buffer.copy_(source)
        call()
        wrong = (buffer != expected).sum().to(torch.int64)
        dist.all_reduce(wrong)
        buffer.zero_()
        seconds = _seconds(call, device)
        algbw = size / seconds / 1e9
        sides.append(SideResult(1e6 * seconds, algbw, algbw * 2 * (ranks - 1) / ranks, int(wrong.item())))
    return Line(size, sides[0], sides[1])


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """Returns the mean seconds of a call, over as many calls on every rank, and over the ranks."""
    for _ in range(_WARM_UPS - 1):
        call()
    once = _over_ranks(_timed(call, 1, device), dist.ReduceOp.MAX, device)
    calls = max(_LEAST_CALLS, min(_MOST_CALLS, int(_TIMED_S / max(once, 1e-9))))
    return _over_ranks(_timed(call, calls, device), dist.ReduceOp.SUM, device) / dist.get_world_size() / calls


def _over_ranks(value: float, op: Any, device: torch.device) -> float:
    of_all = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(of_all, op)
    return of_all.item()


def _timed(call: Callable[[], None], calls: int, device: torch.device) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _num_wrong(result: Result) -> int:
    return sum(line.out_of_place.num_wrong + line.in_place.num_wrong for line in result.lines)


def _print(result: Result, shape: str) -> None:
    print(f"# drivetrain bench allreduce: {shape}, transport {result.transport}")
    if result.why_not:
        print(f"# not measured: {result.why_not}\n")
        return
    print(f"#\n{HEADER}")
    for line in result.lines:
        print(line)
    busbw = [side.busbw for line in result.lines for side in (line.out_of_place, line.in_place)]
    wrong = _num_wrong(result)
    print(f"# Out of bounds values : {wrong} {'OK' if wrong == 0 else 'FAILED'}")
    print(f"# Avg bus bandwidth    : {sum(busbw) / len(busbw):.5g}\n", flush=True)
