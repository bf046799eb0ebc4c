"""Tests all-reduce over gloo for `drivetrain doctor`: bandwidth by size with checked sums, and which host breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from drivetrain.cli.finding import Finding, fail
from drivetrain.cli.launch import first_line, within

GLOO_CURE = "export GLOO_SOCKET_IFNAME=<the network interface that the machines share> (ip addr lists them)"
SIZES = (2**10, 2**16, 2**20, 2**24)  # bytes
_TIMED_S = 0.1  # for the calls of one size; one call is made in any case
_MOST_CALLS = 20
_ENOUGH_S = 2.0  # after which no larger size is begun
_SLOW = 0.05  # of the slowest link's bandwidth
_ROUND_S = 6.0  # limit of one all-reduce of the search for a host
_COLUMNS = f"{'size (B)':>10}  {'time (us)':>10}  {'algbw (GB/s)':>12}  {'busbw (GB/s)':>12}  {'#wrong':>6}"

Wait = Callable[[list[str], float], bool]


@dataclass(frozen=True)
class Outcome:
    """What a rank has seen of an all-reduce in a group.

    Attributes:
        error: Why it failed; "" if it did not.
        num_wrong: Elements that were not the sum.
        seconds: Of a call, by bytes.
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


def reduce_by_size(store: Store, rank: int, world_size: int, sizes: Sequence[int], limit_s: float) -> Outcome:
    """Sums tensors of each size between ranks over a gloo group of their own, and checks the sums.

    Args:
        store: Where the ranks meet.
        rank: Of this process in the group.
        world_size: Ranks of the group.
        sizes: Bytes of the tensors.
        limit_s: Limit of each operation.
    """
    measured: dict[str, float] = {}
    wrong = 0

    def work() -> None:
        nonlocal wrong
        group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=limit_s))
        begin = perf_counter()
        for size in sizes:
            count = size // 4
            tensor = values_of(rank, count)
            _reduce(group, tensor)
            expected = torch.arange(count) % 7 * world_size + world_size * (world_size - 1) // 2
            wrong += int((tensor != expected).sum())
            once = _timed(group, tensor.zero_(), 1)
            # All ranks must make as many calls, and time the slowest one.
            slowest = torch.tensor([once, perf_counter() - begin])
            _reduce(group, slowest, dist.ReduceOp.MAX)
            calls = max(1, min(_MOST_CALLS, int(_TIMED_S / max(slowest[0].item(), 1e-9))))
            mean = torch.tensor([_timed(group, tensor, calls)])
            _reduce(group, mean)
            measured[str(size)] = mean.item() / world_size
            if slowest[1].item() > _ENOUGH_S:
                return

    try:
        within(2 * limit_s + _ENOUGH_S, work)
    except (RuntimeError, TimeoutError) as error:
        return Outcome(first_line(error), wrong, measured)
    return Outcome("", wrong, measured)


def _reduce(group: dist.ProcessGroupGloo, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    group.allreduce([tensor], options).wait()  # type: ignore[attr-defined]


def _timed(group: dist.ProcessGroupGloo, tensor: Tensor, calls: int) -> float:
    begin = perf_counter()
    for _ in range(calls):
        _reduce(group, tensor)
    return (perf_counter() - begin) / calls


def judge(outcomes: Mapping[int, Outcome], world_size: int, slowest_link: float | None) -> Finding:
    """Turns the outcomes of the all-reduce between all ranks into a finding, without naming a host.

    Args:
        outcomes: By rank, of those that have reported.
        world_size: Number of ranks.
        slowest_link: Bytes per second of the slowest link between hosts; None: all ranks are on one host.
    """
    silent = [rank for rank in range(world_size) if rank not in outcomes]
    failed = [rank for rank, outcome in outcomes.items() if outcome.error]
    wrong = [rank for rank, outcome in outcomes.items() if outcome.num_wrong]
    if failed:
        return fail("all-reduce", f"fails over gloo: {outcomes[failed[0]].error}", GLOO_CURE)
    if silent:
        return fail("all-reduce", f"rank {silent[0]} has not reported its all-reduce", GLOO_CURE)
    details = tuple(_table(outcomes[0].seconds, world_size))
    if wrong:
        text = f"gives wrong sums over gloo, on rank {wrong[0]} in {outcomes[wrong[0]].num_wrong} elements"
        cure = "take the host out of service, and test its memory and its network card"
        return Finding("all-reduce", "FAIL", text, cure, details)
    largest = max(outcomes[0].seconds, key=int)
    busbw = _busbw(int(largest), outcomes[0].seconds[largest], world_size)
    text = f"passes over gloo between {world_size} ranks, sums checked; {busbw / 1e9:.2f} GB/s busbw at {largest} bytes"
    if slowest_link is None:
        return Finding("all-reduce", "PASS", text, "", details)
    text += f", expected at most the slowest link's {slowest_link / 1e9:.2f} GB/s"
    # Small sums show latency, not bandwidth.
    if int(largest) >= 2**20 and busbw < _SLOW * slowest_link:
        cure = "compare GLOO_SOCKET_IFNAME with the interface of the links, and look for other traffic and busy cores"
        return Finding("all-reduce", "WARN", text, cure, details)
    return Finding("all-reduce", "PASS", text, "", details)


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
        if self.found or len(self._names) < 3:  # two hosts cannot be told apart
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


def lead_search(store: Store, rank: int, hosts: Sequence[str], wait: Wait) -> str:
    """Runs the search on rank 0, which publishes each round. Returns what it has found, as a clause; "": nothing."""
    search = Search(hosts)
    number = 0
    while (group := search.next_group()) is not None:
        store.set(f"bisect/{number}", json.dumps(group))
        _take_part(store, rank, number, group)
        keys = [f"bisect/{number}/{member}" for member in group]
        wait(keys, 3 * _ROUND_S)
        search.take(all(store.check([key]) and store.get(key) == b"yes" for key in keys))
        number += 1
    store.set(f"bisect/{number}", "[]")
    return search.found


def follow_search(store: Store, rank: int, wait: Wait) -> None:
    """Takes part in the search until rank 0 ends it."""
    number = 0
    while wait([f"bisect/{number}"], 6 * _ROUND_S):
        group = json.loads(store.get(f"bisect/{number}"))
        if not group:
            return
        _take_part(store, rank, number, group)
        number += 1


def _take_part(store: Store, rank: int, number: int, group: Sequence[int]) -> None:
    if rank in group:
        prefix = PrefixStore(f"bisect/{number}/group", store)
        outcome = reduce_by_size(prefix, group.index(rank), len(group), SIZES[:1], _ROUND_S)
        store.set(f"bisect/{number}/{rank}", "yes" if outcome.has_passed else "no")


def named(finding: Finding, found: str) -> Finding:
    """Returns the finding with the clause that the search has found."""
    return replace(finding, text=f"{finding.text}; {found}") if found else finding
