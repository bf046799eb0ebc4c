"""Starts `drivetrain doctor` as ranks of this machine, or of hosts in network namespaces, and reads its report."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ports import free_port
from warm_python import warm_python

_LIMIT_S = 240
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CHANGED = """
import os, sys, time
rank = int(os.environ.get("RANK", "0"))
{change}
import drivetrain.cli
sys.exit(drivetrain.cli.main(["doctor", "--json", *sys.argv[1:]]))
"""


@dataclass
class Start:
    """How one process starts.

    Attributes:
        environ: Variables besides this process's own.
        before: A command that runs the rest of its arguments, such as `ip netns exec NAME`.
        shell: Shell commands that run in the process before the doctor.
        change: Python lines that run before the doctor; `rank` is this process's.
        arguments: Arguments of the doctor.
    """

    environ: dict[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    shell: str = ""
    change: str = ""
    arguments: Sequence[str] = ()


@dataclass
class Report:
    """The output of the first process, the time of all processes, and how they ended."""

    findings: list[dict[str, Any]]
    seconds: float
    exit_codes: list[int]

    def status_of(self, check: str) -> str:
        return str(self._finding(check)["status"])

    def text_of(self, check: str) -> str:
        return str(self._finding(check)["text"])

    def _finding(self, check: str) -> dict[str, Any]:
        return next(one for one in self.findings if one["name"] == check)

    def named(self, check: str, text: str, cure: str) -> bool:
        """Returns whether a finding of that check has the text, and the cure."""
        return any(
            one["name"] == check and one["status"] in ("WARN", "FAIL") and text in one["text"] and cure in one["cure"]
            for one in self.findings
        )

    def alarms(self) -> list[str]:
        """Returns all warnings and failures."""
        return [f"{one['name']}: {one['text']}" for one in self.findings if one["status"] in ("WARN", "FAIL")]


def examine(starts: Sequence[Start]) -> Report:
    """Runs the doctor in processes and returns the report of the first one.

    Raises:
        RuntimeError: The first process printed no report, or ended with the exit code of another one.
    """
    begin = time.monotonic()
    processes = [_start(one) for one in starts]
    try:
        answers = [process.communicate(timeout=_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    out, errors = answers[0]
    if not out:
        raise RuntimeError(f"the doctor printed nothing: {errors[-2000:]}")
    report, codes = json.loads(out), [process.returncode for process in processes]
    if report["ok"] != (codes[0] == 0):
        raise RuntimeError(f"the doctor ended with {codes[0]}, and its report says {report['ok']}")
    return Report(report["findings"], time.monotonic() - begin, codes)


def _start(one: Start) -> subprocess.Popen[str]:
    code = _CHANGED.format(change=one.change)
    command = [*one.before, "sh", "-c", f'{one.shell or ":"} && exec "$0" "$@"', warm_python(), "-c", code]
    plain = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    return subprocess.Popen(
        [*command, *one.arguments],
        env={**plain, "OMP_NUM_THREADS": "1", **one.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )


def ranks(count: int, host: str = "127.0.0.1", world_size: int | None = None, **how: Any) -> list[Start]:
    """Returns the starts of so many ranks with one launcher's variables; `how` are fields of every `Start`."""
    port = free_port()
    environ = how.pop("environ", {})
    launcher = {"WORLD_SIZE": str(world_size or count), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return [Start(environ={**environ, **launcher, "RANK": str(rank)}, **how) for rank in range(count)]
