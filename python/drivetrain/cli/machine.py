"""Checks this machine for `drivetrain doctor`: memory, limits, disk, threads, signals, variables and interfaces."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic

import torch

from drivetrain import _C
from drivetrain.cli.finding import Finding, fail, not_applicable, passed, warn
from drivetrain.ddp import hang_reports, transport
from drivetrain.memory import host_memory
from drivetrain.monitor.sinks import prometheus

_GIB = 2.0**30
_LEAST_MEMORY = 2**30
_LEAST_SHARED_MEMORY = 2**27  # Docker's default is 64 MiB
_LEAST_DISK = 2**30
_WRITTEN = 2**26  # bytes that the disk's check writes
_SIOCGIFADDR = 0x8915  # ioctl of netdevice(7): the IPv4 address of an interface
_DUPLICATE_ADDRESS = 0x08  # flag of rtnetlink(7): the address is in use elsewhere

# The limit, the least that trainings take (None: any limit ends them), ulimit's option that raises it, and its meaning.
_LIMITS = (
    (resource.RLIMIT_NOFILE, 1024, "-n 65536", "open files are allowed; workers, sockets and shared tensors need more"),
    (resource.RLIMIT_NPROC, 1024, "-u unlimited", "processes and threads are allowed"),
    (resource.RLIMIT_FSIZE, None, "-f unlimited", "bytes per file are allowed, which ends larger checkpoints"),
    (
        resource.RLIMIT_AS,
        None,
        "-v unlimited",
        "bytes of address space are allowed, which CUDA and shared memory exceed",
    ),
)

_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_PREFIX = "DRIVETRAIN_"


def _check_isa() -> None:
    forced, available = os.environ.get("DRIVETRAIN_ISA", ""), _C.available_isas()
    if forced and forced not in available:
        raise ValueError(f"DRIVETRAIN_ISA={forced}, but this processor and build offer: {', '.join(available)}")


# Maps each variable of drivetrain to the function that raises ValueError for a wrong value.
_VARIABLES: dict[str, Callable[[], object]] = {
    "DRIVETRAIN_ISA": _check_isa,
    transport.VARIABLE: lambda: transport.requested("auto"),
    hang_reports.VARIABLE: lambda: hang_reports.limit_from(None),
    prometheus.TOKEN_VARIABLE: lambda: None,  # any text is a token
}


def check_machine(checkpoint_dir: Path | None) -> list[Finding]:
    """Runs all checks of this machine.

    Args:
        checkpoint_dir: The directory that checkpoints go to, or None to leave out the check of the disk.
    """
    return [
        check_memory(),
        check_shared_memory(Path("/dev/shm")),
        check_limits(),
        check_threads(os.environ),
        check_signals(),
        check_variables(os.environ),
        check_interfaces(os.environ),
        check_disk(checkpoint_dir),
    ]


def check_memory() -> Finding:
    """Compares the memory that this process may still take with the least that a training needs."""
    memory = host_memory()
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB are available"
    if memory.limit is not None and memory.limit < memory.total:
        text += f"; the container may take {memory.limit / _GIB:.1f} GiB and has taken {memory.taken / _GIB:.1f}"
    if memory.usable < _LEAST_MEMORY:
        return warn("memory", text, "end other programs, or raise the container's limit: docker run --memory=...")
    return passed("memory", text)


def check_shared_memory(folder: Path) -> Finding:
    """Checks the size of the shared-memory file system, through which workers of a DataLoader send batches."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        cure = f"mount -t tmpfs tmpfs {folder}, or use DataLoaders without workers"
        return fail("shm", f"{folder}: {error.strerror}; DataLoader workers need it", cure)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{free / _GIB:.2f} of {size / _GIB:.2f} GiB are free in {folder}"
    if free < _LEAST_SHARED_MEMORY:
        cure = "docker run --ipc=host or --shm-size=8g; or delete old files there"
        return warn("shm", f"{text}; DataLoader workers send batches through it", cure)
    return passed("shm", text)


def check_limits() -> Finding:
    """Checks the limits of this process that end trainings: open files, processes, memory and file size."""
    for name, least, option, what in _LIMITS:
        limit, _ = resource.getrlimit(name)
        if limit != resource.RLIM_INFINITY and (least is None or limit < least):
            cure = f"ulimit {option} before the launcher, or the same limit of the service or the container"
            return warn("limits", f"{limit} {what}", cure)
    return passed("limits", "no limit of open files, processes, file size and address space matters")


def check_threads(environ: Mapping[str, str]) -> Finding:
    """Compares the threads of all ranks of this machine with its cores."""
    cores = len(os.sched_getaffinity(0))
    ranks = int(environ.get("LOCAL_WORLD_SIZE", "1")) if environ.get("LOCAL_WORLD_SIZE", "1").isdigit() else 1
    threads = torch.get_num_threads()
    text = f"{ranks} x {threads} threads on {cores} cores"
    if ranks * threads > max(cores, ranks):
        share = max(1, cores // ranks)
        return warn("threads", f"{text}: they take turns", f"export OMP_NUM_THREADS={share}")
    return passed("threads", text)


def check_signals() -> Finding:
    """Checks that SIGTERM, by which schedulers announce the end, reaches this process."""
    cure = "remove `trap '' TERM` and nohup from the script, and start Python by `exec`"
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return fail("signals", "SIGTERM is blocked in this process: preemption would go unnoticed", cure)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        return fail("signals", "SIGTERM is ignored since before Python started: preemption would go unnoticed", cure)
    # Other ancestors are not judged: an interactive bash and systemd have SIGTERM masked as well.
    with suppress(OSError):  # process 1 may be hidden
        status = dict(line.split(":", 1) for line in Path("/proc/1/status").read_text().splitlines())
        name, is_caught = status["Name"].strip(), int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1
        if name in _SHELLS and not is_caught:
            text = f"process 1 is {name}, to which the kernel delivers no SIGTERM without a handler"
            return warn("signals", text, "start the container's command by `exec`, or docker run --init")
    return passed("signals", "SIGTERM reaches this process")


def check_variables(environ: Mapping[str, str]) -> Finding:
    """Checks that every variable DRIVETRAIN_* is known and has a value that its reader takes."""
    given = sorted(name for name in environ if name.startswith(_PREFIX))
    for name in given:
        if name not in _VARIABLES:
            cure = f"unset {name}; known are {', '.join(_VARIABLES)}"
            return fail("variables", f"{name} is not a variable of drivetrain", cure)
        try:
            _VARIABLES[name]()
        except ValueError as error:
            return fail("variables", str(error), f"set {name} as expected, or unset it")
    return passed("variables", ", ".join(given) if given else "no DRIVETRAIN_* is set")


def check_interfaces(environ: Mapping[str, str]) -> Finding:
    """Checks that the interfaces named for gloo and NCCL exist and have an address."""
    addresses = interface_addresses()
    names = [name for name, _ in addresses]
    listed = ", ".join(f"{name} {address}" for name, address in addresses) or "none"
    usable = [name for name in names if name != "lo"] or names
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        is_exact = variable.startswith("GLOO") or value.startswith("=")
        if not value or value.startswith("^"):  # NCCL excludes these
            continue
        for name in value.removeprefix("=").split(","):
            if not any(found == name if is_exact else found.startswith(name) for found in names):
                text = f"{variable}={value}, but {name} has no address here; there are: {listed}"
                cure = f"export {variable}={usable[0]}" if usable else "bring an interface up: ip link set ... up"
                return fail("interfaces", text, cure)
    return passed("interfaces", listed)


def interface_addresses() -> list[tuple[str, str]]:
    """Returns name and address of each network interface that is up: IPv4 addresses, then IPv6 addresses."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                state = Path("/sys/class/net", name, "operstate")
                if not state.exists() or state.read_text().strip() != "down":
                    found.append((name, socket.inet_ntoa(answer[20:24])))
    with suppress(OSError):  # the kernel has no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, flags, name = line.split()
            # Other hosts need a zone for addresses of one link, and cannot use an address that is another host's.
            if int(scope, 16) == 0 and not int(flags, 16) & _DUPLICATE_ADDRESS:
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def check_disk(folder: Path | None) -> Finding:
    """Writes a file into the directory of checkpoints, makes it durable, and removes it."""
    if folder is None:
        return not_applicable("disk", "pass --checkpoint DIR to test where checkpoints go")
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        seconds = _write_durably(existing)
    except OSError as error:
        cures = {
            errno.EROFS: "mount the file system with rw, or choose another directory",
            errno.EACCES: f"chown {os.geteuid()} {existing}, or choose another directory",
            errno.ENOSPC: "free space there, remove checkpoints with `drivetrain ckpt gc`, or choose another directory",
            errno.EDQUOT: "raise the quota, or choose another directory",
        }
        cure = cures.get(error.errno or 0, "choose a directory that can be written")
        return fail("disk", f"{folder} cannot be written: {error.strerror}", cure)
    found = os.statvfs(existing)
    free = found.f_bavail * found.f_frsize
    where = "" if existing == folder else f" (does not exist yet; measured in {existing})"
    text = f"{folder}{where}: {_WRITTEN / seconds / 2**20:.0f} MiB/s with fsync, {free / _GIB:.1f} GiB free"
    if free < _LEAST_DISK:
        return warn("disk", text, "free space there, or choose another directory")
    return passed("disk", text)


def _write_durably(folder: Path) -> float:
    """Writes _WRITTEN bytes that do not compress, with fsync, and returns the seconds that it took."""
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".drivetrain-doctor-", buffering=0) as file:
        start = monotonic()
        for _ in range(_WRITTEN // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        return monotonic() - start
