"""Defines the 18 faults: each injects one, and returns the report, and the check, text and cure that must name it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from faults.hosts import INTERFACE, IPV4, Hosts
from ports import free_port

from .launch import Report, Start, examine, ranks

_GLOO = {"GLOO_SOCKET_IFNAME": INTERFACE}

Named = tuple[Report, str, str, str]  # the report, and the check, part of its text, and part of its cure


def wrong_interface() -> Named:
    report = examine([Start(environ={"GLOO_SOCKET_IFNAME": "eth99"})])
    return report, "interfaces", "eth99 has no address here", "export GLOO_SOCKET_IFNAME="


def closed_port() -> Named:
    """torchrun's agent should listen, and nothing does."""
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    report = examine([Start(environ=variables, arguments=["--timeout", "5"])])
    return report, "master", "does not answer", "no firewall closes TCP port"


def unresolvable_host() -> Named:
    report = examine(ranks(1, "no-such-host.invalid", 2, arguments=["--timeout", "10"]))
    return report, "master", "MASTER_ADDR=no-such-host.invalid does not resolve", "export MASTER_ADDR="


def mixed_torch() -> Named:
    change = "import drivetrain, torch\nif rank == 1:\n    torch.__version__ = '2.11.0'"
    return examine(ranks(2, change=change)), "versions", "torch differs", "install the same torch"


def mixed_nccl() -> Named:
    change = (
        "import torch, torch.distributed as dist, torch.cuda.nccl\n"
        "torch.version.cuda = '13.0'\n"
        "dist.is_nccl_available = lambda: True\n"
        "torch.cuda.nccl.version = lambda: (2, 28 - rank, 9)"
    )
    return examine(ranks(2, change=change)), "versions", "NCCL differs: 2.28.9 on rank 0", "install the same NCCL"


def missing_rank() -> Named:
    report = examine(ranks(1, world_size=2, arguments=["--timeout", "5"]))
    return report, "ranks", "missing after 5 s: rank 1 of 2", "start them with MASTER_ADDR:MASTER_PORT"


def met(folder: str, count: int) -> str:
    """Returns Python lines that import the doctor and wait until so many processes have done so, by files there."""
    return (
        f"import drivetrain.cli\nopen(os.path.join({folder!r}, str(os.getpid())), 'w').close()\n"
        f"while len(os.listdir({folder!r})) < {count}:\n    time.sleep(0.05)"
    )


def duplicate_rank() -> Named:
    first, second = ranks(2)
    with tempfile.TemporaryDirectory() as folder:
        # Rank 0 waits for both others, because it leaves once each rank has come.
        first.change = second.change = met(folder, 3)
        report = examine([first, second, second])
    return report, "ranks", "two processes have RANK=1", "RANK of its own"


@contextmanager
def _mounted(options: str) -> Iterator[tuple[str, Path]]:
    """Yields shell commands that mount a file system, which only their process sees, and the folder of it."""
    with tempfile.TemporaryDirectory() as name:
        yield f"mount -t tmpfs -o {options} tmpfs {name}", Path(name)


def small_shm() -> Named:
    mount = "mount -t tmpfs -o size=24m tmpfs /dev/shm"
    return examine([Start(before=["unshare", "-m"], shell=mount)]), "shm", "are free in /dev/shm", "--shm-size"


def full_disk() -> Named:
    with _mounted("size=24m") as (mount, folder):
        report = examine([Start(before=["unshare", "-m"], shell=mount, arguments=["--checkpoint", str(folder)])])
    return report, "disk", "No space left", "free space there"


def read_only_directory() -> Named:
    with _mounted("ro") as (mount, folder):
        report = examine([Start(before=["unshare", "-m"], shell=mount, arguments=["--checkpoint", str(folder)])])
    return report, "disk", "Read-only file system", "mount the file system with rw"


def swallowed_sigterm() -> Named:
    return examine([Start(shell='trap "" TERM')]), "signals", "SIGTERM is ignored", "start Python by `exec`"


def slow_rank() -> Named:
    """Other programs take the core of rank 1."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    spin = f"import os\nos.sched_setaffinity(0, {{{cores[-1]}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(4)]
    try:
        change = f"os.sched_setaffinity(0, {{{cores}[rank]}})"
        return examine(ranks(2, change=change)), "speed", "rank 1 on", "look there for other programs"
    finally:
        for other in others:
            other.kill()
            other.wait()


def on_hosts(
    hosts: Hosts,
    change: str = "",
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] = _GLOO,
    master: str = IPV4,
) -> list[Start]:
    """Returns the starts of one rank per host, each with a host name of its own.

    `master` is the network by whose address the first host is found.
    """
    address = master.format(1).partition("/")[0]
    starts = ranks(len(hosts.names), address, environ=dict(environ), arguments=arguments)
    for rank, (start, name) in enumerate(zip(starts, hosts.names, strict=True)):
        start.before = ["ip", "netns", "exec", name, "unshare", "-u"]
        start.shell, start.change = f"hostname host-{rank}", change
    return starts


def shape(hosts: Hosts, index: int, *how: str) -> None:
    """Shapes what a host sends with a token bucket."""
    command = ["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *how]
    subprocess.run(["ip", "netns", "exec", hosts.names[index], *command], check=True, capture_output=True, timeout=30)


def slow_link() -> Named:
    """With the bucket's queue so long that nothing is lost."""
    with Hosts(3) as hosts:
        shape(hosts, 1, "rate", "60mbit", "burst", "256kb", "limit", "64mb")
        return examine(on_hosts(hosts)), "links", "rank 1 on host-1 to rank 2 on host-2 carries", "check cable"


def lossy_link() -> Named:
    """The bucket's queue is short, so that it drops packets."""
    with Hosts(3) as hosts:
        shape(hosts, 1, "rate", "200mbit", "burst", "64kb", "limit", "70kb")
        return examine(on_hosts(hosts)), "links", "of its packets again", "check cable, switch port and MTU"


def low_ulimit() -> Named:
    return examine([Start(shell="ulimit -n 256")]), "limits", "256 open files are allowed", "ulimit -n 65536"


def no_driver() -> Named:
    """A CUDA build of torch on a machine with a GPU, and no driver's library."""
    change = (
        "import torch, pathlib\n"
        "torch.version.cuda = '13.0'\n"
        "exists = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda path, **how: str(path) == '/dev/nvidia0' or exists(path, **how)"
    )
    text = "there is an NVIDIA GPU that torch cannot use"
    return examine([Start(change=change)]), "cuda", text, "install a driver for CUDA 13.0"


def bogus_variable() -> Named:
    report = examine([Start(environ={"DRIVETRAIN_TRANSPROT": "shm"})])
    return (
        report,
        "variables",
        "DRIVETRAIN_TRANSPROT is not a variable",
        "known are DRIVETRAIN_ISA, DRIVETRAIN_TRANSPORT",
    )


def unreachable_store() -> Named:
    """Rank 1 starts alone."""
    alone = ranks(2, arguments=["--timeout", "5"])[1:]
    return examine(alone), "ranks", "no process listens after 5 s", "MASTER_ADDR and MASTER_PORT"


FAULTS: dict[str, Callable[[], Named]] = {
    fault.__name__: fault
    for fault in (
        wrong_interface,
        closed_port,
        unresolvable_host,
        mixed_torch,
        mixed_nccl,
        missing_rank,
        duplicate_rank,
        small_shm,
        full_disk,
        read_only_directory,
        swallowed_sigterm,
        slow_rank,
        slow_link,
        lossy_link,
        low_ulimit,
        no_driver,
        bogus_variable,
        unreachable_store,
    )
}
