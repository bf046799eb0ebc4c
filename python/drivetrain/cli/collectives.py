"""Tests all-reduce over gloo and NCCL for `drivetrain doctor`: whether sums are right, and which host breaks them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from drivetrain.cli.finding import Finding, fail, passed
from drivetrain.cli.launch import first_line, within
from drivetrain.cli.speed import own_device

GLOO_CURE = "export GLOO_SOCKET_IFNAME=<the network interface that the machines share> (ip addr lists them)"
NCCL_CURE = (
    "export NCCL_SOCKET_IFNAME=<the network interface that the machines share>, and read the lines of NCCL_DEBUG=INFO"
)
SIZES = (2**10, 2**16, 2**20)  # bytes
_ROUND_S = 6.0  # limit of one all-reduce of the search for a host

Wait = Callable[[list[str], float], bool]


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
        cure: The remedy for sums that fail.
    """

    check: str
    name: str
    cure: str

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


GLOO = Backend("all-reduce", "gloo", GLOO_CURE)
NCCL = Backend("nccl-reduce", "NCCL", NCCL_CURE)


@dataclass(frozen=True)
class Outcome:
    """The observations of a rank in an all-reduce of a group.

    Attributes:
        error: The reason why it failed; "" if it did not.
        num_wrong: Elements that were not the sum.
    """

    error: str = ""
    num_wrong: int = 0

    @property
    def has_passed(self) -> bool:
        return not self.error and self.num_wrong == 0


def values_of(rank: int, count: int) -> Tensor:
    """Returns what a rank adds: small whole numbers, float32 [count], whose sum is exact in any order."""
    return (torch.arange(count) % 7 + rank).float()


def sum_up(store: Store, rank: int, world_size: int, sizes: Sequence[int], limit_s: float, backend: Backend) -> Outcome:
    """Sums tensors of each size between ranks over a group of their own, and checks the sums.

    Args:
        store: The store through which the ranks meet.
        rank: Rank of this process in the group.
        world_size: Ranks of the group.
        sizes: Bytes of the tensors.
        limit_s: Limit of each operation.
        backend: The library that reduces.
    """
    wrong = 0

    def work() -> None:
        nonlocal wrong
        group = backend.group(store, rank, world_size, limit_s)
        for size in sizes:
            count = size // 4
            tensor = values_of(rank, count).to(own_device() if backend is NCCL else "cpu")
            group.allreduce([tensor], dist.AllreduceOptions()).wait()
            expected = torch.arange(count) % 7 * world_size + world_size * (world_size - 1) // 2
            wrong += int((tensor.cpu() != expected).sum())
        if backend is NCCL:  # it warns about groups that nothing has ended
            group.shutdown()

    try:
        within(2 * limit_s, work)
    except (RuntimeError, TimeoutError) as error:
        return Outcome(first_line(error), wrong)
    return Outcome("", wrong)


def judge(outcomes: Mapping[int, Outcome], world_size: int, backend: Backend) -> Finding:
    """Turns the outcomes of the all-reduce between all ranks into a finding, without naming a host.

    Args:
        outcomes: By rank, of those that have reported.
        world_size: Number of ranks.
        backend: The library that has reduced.
    """
    silent = [rank for rank in range(world_size) if rank not in outcomes]
    failed = [rank for rank, outcome in outcomes.items() if outcome.error]
    wrong = [rank for rank, outcome in outcomes.items() if outcome.num_wrong]
    if failed:
        return fail(backend.check, f"fails over {backend.name}: {outcomes[failed[0]].error}", backend.cure)
    if silent:
        return fail(backend.check, f"rank {silent[0]} has not reported its all-reduce", backend.cure)
    if wrong:
        text = f"gives wrong sums over {backend.name}, on rank {wrong[0]} in {outcomes[wrong[0]].num_wrong} elements"
        return fail(backend.check, text, "take the host out of service, and test its memory and its network card")
    return passed(backend.check, f"passes over {backend.name} between {world_size} ranks, sums checked")


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


def lead_search(store: Store, rank: int, hosts: Sequence[str], wait: Wait, backend: Backend) -> str:
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


def follow_search(store: Store, rank: int, wait: Wait, backend: Backend) -> None:
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
        outcome = sum_up(prefix, group.index(rank), len(group), SIZES[:1], _ROUND_S, backend)
        store.set(f"bisect/{number}/{rank}", "yes" if outcome.has_passed else "no")


def named(finding: Finding, found: str) -> Finding:
    """Returns the finding with the clause that the search has found."""
    return replace(finding, text=f"{finding.text}; {found}") if found else finding
