"""Tests that `drivetrain doctor` names injected faults of machine, network and ranks, each with its cure."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from doctor_faults import faults
from doctor_faults.launch import examine, ranks
from drivetrain.cli import launch, machine, network, speed
from drivetrain.cli.finding import Finding
from drivetrain.cli.network import Address, Probe
from faults.hosts import INTERFACE, IPV6
from namespaces import simulated_hosts
from ports import free_port

TIMEOUT_S = 90
CSRC = Path(__file__).parents[2] / "csrc"
SUFFIXES = (".cpp", ".h", ".cu", ".cuh")


def judged(finding: Finding, status: str, text: str, cure: str) -> None:
    assert finding.status == status, finding
    assert text in finding.text
    assert cure in finding.cure


# ---- This machine.


def test_interface_that_is_not_there() -> None:
    finding = machine.check_interfaces({"GLOO_SOCKET_IFNAME": "eth99"})
    judged(finding, "FAIL", "eth99 has no address here", "export GLOO_SOCKET_IFNAME=")
    assert machine.interface_addresses()[0][0] in finding.text
    judged(machine.check_interfaces({"NCCL_SOCKET_IFNAME": "=l"}), "FAIL", "=l", "export NCCL_SOCKET_IFNAME=")
    for value in ("lo", "l", "^docker", "=lo"):  # NCCL takes prefixes unless it starts with =
        assert machine.check_interfaces({"NCCL_SOCKET_IFNAME": value}).status == "PASS"


def test_variables() -> None:
    finding = machine.check_variables({"DRIVETRAIN_TRANSPROT": "shm"})
    text = "DRIVETRAIN_TRANSPROT is not a variable of drivetrain"
    judged(finding, "FAIL", text, "unset DRIVETRAIN_TRANSPROT; known are DRIVETRAIN_ISA, DRIVETRAIN_TRANSPORT")


@pytest.mark.parametrize(("name", "value"), [("DRIVETRAIN_TRANSPORT", "tcp"), ("DRIVETRAIN_REPORT_HANG_AFTER", "soon")])
def test_values_of_variables(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    judged(machine.check_variables(os.environ), "FAIL", value, f"set {name} as expected")


READS = re.compile(r"""(?:getenv|environ\.get|environ|= )[\[(]*"(DRIVETRAIN_\w+)\"""")


def test_every_variable_that_the_sources_read_is_known() -> None:
    package = Path(machine.__file__).parents[1]
    sources = [*package.rglob("*.py"), *(path for path in CSRC.rglob("*") if path.suffix in SUFFIXES)]
    read = {name for path in sources for name in READS.findall(path.read_text())}
    assert {
        "DRIVETRAIN_TRANSPORT",
        "DRIVETRAIN_REPORT_HANG_AFTER",
        "DRIVETRAIN_ISA",
        "DRIVETRAIN_METRICS_TOKEN",
    } <= read
    for name in read:
        assert "is not a variable" not in machine.check_variables({name: ""}).text
    # Every function of libraries that reads the environment has a literal name, which the pattern sees.
    calls = [line for path in sources for line in path.read_text().splitlines() if "getenv(" in line]
    assert all(READS.search(line) for line in calls), calls


def test_every_known_variable_is_read() -> None:
    text = "".join(path.read_text() for path in Path(machine.__file__).parents[1].rglob("*.py"))
    assert [name for name in machine._VARIABLES if f'"{name}"' not in text] == []


@pytest.fixture
def limits() -> Iterator[None]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    size = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    resource.setrlimit(resource.RLIMIT_FSIZE, size)


@pytest.mark.usefixtures("limits")
def test_low_limits() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    judged(machine.check_limits(), "WARN", "512 open files", "ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    judged(machine.check_limits(), "WARN", "bytes per file", "ulimit -f unlimited")


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    judged(machine.check_threads({"LOCAL_WORLD_SIZE": "64"}), "WARN", "64 x 8 threads", "export OMP_NUM_THREADS=1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert machine.check_threads({"LOCAL_WORLD_SIZE": "64"}).status == "PASS"


def test_sigterm_that_a_script_swallows() -> None:
    call = "from drivetrain.cli import machine; print(machine.check_signals())"
    script = f'trap "" TERM; exec "{sys.executable}" -c "{call}"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert "FAIL  signals       SIGTERM is ignored" in done.stdout
    assert "exec" in done.stdout
    assert machine.check_signals().status == "PASS"


def test_an_interactive_shell_raises_no_alarm() -> None:
    """An interactive bash ignores SIGTERM itself, and resets it in the programs that it starts."""
    call = "from drivetrain.cli import machine; print(machine.check_signals())"
    script = f'"{sys.executable}" -c "{call}"; true'
    command = ["bash", "--norc", "-i", "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, start_new_session=True, check=True
    )
    assert done.stdout.startswith("PASS  signals"), done.stdout


MOUNTS = """
import sys
from pathlib import Path
from drivetrain.cli import machine
small, read_only, healthy = map(Path, sys.argv[1:])
print(machine.check_shared_memory(small))
print(machine.check_disk(small))
print(machine.check_disk(read_only / "new" / "folder"))
print(machine.check_disk(healthy))
print(machine.check_disk(healthy / "new" / "folder"))
print(machine.check_disk(None))
"""


def test_small_full_and_read_only_file_systems(tmp_path: Path) -> None:
    for name in ("small", "read_only", "healthy"):
        (tmp_path / name).mkdir()
    small, read_only, healthy = (str(tmp_path / name) for name in ("small", "read_only", "healthy"))
    mount = f"mount -t tmpfs -o size=24m tmpfs {small} && mount -t tmpfs -o ro tmpfs {read_only}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("no file system can be mounted here: `unshare -m` and mount need root")
    script = f'{mount} && exec "$0" "$@"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, "-c", MOUNTS, small, read_only, healthy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    shm, full, no_write, fine, new, none = done.stdout.splitlines()
    assert shm.startswith("WARN")
    assert "--shm-size" in shm
    assert full.startswith("FAIL")
    assert "No space left" in full
    assert "free space there" in full
    assert no_write.startswith("FAIL")
    assert "Read-only file system" in no_write
    assert fine.startswith("PASS  disk")
    assert f"folder (does not exist yet; measured in {healthy}): " in new
    assert none.startswith("--    disk")
    assert list((tmp_path / "healthy").iterdir()) == []


# ---- Ranks on this machine.


def test_two_processes_of_one_rank() -> None:
    report, *expected = faults.duplicate_rank()
    assert report.named(*expected), report.alarms()
    assert sorted(report.exit_codes) == [0, 1, 1]  # the rank that came first is healthy


@pytest.mark.parametrize("slow_looks", [1, 2])
def test_a_rank_that_seemed_slow_measures_again(slow_looks: int) -> None:
    change = (
        "from drivetrain.cli import speed\n"
        f"speeds = iter([10e9] * {slow_looks} + [100e9] * 9)\n"
        "speed.flops_per_s = lambda: next(speeds) if rank == 2 else 100e9"
    )
    report = examine(ranks(3, change=change))
    named = report.named("speed", "rank 2 on", "look there for other programs")
    assert named == (slow_looks == 2), report.alarms()
    assert report.status_of("network") == report.status_of("all-reduce") == "PASS"


def test_a_slow_rank_is_named() -> None:
    slow = speed.judge({0: 100e9, 1: 98e9, 2: 55e9, 3: 101e9}, ["a", "a", "b", "b"])
    judged(slow, "WARN", "rank 2 on b computes 55 GFLOP/s, the median rank 100", "top")
    assert speed.judge({0: 100e9, 1: 70e9}, ["a", "a"]).status == "PASS"
    assert speed.judge({0: 100e9, 1: 50e9}, ["a", "a"]).status == "WARN"


# ---- Several hosts, as network namespaces.


def test_a_host_whose_name_means_loopback_and_a_slow_link(tmp_path: Path) -> None:
    with simulated_hosts(2) as hosts:
        # Nothing resolves the names of these hosts: gloo then takes the loopback interface. The limit is short, because
        # the ranks wait for it where they cannot reach each other.
        together = faults.met(str(tmp_path), 2)
        report = examine(faults.on_hosts(hosts, together, arguments=["--timeout", "2"], environ={}))
        cure = f"export GLOO_SOCKET_IFNAME={INTERFACE} on host-"
        assert report.named("network", "does not reach rank", cure), report.alarms()

        # The queue is short, so that it drops packets also where a busy machine sends slowly.
        faults.shape(hosts, 1, "rate", "40mbit", "burst", "64kb", "latency", "10ms")
        report = examine(faults.on_hosts(hosts))
        assert report.status_of("network") == report.status_of("all-reduce") == "PASS"
        assert "2 host(s)" in report.text_of("network")
        assert report.status_of("links") == "WARN"
        # The full queue drops packets of both directions, as a link with a defect does.
        assert "on host-0" in report.text_of("links")
        assert "on host-1" in report.text_of("links")


def test_hosts_with_ipv6_alone() -> None:
    with simulated_hosts(2, [IPV6]) as hosts:
        report = examine(faults.on_hosts(hosts, master=IPV6))
        assert report.status_of("network") == "PASS"
        assert report.text_of("master").startswith("[fd13:8::1]:")
        assert report.status_of("all-reduce") == "PASS"


# ---- The judgments, on probes that no machine here can give.

ADDRESSES = [Address(f"host-{rank // 2}", f"10.0.0.{rank // 2 + 1}", 5000 + rank, "eth0") for rank in range(8)]


def healthy() -> dict[int, list[Probe]]:
    probes = {}
    for rank in range(8):
        first, *others = network.peers_of(rank, 8)
        probes[rank] = [Probe(first, bytes_per_s=(100 + rank) * 2.0**20), *map(Probe, others)]
    return probes


def test_healthy_probes_pass() -> None:
    assert [finding.status for finding in network.judge(ADDRESSES, healthy())] == ["PASS", "PASS"]


def test_a_closed_port_names_the_pair_and_the_firewall() -> None:
    probes = healthy()
    probes[2][3] = Probe(probes[2][3].peer, error="Connection timed out")
    reach, *_ = network.judge(ADDRESSES, probes)
    judged(reach, "FAIL", "1 of 56 connections fail; rank 2 on host-1 does not reach rank 6", "firewalls")


def test_a_lossy_and_a_slow_link_are_named() -> None:
    probes = healthy()
    probes[5][0] = Probe(6, bytes_per_s=90e6, lost=0.05)
    *_, links = network.judge(ADDRESSES, probes)
    judged(links, "WARN", "rank 5 on host-2 to rank 6 on host-3 sends 5.0% of its packets again", "cable")
    probes[5][0] = Probe(6, bytes_per_s=10 * 2.0**20)
    *_, links = network.judge(ADDRESSES, probes)
    judged(links, "WARN", "carries 10 MiB/s, the median link 103 MiB/s", "cable")
    one_host = [replace(address, host="host-0") for address in ADDRESSES]
    judged(network.judge(one_host, probes)[1], "--", "all ranks are on one host", "")


def test_a_rank_that_does_not_report_its_connections_is_named() -> None:
    probes = healthy()
    del probes[3]
    reach, *_ = network.judge(ADDRESSES, probes)
    judged(reach, "FAIL", "rank 3 on host-1 has not reported", "--timeout")


def test_a_master_whose_first_address_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        one = launch.Launch(1, 2, "master", port, agent_store=True)
        answers = launch._check_answers(one, ["::1", "127.0.0.1"], 5)  # refused at once: nothing waits
        assert answers.status == "PASS"
        silent = launch._check_answers(one, ["fe80::1%none", "127.0.0.1"], 5)
        judged(silent, "WARN", "answers at 127.0.0.1, but not at fe80::1%none", "export MASTER_ADDR=127.0.0.1")
    judged(launch._check_answers(one, ["::1"], 5), "FAIL", "does not answer", "it means IPv6 here")


def test_a_port_that_is_taken_over_ipv6_alone() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this system has no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        one = launch.Launch(0, 2, "localhost", server.getsockname()[1], agent_store=False)
        judged(launch._check_port_is_free(one), "FAIL", "another program listens on it", "export MASTER_PORT=")
    assert launch._check_port_is_free(launch.Launch(0, 2, "localhost", free_port(), False)).status == "PASS"


def test_many_ranks_connect_to_a_few_that_link_all_of_them() -> None:
    for world_size in (2, 3, 64, 65, 1000):
        peers = [network.peers_of(rank, world_size) for rank in range(world_size)]
        assert all(rank not in of_rank and len(set(of_rank)) == len(of_rank) for rank, of_rank in enumerate(peers))
        assert all(of_rank[0] == (rank + 1) % world_size for rank, of_rank in enumerate(peers))
        assert max(map(len, peers)) <= max(63, 10)
