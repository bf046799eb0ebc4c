"""Detects that a process of this host has ended, from the identity that it published before."""

import functools
import os
import socket
from pathlib import Path
from typing import TypedDict

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")


class Process(TypedDict):
    """Identifies one process among all hosts' processes of all times."""

    host: str  # "": unknown, and so is whether its processes have ended
    pid: int
    started: int  # in the kernel's clock ticks since boot


def machine() -> str:
    """Returns a text that is equal for all containers and namespaces of this machine, as far as the kernel shows it."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:  # some containers hide it
        return socket.gethostname()


def this_process() -> Process:
    """Returns the identity of the calling process."""
    return _process(os.getpid())


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> Process:
    _, started = _state_and_start(pid) or ("", 0)
    return {"host": _host() if started else "", "pid": pid, "started": started}


def has_ended(process: Process) -> bool:
    """Returns True if the process has certainly ended.

    It then ran on this host, and no process has its number or a younger one does.
    """
    if not process["host"] or process["host"] != _host():
        return False
    found = _state_and_start(process["pid"])
    if found is None:
        return True
    state, started = found
    return state in "ZX" or started != process["started"]


@functools.lru_cache(maxsize=1)
def _host() -> str:
    """Returns a text that is equal for processes that see each other's numbers; "" where the kernel hides it."""
    try:
        return f"{BOOT_ID.read_text().strip()} {(NAMESPACES / 'pid').readlink()}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Returns the state of that process and its start time in clock ticks; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # behind the name, which may contain anything
    return fields[0], int(fields[19])
