"""Runs one command with a time limit and ends every process that it started."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE_S = 3.0  # seconds between SIGTERM and SIGKILL
POLL_S = 0.2  # seconds until an earlier deadline takes effect
Details = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Job:
    """A command of one part, and the function that reads its results, even if it was killed."""

    part: str
    name: str
    what: str  # description in one line
    command: Sequence[str | Path]
    least_s: float  # seconds reserved for it while earlier jobs run
    read: Callable[[int | None, str], Details] = lambda code, output: {}  # exit code (None: killed), output -> details
    environment: Mapping[str, str] = field(default_factory=dict)
    result: Path | None = None  # a file for `read`, removed before the command starts


class Deadline:
    """Holds the time at which the check must end. A signal may move it to now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._at - time.monotonic()

    def end_now(self) -> None:
        self._at = 0.0


def run(job: Job, limit_s: float, deadline: Deadline, log: Path, folder: Path) -> Details:
    """Runs a job's command.

    Args:
        job: The job to run.
        limit_s: Time limit in seconds.
        deadline: The deadline of the whole check, which also ends the command.
        log: File for the command's output.
        folder: Working directory.

    Returns:
        The outcome as plain data. "status" is "passed", "failed", "timed out", or the status that `job.read` returns.
    """
    begin = time.monotonic()
    if job.result:
        job.result.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            job.command,
            cwd=folder,
            env={**os.environ, **job.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (left := min(limit_s - (time.monotonic() - begin), deadline.left_s())) > 0 and process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(left, POLL_S))
            code = process.poll()
        finally:
            _end(process)
    status = "timed out" if code is None else "failed" if code else "passed"
    text = log.read_text(errors="replace")
    outcome: Details = {"part": job.part, "name": job.name, "status": status}
    outcome |= {"seconds": round(time.monotonic() - begin, 1), "command": " ".join(map(str, job.command))}
    outcome |= {"exit_code": code, "limit_seconds": round(limit_s)}
    try:
        outcome |= job.read(code, text)
    except Exception as error:  # a truncated result must not cost the report
        outcome |= {"status": "failed", "note": f"its result cannot be read: {error!r}"}
    if outcome["status"] != "passed":
        outcome["log"] = "\n".join(text.splitlines()[-60:])
    return outcome


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process group, and descendants in other groups: torchrun starts each rank in its own group."""
    others = _descendants(process.pid)
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        if how == signal.SIGTERM and process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    process.wait()


def _descendants(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            name, _, rest = stat.read_text().rpartition(")")
            parents[int(name.split()[0])] = int(rest.split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]
