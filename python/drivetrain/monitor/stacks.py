"""Prints the stacks of all threads of running ranks on request: `drivetrain monitor --stacks`.

faulthandler answers a signal from C, and so also while a call holds Python's lock or waits for another rank.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import time
from pathlib import Path
from typing import TypedDict, cast

from ..processes import Process, has_ended, this_process
from .stream import Event
from .summary import read_events

_SIGNAL = signal.SIGRTMAX - 1  # programs rarely use the real-time signals
_ANSWER_S, _SETTLED_S, _POLL_S = 5.0, 0.2, 0.02


class StacksAddress(TypedDict):
    """The address at which a process takes requests for its stacks."""

    signal: int
    fd: int  # of the memory file that the stacks are appended to


def answer_requests() -> StacksAddress | None:
    """Lets this process answer requests until its end. Later calls return the same address.

    Returns:
        The address; None if the signal is in use.
    """
    return _register(os.getpid())


@functools.lru_cache(maxsize=1)
def _register(_: int) -> StacksAddress | None:
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return None
    # It stays open: without the handler the signal would end the process.
    fd = os.memfd_create("drivetrain-stacks")
    faulthandler.register(_SIGNAL, fd, all_threads=True)
    return {"signal": int(_SIGNAL), "fd": fd}


def stacks_of(address: StacksAddress, process: Process) -> str:
    """Returns the stacks of a process of this host.

    Args:
        address: The address that its `answer_requests` returned.
        process: Its identity.

    Raises:
        ValueError: The process runs on another host, or has ended.
        TimeoutError: It has not answered within 5 s, as one that is stopped.
        PermissionError: It belongs to another user.
    """
    if process["host"] != this_process()["host"]:
        raise ValueError("runs on another host: call the command there")
    if has_ended(process):
        raise ValueError("has ended")
    file = Path(f"/proc/{process['pid']}/fd/{address['fd']}")
    before = file.stat().st_size
    os.kill(process["pid"], address["signal"])
    deadline, size, settled_at = time.monotonic() + _ANSWER_S, before, time.monotonic()
    while size == before or time.monotonic() - settled_at < _SETTLED_S:
        if time.monotonic() > deadline:
            raise TimeoutError(f"has not answered within {_ANSWER_S:g} s: it may be stopped")
        time.sleep(_POLL_S)
        if (now := file.stat().st_size) != size:
            size, settled_at = now, time.monotonic()
    with file.open("rb") as stream:
        stream.seek(before)
        return stream.read(size - before).decode(errors="replace")


def files_of_ranks(file: Path) -> list[Path]:
    """Returns the JSONL files of all ranks of a run, by rank.

    Args:
        file: Rank 0's, or any one rank's.
    """
    name = re.compile(re.escape(file.stem) + r"\.rank(\d+)" + re.escape(file.suffix))
    others = {int(found[1]): one for one in file.parent.iterdir() if (found := name.fullmatch(one.name))}
    return [file, *(others[rank] for rank in sorted(others))]


def report(file: Path) -> tuple[str, bool]:
    """Asks the rank that writes a JSONL file for its stacks.

    Returns:
        A text with a heading, and True if the rank has answered.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no event stream.
    """
    events = read_events(file)
    run = next((event for event in events if event["type"] == "run"), None)
    if run is None:
        raise ValueError(f"{file} has no run event yet: the rank has not begun to train")
    heading = f"rank {run['rank']} (process {run['pid']} on {run['host']}), after step {events[-1]['step']}"
    try:
        return f"{heading}:\n{_answer_to(run)}", True
    except (ValueError, OSError) as error:
        return f"{heading}: {error}", False


def _answer_to(run: Event) -> str:
    if run.get("stacks") is None:
        raise ValueError("answers no requests for stacks: its script uses the signal, or its drivetrain is older")
    return stacks_of(cast(StacksAddress, run["stacks"]), cast(Process, run["process"]))
