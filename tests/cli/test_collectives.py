"""Tests the doctor's all-reduce: bandwidths, sums that are checked, the search for a host, and rates of GPUs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from doctor_faults.launch import examine, ranks
from drivetrain.cli import collectives, devices
from drivetrain.cli.collectives import Outcome, Search

GOOD = Outcome("", 0, {"1024": 1e-4, "1048576": 1e-3})


def test_ranks_measure_and_check_their_sums() -> None:
    store, outcomes = HashStore(), {}

    def work(rank: int) -> None:
        outcomes[rank] = collectives.reduce_by_size(store, rank, 2, (4, 1024, 2**16), 20)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes[0].has_passed
    assert outcomes[1].has_passed
    assert list(outcomes[0].seconds) == ["4", "1024", "65536"]
    assert outcomes[0].seconds == outcomes[1].seconds  # the mean of both


def test_bandwidths_stand_beside_the_expectation() -> None:
    finding = collectives.judge({0: GOOD, 1: GOOD, 2: GOOD, 3: GOOD}, 4, slowest_link=2e9)
    assert finding.status == "PASS"
    # 1 MiB in 1 ms is 1.05 GB/s, of which 2 * 3 / 4 go over each link.
    assert "1.57 GB/s busbw at 1048576 bytes, expected at most the slowest link's 2.00 GB/s" in finding.text
    assert finding.details[0].split() == ["size", "(B)", "time", "(us)", "algbw", "(GB/s)", "busbw", "(GB/s)", "#wrong"]
    assert finding.details[2].split() == ["1048576", "1000.0", "1.05", "1.57", "0"]
    assert str(finding).count("\n") == 3
    slow = collectives.judge({0: GOOD, 1: GOOD}, 2, slowest_link=1e11)
    assert slow.status == "WARN"
    assert "GLOO_SOCKET_IFNAME" in slow.cure
    assert collectives.judge({0: GOOD, 1: GOOD}, 2, slowest_link=None).status == "PASS"
    half = collectives.judge({0: GOOD, 1: GOOD}, 2, 2.2e9, collectives.NCCL)  # 1.05 GB/s of it
    assert half.status == "WARN"
    assert "expected at least about the slowest link's 2.20 GB/s" in half.text
    assert "NCCL_IB_HCA" in half.cure


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome("Connection closed by peer"), "fails over gloo: Connection closed by peer"),
        (Outcome("", 3, {"1024": 1e-4}), "gives wrong sums over gloo, on rank 1 in 3 elements"),
        (None, "rank 1 has not reported its all-reduce"),
    ],
)
def test_failures_are_named(outcome: Outcome | None, text: str) -> None:
    finding = collectives.judge({0: GOOD} | ({1: outcome} if outcome else {}), 2, None)
    assert finding.status == "FAIL"
    assert text in finding.text
    assert finding.cure


def test_nccl_says_why_it_does_not_run_here() -> None:
    report = examine(ranks(2))
    assert report.status_of("nccl-reduce") == "--"
    assert report.text_of("nccl-reduce") == "NCCL cannot run here: ranks 0, 1 have no GPU"


# Each rank has a made-up GPU, and a group that sums on the CPU stands for NCCL's.
MADE_UP_GPUS = """
import torch.distributed as dist
from datetime import timedelta
from drivetrain.cli import collectives, devices
devices.measure = lambda: {what: 1e9 for what in devices._UNITS}
devices.own_gpu = collectives.own_gpu = lambda: __import__("torch").device("cpu", rank)
class Options:
    pass
def made(store, rank, world_size, options):
    return dist.ProcessGroupGloo(store, rank, world_size, options._timeout)
made.Options = Options
dist.ProcessGroupNCCL = made
collectives.NCCL = collectives.replace(collectives.NCCL, sizes=collectives.SIZES)
"""


def test_ranks_with_gpus_sum_over_nccl() -> None:
    report = examine(ranks(2, change=MADE_UP_GPUS))
    assert report.status_of("nccl-reduce") == "PASS", report.alarms()
    assert "passes over NCCL between 2 ranks, sums checked" in report.text_of("nccl-reduce")
    one_gpu = MADE_UP_GPUS.replace('device("cpu", rank)', 'device("cpu", 0)')
    report = examine(ranks(2, change=one_gpu))
    assert report.text_of("nccl-reduce") == "NCCL cannot run here: several ranks have one GPU"


def hosts_of(group: list[int], hosts: list[str]) -> set[str]:
    return {hosts[rank] for rank in group}


@given(num_hosts=st.integers(3, 40), per_host=st.integers(1, 3), data=st.data())
def test_the_search_names_the_bad_host(num_hosts: int, per_host: int, data: Any) -> None:
    hosts = [f"host-{rank // per_host}" for rank in range(num_hosts * per_host)]
    bad = f"host-{data.draw(st.integers(0, num_hosts - 1))}"
    search, rounds = Search(hosts), 0
    while (group := search.next_group()) is not None:
        assert len(hosts_of(group, hosts)) >= 2
        search.take(bad not in hosts_of(group, hosts))
        rounds += 1
    assert search.found == f"it works without {bad}"
    assert rounds <= (num_hosts - 1).bit_length() + 1


def test_a_search_of_a_broken_pair_names_one_that_can_go() -> None:
    hosts = [f"host-{rank}" for rank in range(8)]
    search = Search(hosts)
    while (group := search.next_group()) is not None:
        search.take(not {"host-2", "host-7"} <= hosts_of(group, hosts))
    assert search.found in ("it works without host-2", "it works without host-7")


def test_a_search_says_when_one_host_is_not_all() -> None:
    search = Search(["a", "b", "c", "d"])
    while search.next_group() is not None:
        search.take(False)
    assert search.found == "it fails also without a"
    assert Search(["a", "b"]).next_group() is None


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


def test_rates_of_gpus_are_compared_with_the_median() -> None:
    hosts = ["a", "a", "b", "b"]
    rates: dict[int, dict[str, float] | None] = {
        rank: {"to the device": 50e9, "from the device": 48e9, "products": 6e14} for rank in range(4)
    }
    (fine,) = devices.judge(rates, hosts)
    assert fine.status == "PASS"
    assert "to the device 50.0 GB/s or more" in fine.text
    rates[2] = {"to the device": 12e9, "from the device": 48e9, "products": 6e14}
    (slow,) = devices.judge(rates, hosts)
    assert slow.status == "WARN"
    assert "to the device: rank 2 on b reaches 12.0 GB/s, the median rank 50.0" in slow.text
    assert "nvidia-smi" in slow.cure
    rates[2] = None
    (absent,) = devices.judge(rates, hosts)
    assert "rank 2 on b sees no GPU" in absent.text
    assert devices.judge(dict.fromkeys(range(4)), hosts)[0].status == "--"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rates_are_measured(device: str) -> None:
    rates = devices.measure(torch.device(device), size=32, copied=2**16)
    assert rates is not None
    assert rates.keys() == {"to the device", "from the device", "products"}
    assert all(rate > 0 for rate in rates.values())
