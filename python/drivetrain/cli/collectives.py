"""Tests all-reduce over gloo and NCCL for `drivetrain doctor`: bandwidth by size, sums, and which host breaks them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from time import perf_counter
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from drivetrain.cli.devices import own_gpu
from drivetrain.cli.finding import Finding, fail
from drivetrain.cli.launch import first_line, within

GLOO_CURE = "export GLOO_SOCKET_IFNAME=<the network interface that the machines share> (ip addr lists them)"
NCCL_CURE = (
    "export NCCL_SOCKET_IFNAME=<the network interface that the machines share>, and read the lines of NCCL_DEBUG=INFO"
)
SIZES = (2**10, 2**16, 2**20, 2**24)  # bytes
GPU_SIZES = (*SIZES, 2**28)
_TIMED_S = 0.1  # for the calls of one size; one call is made in any case
_MOST_CALLS = 20
_ENOUGH_S = 2.0  # after which no larger size is begun
_SLOW, _SLOW_GPU = 0.05, 0.5  # of the slowest link's bandwidth by TCP, over gloo and over NCCL
_ROUND_S = 6.0  # limit of one all-reduce of the search for a host
_COLUMNS = f"{'size (B)':>10}  {'time (us)':>10}  {'algbw (GB/s)':>12}  {'busbw (GB/s)':>12}  {'#wrong':>6}"

Wait = Callable[[list[str], float], bool]
_CPU = torch.device("cpu")


class Group(Protocol):
    """A process group that sums, as ProcessGroupGloo and ProcessGroupNCCL do."""

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        """Starts an all-reduce."""

    def shutdown(self) -> None:
        """Ends the group, of which no operation runs."""


@dataclass(frozen=True)
class Backend:
    """The library that reduces: gloo on the CPU, or NCCL on GPUs.

    Attributes:
        check: The name of its finding.
        name: Its name in errors.
        sizes: Bytes of the tensors.
        cure: The remedy for sums that fail.
        slow_cure: For sums that are slow compared with the links.
    """

    check: str
    name: str
    sizes: tuple[int, ...]
    cure: str
    slow_cure: str

    def group(self, store: Store, rank: int, world_size: int, limit_s: float) -> Group:
        """Makes the process group of the ranks that meet in the store."""
        timeout = timedelta(seconds=limit_s)
        if self is GLOO:
            return cast(Group, dist.ProcessGroupGloo(store, rank, world_size, timeout))
        # Otherwise, torch's watchdog ends the process after the timeout, before it has reported anything.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cast(Group, dist.ProcessGroupNCCL(store, rank, world_size, options))

    def device(self) -> torch.device:
        """Returns the device of this rank's tensors."""
        return _CPU if self is GLOO else own_gpu()


GLOO = Backend(
    "all-reduce",
    "gloo",
    SIZES,
    GLOO_CURE,
    "compare GLOO_SOCKET_IFNAME with the interface of the links, and look for other traffic and busy cores",
)
NCCL = Backend(
    "nccl-reduce",
    "NCCL",
    GPU_SIZES,
    NCCL_CURE,
    "compare NCCL_SOCKET_IFNAME and NCCL_IB_HCA with the fastest cards of `topology`, and read NCCL_DEBUG=INFO",
)


@dataclass(frozen=True)
class Outcome:
    """The observations of a rank in an all-reduce of a group.

    Attributes:
        error: The reason why it failed; "" if it did not.
        num_wrong: Elements that were not the sum.
        seconds: Seconds of a call, by bytes.
    """

    error: str = ""
    num_wrong: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        return not self.error and self.num_wrong == 0


def values_of(rank: int, count: int) -> Tensor:
    """Returns what a rank adds: small whole numbers, float32 [count], whose sum is exact in any order."""
    return (torch.arange(count) % 7 + rank).float()


def reduce_by_size(
    store: Store, rank: int, world_size: int, sizes: Sequence[int], limit_s: float, backend: Backend = GLOO
) -> Outcome:
    """Sums tensors of each size between ranks over a group of their own, and checks the sums.

    Args:
        store: The store through which the ranks meet.
        rank: Rank of this process in the group.
        world_size: Ranks of the group.
        sizes: Bytes of the tensors.
        limit_s: Limit of each operation.
        backend: The library that reduces.
    """
    measured: dict[str, float] = {}
    wrong = 0

    def work() -> None:
        nonlocal wrong
        device = backend.device()
        group = backend.group(store, rank, world_size, limit_s)
        begin = perf_counter()
        for size in sizes:
            count = size // 4
            tensor = values_of(rank, count).to(device)
            _reduce(group, tensor)
            expected = torch.arange(count) % 7 * world_size + world_size * (world_size - 1) // 2
            wrong += int((tensor.cpu() != expected).sum())
            once = _timed(group, tensor.zero_(), 1)
            # All ranks must make as many calls, and time the slowest one.
            slowest = torch.tensor([once, perf_counter() - begin], device=device)
            _reduce(group, slowest, dist.ReduceOp.MAX)
            calls = max(1, min(_MOST_CALLS, int(_TIMED_S / max(slowest[0].item(), 1e-9))))
            mean = torch.tensor([_timed(group, tensor, calls)], device=device)
            _reduce(group, mean)
            measured[str(size)] = mean.item() / world_size
            if slowest[1].item() > _ENOUGH_S:
                break
        if backend is not GLOO:  # NCCL warns about groups that nothing has ended
            group.shutdown()

    try:
        within(2 * limit_s + _ENOUGH_S, work)
    except (RuntimeError, TimeoutError) as error:
        return Outcome(first_line(error), wrong, measured)
    return Outcome("", wrong, measured)


def _reduce(group: Group, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    group.allreduce([tensor], options).wait()


def _timed(group: Group, tensor: Tensor, calls: int) -> float:
    _finish(tensor)
    begin = perf_counter()
    for _ in range(calls):
        _reduce(group, tensor)
    _finish(tensor)
    return (perf_counter() - begin) / calls


def _finish(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def judge(
    outcomes: Mapping[int, Outcome], world_size: int, slowest_link: float | None, backend: Backend = GLOO
) -> Finding:
    """Turns the outcomes of the all-reduce between all ranks into a finding, without naming a host.

    Args:
        outcomes: By rank, of those that have reported.
        world_size: Number of ranks.
        slowest_link: Bytes per second of the slowest link between hosts; None: no link bounds the sums.
        backend: The library that has reduced.
    """
    silent = [rank for rank in range(world_size) if rank not in outcomes]
    failed = [rank for rank, outcome in outcomes.items() if outcome.error]
    wrong = [rank for rank, outcome in outcomes.items() if outcome.num_wrong]
    if failed:
        return fail(backend.check, f"fails over {backend.name}: {outcomes[failed[0]].error}", backend.cure)
    if silent:
        return fail(backend.check, f"rank {silent[0]} has not reported its all-reduce", backend.cure)
    details = tuple(_table(outcomes[0].seconds, world_size))
    if wrong:
        text = f"gives wrong sums over {backend.name}, on rank {wrong[0]} in {outcomes[wrong[0]].num_wrong} elements"
        cure = "take the host out of service, and test its memory and its network card"
        return Finding(backend.check, "FAIL", text, cure, details)
    largest = max(outcomes[0].seconds, key=int)
    busbw = _busbw(int(largest), outcomes[0].seconds[largest], world_size)
    text = f"passes over {backend.name} between {world_size} ranks, sums checked; "
    text += f"{busbw / 1e9:.2f} GB/s busbw at {largest} bytes"
    if slowest_link is None:
        return Finding(backend.check, "PASS", text, "", details)
    # NCCL may use cards that are faster than the TCP link that was measured, and several at once.
    bound = "at most" if backend is GLOO else "at least about"
    text += f", expected {bound} the slowest link's {slowest_link / 1e9:.2f} GB/s"
    least = (_SLOW if backend is GLOO else _SLOW_GPU) * slowest_link
    if int(largest) >= 2**20 and busbw < least:  # small sums show latency, not bandwidth
        return Finding(backend.check, "WARN", text, backend.slow_cure, details)
    return Finding(backend.check, "PASS", text, "", details)


def _busbw(size: int, seconds: float, world_size: int) -> float:
    """Bytes per second of each link, as nccl-tests defines it."""
    return size / seconds * 2 * (world_size - 1) / world_size


def _table(seconds: Mapping[str, float], world_size: int) -> Iterator[str]:
    yield _COLUMNS
    for size, taken in seconds.items():
        algbw = int(size) / taken / 1e9
        busbw = _busbw(int(size), taken, world_size) / 1e9
        yield f"{size:>10}  {1e6 * taken:10.1f}  {algbw:12.2f}  {busbw:12.2f}  {0:6d}"


# ---- Which host breaks it.


class Search:
    """Finds the host without which all-reduce works, by halves of the hosts.

    Args:
        hosts: The host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._names = list(dict.fromkeys(hosts))
        self._suspects = self._names
        self._tested: list[str] = []
        self.found = ""  # a clause, once the search has named a host

    def next_group(self) -> list[int] | None:
        """Returns the ranks that sum next; None once the search has ended."""
        if self.found or len(self._names) < 3:  # two hosts cannot be distinguished
            return None
        if len(self._suspects) == 1:
            self._tested = []
            return self._ranks_of([name for name in self._names if name not in self._suspects])
        self._tested = self._suspects[: (len(self._suspects) + 1) // 2]
        # A host needs a partner: one that is not suspected.
        partners = [name for name in self._names if name not in self._suspects]
        return self._ranks_of([*self._tested, *(partners[:1] if len(self._tested) == 1 else [])])

    def take(self, has_passed: bool) -> None:
        """Takes whether that group's sums were right."""
        if len(self._suspects) == 1:
            works = "works" if has_passed else "fails also"
            self.found = f"it {works} without {self._suspects[0]}"
        elif has_passed:
            self._suspects = [name for name in self._suspects if name not in self._tested]
        else:
            self._suspects = self._tested

    def _ranks_of(self, names: Sequence[str]) -> list[int]:
        return [rank for rank, host in enumerate(self._hosts) if host in names]


def lead_search(store: Store, rank: int, hosts: Sequence[str], wait: Wait, backend: Backend = GLOO) -> str:
    """Runs the search on rank 0, which publishes each round. Returns what it has found, as a clause; "": nothing."""
    search = Search(hosts)
    number = 0
    while (group := search.next_group()) is not None:
        store.set(f"bisect/{number}", json.dumps(group))
        _take_part(store, rank, number, group, backend)
        keys = [f"bisect/{number}/{member}" for member in group]
        wait(keys, 3 * _ROUND_S)
        search.take(all(store.check([key]) and store.get(key) == b"yes" for key in keys))
        number += 1
    store.set(f"bisect/{number}", "[]")
    return search.found


def follow_search(store: Store, rank: int, wait: Wait, backend: Backend = GLOO) -> None:
    """Takes part in the search until rank 0 ends it."""
    number = 0
    while wait([f"bisect/{number}"], 6 * _ROUND_S):
        group = json.loads(store.get(f"bisect/{number}"))
        if not group:
            return
        _take_part(store, rank, number, group, backend)
        number += 1


def _take_part(store: Store, rank: int, number: int, group: Sequence[int], backend: Backend) -> None:
    if rank in group:
        prefix = PrefixStore(f"bisect/{number}/group", store)
        outcome = reduce_by_size(prefix, group.index(rank), len(group), SIZES[:1], _ROUND_S, backend)
        store.set(f"bisect/{number}/{rank}", "yes" if outcome.has_passed else "no")


def named(finding: Finding, found: str) -> Finding:
    """Returns the finding with the clause that the search has found."""
    return replace(finding, text=f"{finding.text}; {found}") if found else finding
