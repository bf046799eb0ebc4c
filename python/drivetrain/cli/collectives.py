"""Tests all-reduce over gloo and NCCL for `drivetrain doctor`: whether sums are right, and which host breaks them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from drivetrain.cli.finding import Finding, fail, passed
from drivetrain.cli.launch import first_line, within
from drivetrain.cli.speed import own_device

GLOO_CURE = "export GLOO_SOCKET_IFNAME=<the network interface that the machines share> (ip addr lists them)"
_NCCL_CURE = (
    "export NCCL_SOCKET_IFNAME=<the network interface that the machines share>, and read the lines of NCCL_DEBUG=INFO"
)
_CHECKS = {"gloo": ("all-reduce", GLOO_CURE), "NCCL": ("nccl-reduce", _NCCL_CURE)}  # name and cure, by backend
SIZES = (2**10, 2**16, 2**20)  # bytes
ROUND_S = 6.0  # limit of one all-reduce of the search for a host


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


def _group(store: Store, rank: int, world_size: int, limit_s: float, backend: str) -> Any:
    """Makes the process group of the ranks that meet in the store."""
    timeout = timedelta(seconds=limit_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    # Otherwise, torch's watchdog ends the process after the timeout, before it has reported anything.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def values_of(rank: int, count: int) -> Tensor:
    """Returns what a rank adds: small whole numbers, float32 [count], whose sum is exact in any order."""
    return (torch.arange(count) % 7 + rank).float()


def sum_up(store: Store, rank: int, world_size: int, sizes: Sequence[int], limit_s: float, backend: str) -> Outcome:
    """Sums tensors of each size between ranks over a group of their own, and checks the sums.

    Args:
        store: The store through which the ranks meet.
        rank: Rank of this process in the group.
        world_size: Ranks of the group.
        sizes: Bytes of the tensors.
        limit_s: Limit of each operation.
        backend: "gloo", on the CPU, or "NCCL", on GPUs.
    """
    wrong = 0

    def work() -> None:
        nonlocal wrong
        group = _group(store, rank, world_size, limit_s, backend)
        for size in sizes:
            count = size // 4
            tensor = values_of(rank, count).to(own_device() if backend == "NCCL" else "cpu")
            group.allreduce([tensor], dist.AllreduceOptions()).wait()
            expected = torch.arange(count) % 7 * world_size + world_size * (world_size - 1) // 2
            wrong += int((tensor.cpu() != expected).sum())
        if backend == "NCCL":  # it warns about groups that nothing has ended
            group.shutdown()

    try:
        within(2 * limit_s, work)
    except (RuntimeError, TimeoutError) as error:
        return Outcome(first_line(error), wrong)
    return Outcome("", wrong)


def judge(outcomes: Mapping[int, Outcome], world_size: int, backend: str) -> Finding:
    """Turns the outcomes of the all-reduce between all ranks into a finding, without naming a host.

    Args:
        outcomes: By rank, of those that have reported.
        world_size: Number of ranks.
        backend: The library that has reduced.
    """
    name, cure = _CHECKS[backend]
    silent = [rank for rank in range(world_size) if rank not in outcomes]
    failed = [rank for rank, outcome in outcomes.items() if outcome.error]
    wrong = [rank for rank, outcome in outcomes.items() if outcome.num_wrong]
    if failed:
        return fail(name, f"fails over {backend}: {outcomes[failed[0]].error}", cure)
    if silent:
        return fail(name, f"rank {silent[0]} has not reported its all-reduce", cure)
    if wrong:
        text = f"gives wrong sums over {backend}, on rank {wrong[0]} in {outcomes[wrong[0]].num_wrong} elements"
        return fail(name, text, "take the host out of service, and test its memory and its network card")
    return passed(name, f"passes over {backend} between {world_size} ranks, sums checked")


def host_that_breaks(hosts: Sequence[str], works: Callable[[list[int]], bool]) -> str:
    """Finds the host without which all-reduce works, by halves of the hosts.

    Args:
        hosts: The host of each rank.
        works: A function that sums between some ranks, and returns whether the sums were right.

    Returns:
        A clause that names the host; "" where there are two hosts, which cannot be distinguished.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) < 3:
        return ""

    def works_between(some: Sequence[str]) -> bool:
        return works([rank for rank, host in enumerate(hosts) if host in some])

    suspects = names
    while len(suspects) > 1:
        tested = suspects[: (len(suspects) + 1) // 2]
        # A host needs a partner: one that is not suspected.
        partners = [name for name in names if name not in suspects]
        if works_between([*tested, *(partners[:1] if len(tested) == 1 else [])]):
            suspects = [name for name in suspects if name not in tested]
        else:
            suspects = tested
    answer = "works" if works_between([name for name in names if name != suspects[0]]) else "fails also"
    return f"it {answer} without {suspects[0]}"
