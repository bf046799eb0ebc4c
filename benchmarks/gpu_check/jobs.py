"""One command with a time limit: whatever it starts ends with it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE_S = 3.0  # between asking and killing
POLL_S = 0.2  # how soon a deadline that was brought forward is seen
Details = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Job:
    """A command of one part, and how to read what it left behind, even if it was killed."""

    part: str
    name: str
    what: str  # one line, for people
    command: Sequence[str | Path]
    least_s: float  # kept for it from the deadline while earlier jobs take longer than they should
    read: Callable[[int | None, str], Details] = lambda code, output: {}  # exit code (None: killed), output -> details
    environment: Mapping[str, str] = field(default_factory=dict)
    result: Path | None = None  # a file for `read`; what an earlier run left there is removed


class Deadline:
    """When all must be over; a signal may bring it forward to now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._at - time.monotonic()

    def end_now(self) -> None:
        self._at = 0.0


def run(job: Job, limit_s: float, deadline: Deadline, log: Path, folder: Path) -> Details:
    """Runs it in `folder` for at most so long; its output goes to `log`. Returns the outcome as plain data.

    "status" is "passed", "failed", "timed out", or what the job's reader says instead.
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
    except Exception as error:  # a result cut off in the middle must not cost the report
        outcome |= {"status": "failed", "note": f"its result cannot be read: {error!r}"}
    if outcome["status"] != "passed":
        outcome["log"] = "\n".join(text.splitlines()[-60:])
    return outcome


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends its group, also what has outlived it, and descendants in other groups: torchrun gives each rank its own."""
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
        with contextlib.suppress(OSError):  # it has just ended
            name, _, rest = stat.read_text().rpartition(")")
            parents[int(name.split()[0])] = int(rest.split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]
