"""Installs the checkout as an editable package and shows the progress of the build; `make` calls it.

python tools/build.py [ARGUMENT OF PIP]...    prints the whole log of the build if it fails
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_STEP = re.compile(r"\[(\d+)/(\d+)\] ")  # matches ninja's progress
_SECONDS_BETWEEN_LINES = 30.0  # seconds between progress lines without a terminal


def main() -> int:
    command = [sys.executable, "-m", "pip", "install", "--verbose", "--no-build-isolation", "--no-deps"]
    command += [*sys.argv[1:], "--editable", "."]
    console = Console(stderr=True)
    columns = (TextColumn("building drivetrain"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    log: list[str] = []
    begin = said = time.monotonic()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip,
        Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress,
    ):
        task = progress.add_task("", total=None)
        assert pip.stdout is not None
        for line in pip.stdout:
            log.append(line)
            step = _STEP.search(line)
            if step is None:
                continue
            done, total = map(int, step.groups())
            progress.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                console.print(f"building drivetrain: {done} of {total} files after {said - begin:.0f} s")
    if pip.returncode != 0:
        sys.stderr.writelines(log)
        return pip.returncode
    console.print(f"built drivetrain in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
