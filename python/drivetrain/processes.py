"""Tells whether a process of this host has ended, from what it has told of itself before."""

import functools
import os
from pathlib import Path
from typing import TypedDict

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")


class Process(TypedDict):
    """Names one process among those of all hosts and of all times."""

    host: str  # "": not known, and nothing is known of its processes
    pid: int
    started: int  # in the kernel's ticks since it booted


def this_process() -> Process:
    """The calling process."""
    return _process(os.getpid())


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> Process:
    _, started = _state_and_start(pid) or ("", 0)
    return {"host": _host() if started else "", "pid": pid, "started": started}


def has_ended(process: Process) -> bool:
    """Whether that is certain: it ran on this host, and either nothing has its number or something younger does."""
    if not process["host"] or process["host"] != _host():
        return False
    found = _state_and_start(process["pid"])
    if found is None:
        return True
    state, started = found
    return state in "ZX" or started != process["started"]


@functools.lru_cache(maxsize=1)
def _host() -> str:
    """The same for processes that see each other's numbers; "" where the kernel does not tell."""
    try:
        return f"{BOOT_ID.read_text().strip()} {(NAMESPACES / 'pid').readlink()}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """The state of that process and when it started; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # after the name, which may hold anything
    return fields[0], int(fields[19])
