"""Tests the doctor's all-reduce: sums that are checked, and the search for a host."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from doctor_faults.launch import examine, ranks
from drivetrain.cli import collectives
from drivetrain.cli.collectives import Outcome, host_that_breaks

GOOD = Outcome()


def test_ranks_check_their_sums() -> None:
    store, outcomes = HashStore(), {}

    def work(rank: int) -> None:
        outcomes[rank] = collectives.sum_up(store, rank, 2, (4, 1024, 2**16), 20, "gloo")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes[0].has_passed
    assert outcomes[1].has_passed


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome("Connection closed by peer"), "fails over gloo: Connection closed by peer"),
        (Outcome("", 3), "gives wrong sums over gloo, on rank 1 in 3 elements"),
        (None, "rank 1 has not reported its all-reduce"),
    ],
)
def test_failures_are_named(outcome: Outcome | None, text: str) -> None:
    finding = collectives.judge({0: GOOD} | ({1: outcome} if outcome else {}), 2, "gloo")
    assert finding.status == "FAIL"
    assert text in finding.text
    assert finding.cure


def test_nccl_says_why_it_does_not_run_here() -> None:
    report = examine(ranks(2))
    assert report.status_of("nccl-reduce") == "--"
    assert report.text_of("nccl-reduce") == "NCCL cannot run here: ranks 0, 1 of 2 without a GPU"


# Each rank has a made-up GPU, and a group that sums on the CPU stands for NCCL's.
MADE_UP_GPUS = """
import torch.distributed as dist
from datetime import timedelta
from drivetrain.cli import collectives, speed
speed.own_gpu = lambda: f"cuda:{rank}"
class Options:
    pass
def made(store, rank, world_size, options):
    return dist.ProcessGroupGloo(store, rank, world_size, options._timeout)
made.Options = Options
dist.ProcessGroupNCCL = made
"""


def test_ranks_with_gpus_sum_over_nccl() -> None:
    report = examine(ranks(2, change=MADE_UP_GPUS))
    assert report.status_of("nccl-reduce") == "PASS", report.alarms()
    assert "passes over NCCL between 2 ranks, sums checked" in report.text_of("nccl-reduce")
    one_gpu = MADE_UP_GPUS.replace("cuda:{rank}", "cuda:0")
    report = examine(ranks(2, change=one_gpu))
    assert report.text_of("nccl-reduce") == "NCCL cannot run here: several ranks have one GPU"


@given(num_hosts=st.integers(3, 40), per_host=st.integers(1, 3), data=st.data())
def test_the_search_names_the_bad_host(num_hosts: int, per_host: int, data: Any) -> None:
    hosts = [f"host-{rank // per_host}" for rank in range(num_hosts * per_host)]
    bad, rounds = f"host-{data.draw(st.integers(0, num_hosts - 1))}", []

    def works(group: list[int]) -> bool:
        between = {hosts[rank] for rank in group}
        assert len(between) >= 2
        rounds.append(between)
        return bad not in between

    assert host_that_breaks(hosts, works) == f"it works without {bad}"
    assert len(rounds) <= (num_hosts - 1).bit_length() + 1


def test_a_search_of_a_broken_pair_names_one_that_can_go() -> None:
    found = host_that_breaks([f"host-{rank}" for rank in range(8)], lambda group: not {2, 7} <= set(group))
    assert found in ("it works without host-2", "it works without host-7")


def test_a_search_says_when_one_host_is_not_all() -> None:
    assert host_that_breaks(["a", "b", "c", "d"], lambda _: False) == "it fails also without a"
    assert host_that_breaks(["a", "b"], lambda _: False) == ""


SPOILED = """
import socket
socket.gethostname = lambda: f"host-{rank}"
from drivetrain.cli import collectives
plain = collectives.values_of
collectives.values_of = lambda rank_, count: plain(rank_, count) + (rank == 2)
"""


def test_ranks_find_the_host_that_spoils_sums() -> None:
    report = examine(ranks(4, change=SPOILED, arguments=["--timeout", "60"]))
    assert report.named("all-reduce", "it works without host-2", "out of service"), report.alarms()
    assert report.named("all-reduce", "gives wrong sums over gloo", "test its memory")
