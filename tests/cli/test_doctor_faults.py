"""Tests that `drivetrain doctor` names injected faults of machine, network and ranks, each with its cure."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.cli import machine, network, speed
from drivetrain.cli.finding import Finding
from drivetrain.cli.network import Address, Probe
from faults.hosts import INTERFACE, Hosts

TIMEOUT_S = 90
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Findings = dict[str, dict[str, str]]


def python(command: list[str], **environ: str) -> subprocess.Popen[str]:
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    return subprocess.Popen(
        command,
        env={**plain, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def findings_of(processes: list[subprocess.Popen[str]]) -> Findings:
    """Returns the findings of rank 0, which prints for all ranks, after all of them have ended."""
    (out, errors), *_ = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert out, errors
    report: dict[str, Any] = json.loads(out)
    assert report["ok"] == (processes[0].returncode == 0)
    return {finding["name"]: finding for finding in report["findings"]}


def judged(finding: Finding, status: str, text: str, cure: str) -> None:
    assert finding.status == status, finding
    assert text in finding.text
    assert cure in finding.cure


# ---- This machine.


def test_interface_that_is_not_there() -> None:
    listed = ", ".join(machine.interface_addresses())
    finding = machine.check_interfaces({"GLOO_SOCKET_IFNAME": "eth99"})
    judged(finding, "FAIL", "eth99 has no IPv4 address here", "export GLOO_SOCKET_IFNAME=")
    assert listed.split(",")[0] in finding.text
    judged(machine.check_interfaces({"NCCL_SOCKET_IFNAME": "=l"}), "FAIL", "=l", "export NCCL_SOCKET_IFNAME=")
    for value in ("lo", "l", "^docker", "=lo"):  # NCCL takes prefixes unless it starts with =
        assert machine.check_interfaces({"NCCL_SOCKET_IFNAME": value}).status == "PASS"


def test_variables() -> None:
    judged(
        machine.check_variables({"DRIVETRAIN_TRANSPROT": "shm"}),
        "FAIL",
        "DRIVETRAIN_TRANSPROT is not a variable of drivetrain",
        "write DRIVETRAIN_TRANSPORT",
    )
    judged(machine.check_variables({"DRIVETRAIN_XYZ": "1"}), "FAIL", "DRIVETRAIN_XYZ", "unset DRIVETRAIN_XYZ")


@pytest.mark.parametrize(("name", "value"), [("DRIVETRAIN_TRANSPORT", "tcp"), ("DRIVETRAIN_REPORT_HANG_AFTER", "soon")])
def test_values_of_variables(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    judged(machine.check_variables(os.environ), "FAIL", value, f"set {name} as expected")


def test_every_variable_of_the_sources_is_known() -> None:
    sources = Path(machine.__file__).parents[1].rglob("*.py")
    named = {
        line.split('"')[1] for path in sources for line in path.read_text().splitlines() if '= "DRIVETRAIN_' in line
    }
    assert {"DRIVETRAIN_TRANSPORT", "DRIVETRAIN_REPORT_HANG_AFTER"} <= named
    for name in named:
        assert "is not a variable" not in machine.check_variables({name: ""}).text


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


MOUNTS = """
import sys
from pathlib import Path
from drivetrain.cli import machine
small, read_only, healthy = map(Path, sys.argv[1:])
print(machine.check_shared_memory(small))
print(machine.check_disk(small))
print(machine.check_disk(read_only / "new" / "folder"))
print(machine.check_disk(healthy))
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
    shm, full, no_write, fine, none = done.stdout.splitlines()
    assert shm.startswith("WARN")
    assert "--shm-size" in shm
    assert full.startswith("FAIL")
    assert "No space left" in full
    assert "free space there" in full
    assert no_write.startswith("FAIL")
    assert "Read-only file system" in no_write
    assert fine.startswith("PASS  disk")
    assert none.startswith("--    disk")
    assert list((tmp_path / "healthy").iterdir()) == []


# ---- Ranks on this machine.

DOCTOR = [sys.executable, "-m", "drivetrain", "doctor", "--json", "--timeout", "20"]
ODD_RANK = """
import os, sys, time
import drivetrain.cli
rank = int(os.environ["RANK"])
{change}
sys.exit(drivetrain.cli.main(["doctor", "--json"]))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(rank: int, world_size: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def test_two_processes_of_one_rank(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    script = tmp_path / "doctor.py"
    # Rank 0 waits for both others, because it leaves once each rank has come.
    arrive = f"open(os.path.join({str(here)!r}, str(os.getpid())), 'w').close()"
    wait = f"while len(os.listdir({str(here)!r})) < 3: time.sleep(0.05)"
    script.write_text(ODD_RANK.format(change=f"{arrive}\nif rank == 0:\n    {wait}"))
    port = free_port()
    processes = [python([sys.executable, str(script)], **launch(rank, 2, port)) for rank in (0, 1, 1)]
    found = findings_of(processes)
    assert "two processes have RANK=1" in found["ranks"]["text"]
    assert "RANK of its own" in found["ranks"]["cure"]
    assert sorted(process.returncode for process in processes) == [0, 1, 1]


@pytest.mark.parametrize(
    ("change", "name", "text", "cure"),
    [
        ("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "binding", "bound to core", "GOMP_CPU_AFFINITY"),
        ("clock = time.time; time.time = lambda: clock() + 30 * rank", "clocks", "s ahead of rank 0", "chrony"),
    ],
    ids=["one-core", "clock"],
)
def test_odd_ranks(tmp_path: Path, change: str, name: str, text: str, cure: str) -> None:
    script = tmp_path / "odd_rank.py"
    script.write_text(ODD_RANK.format(change=change))
    port = free_port()
    processes = [python([sys.executable, str(script)], **launch(rank, 2, port)) for rank in (0, 1)]
    found = findings_of(processes)
    assert found[name]["status"] == "WARN"
    assert text in found[name]["text"]
    assert cure in found[name]["cure"]
    assert found["network"]["status"] == found["all-reduce"]["status"] == "PASS"


def test_a_slow_rank_is_named() -> None:
    speeds = {0: 100e9, 1: 98e9, 2: 55e9, 3: 101e9}
    one_core = {rank: [rank] for rank in speeds}
    slow, binding = speed.judge(speeds, ["a", "a", "b", "b"], one_core)
    judged(slow, "WARN", "rank 2 on b computes 55 GFLOP/s, the median rank 100", "top")
    assert binding.status == "PASS"
    assert speed.judge({0: 100e9, 1: 70e9}, ["a", "a"], {0: [0], 1: [1]})[0].status == "PASS"
    assert speed.judge({0: 100e9, 1: 50e9}, ["a", "a"], {0: [0], 1: [1]})[0].status == "WARN"


# ---- Several hosts, as network namespaces.


def test_a_host_whose_name_means_loopback_and_a_slow_link() -> None:
    port = free_port()
    hosts = Hosts(2)
    try:
        hosts.__enter__()
    except PermissionError as error:
        pytest.skip(str(error))
    try:

        def ranks(**environ: str) -> Findings:
            processes = []
            for rank, name in enumerate(hosts.names):
                # A host name of its own, which nothing resolves: gloo then takes the loopback interface.
                inside = f'hostname host-{rank} && exec "$0" "$@"'
                # A short limit, because the ranks wait for it where they cannot reach each other.
                doctor = [*DOCTOR[:-1], "8"]
                command = ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c", inside, *doctor]
                processes.append(python(command, **launch(rank, 2, port, "10.213.8.1"), **environ))
            return findings_of(processes)

        found = ranks()
        assert found["network"]["status"] == "FAIL"
        assert "does not reach rank" in found["network"]["text"]
        assert f"export GLOO_SOCKET_IFNAME={INTERFACE} on host-" in found["network"]["cure"]

        found = ranks(GLOO_SOCKET_IFNAME=INTERFACE)
        assert found["network"]["status"] == found["all-reduce"]["status"] == "PASS"
        assert "2 host(s)" in found["network"]["text"]

        shape = [
            "tc",
            "qdisc",
            "add",
            "dev",
            INTERFACE,
            "root",
            "tbf",
            "rate",
            "40mbit",
            "burst",
            "64kb",
            "latency",
            "50ms",
        ]
        subprocess.run(["ip", "netns", "exec", hosts.names[1], *shape], check=True, capture_output=True, timeout=30)
        found = ranks(GLOO_SOCKET_IFNAME=INTERFACE)
        assert found["links"]["status"] == "WARN"
        # The full queue drops packets of both directions, as a link with a defect does.
        assert "on host-0" in found["links"]["text"]
        assert "on host-1" in found["links"]["text"]
    finally:
        hosts.__exit__(None, None, None)


# ---- The judgments, on probes that no machine here can give.

ADDRESSES = [Address(f"host-{rank // 2}", f"10.0.0.{rank // 2 + 1}", 5000 + rank, "eth0 10.0.0.1") for rank in range(8)]


def healthy() -> dict[int, list[Probe]]:
    probes = {}
    for rank in range(8):
        first, *others = network.peers_of(rank, 8)
        probes[rank] = [Probe(first, bytes_per_s=(100 + rank) * 2.0**20)] + [
            Probe(peer, offset_s=0.01) for peer in others
        ]
    return probes


def test_healthy_probes_pass() -> None:
    assert [finding.status for finding in network.judge(ADDRESSES, healthy())] == ["PASS"] * 3


def test_a_closed_port_names_the_pair_and_the_firewall() -> None:
    probes = healthy()
    probes[2][3] = Probe(probes[2][3].peer, error="Connection timed out")
    reach, _, _ = network.judge(ADDRESSES, probes)
    judged(reach, "FAIL", "1 of 56 connections fail; rank 2 on host-1 does not reach rank 6", "firewalls")


def test_a_lossy_and_a_slow_link_are_named() -> None:
    probes = healthy()
    probes[5][0] = Probe(6, bytes_per_s=90e6, lost=0.05)
    _, _, links = network.judge(ADDRESSES, probes)
    judged(links, "WARN", "rank 5 on host-2 to rank 6 on host-3 sends 5.0% of its packets again", "cable")
    probes[5][0] = Probe(6, bytes_per_s=10 * 2.0**20)
    _, _, links = network.judge(ADDRESSES, probes)
    judged(links, "WARN", "carries 10 MiB/s, the median link 103 MiB/s", "cable")
    probes[5][0] = Probe(6, bytes_per_s=101 * 2.0**20)
    probes[4][0] = Probe(5, bytes_per_s=10 * 2.0**20, lost=0.05)  # inside of a host other programs decide
    assert network.judge(ADDRESSES, probes)[2].status == "PASS"


def test_a_rank_that_does_not_report_its_connections_is_named() -> None:
    probes = healthy()
    del probes[3]
    reach, _, _ = network.judge(ADDRESSES, probes)
    judged(reach, "FAIL", "rank 3 on host-1 has not reported", "--timeout")


def test_many_ranks_connect_to_a_few_that_link_all_of_them() -> None:
    for world_size in (2, 3, 64, 65, 1000):
        peers = [network.peers_of(rank, world_size) for rank in range(world_size)]
        assert all(rank not in of_rank and len(set(of_rank)) == len(of_rank) for rank, of_rank in enumerate(peers))
        assert all(of_rank[0] == (rank + 1) % world_size for rank, of_rank in enumerate(peers))
        assert max(map(len, peers)) <= max(63, 10)
