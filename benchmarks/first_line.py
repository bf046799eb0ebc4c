"""Measures the time from `git clone` to the first line of training, and the compile time of each file.

python benchmarks/first_line.py [--repository PATH] [--json FILE]

It clones the committed state and runs `make train` there, without an active environment or a compiler cache. It stops
at the first line that the training prints. pip uses the machine's cache; run the command twice to fill it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[1]
FIRST_LINE = re.compile(r"held-out|step +\d+|\bloss\b", re.IGNORECASE)
BUILT = re.compile(r"built drivetrain in (\d+) s")
LIMIT_SECONDS = 1800.0
SLOWEST_SHOWN = 12


def environment() -> dict[str, str]:
    """Returns this process's environment without variables that would let the clone skip a step."""
    dropped = {"VIRTUAL_ENV", "CMAKE_ARGS", "PYTHONPATH", "CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_C_COMPILER_LAUNCHER"}
    return {name: value for name, value in os.environ.items() if name not in dropped} | {"PYTHONUNBUFFERED": "1"}


def compile_seconds(clone: Path) -> dict[str, float]:
    """Returns the wall-clock seconds of each object file from ninja's log, slowest first."""
    seconds = {}
    for log in clone.glob("build/*/.ninja_log"):
        for line in log.read_text().splitlines()[1:]:
            begin, end, _, output, *_ = line.split("\t")
            if output.endswith(".o"):
                seconds[output.removeprefix("CMakeFiles/")] = (int(end) - int(begin)) / 1000
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def measure(repository: Path, folder: Path, console: Console) -> dict[str, object]:
    """Clones `repository` into `folder` and measures the seconds of each phase.

    Raises:
        RuntimeError: `make train` ended before a line of training.
    """
    begin = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(repository), str(folder)], check=True)
    cloned = time.monotonic()
    log: list[str] = []
    built_s = first_line_s = None
    command = ["make", "train", "ARGS=--steps 20"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as make:  # fmt: skip
        limit = threading.Timer(LIMIT_SECONDS, os.killpg, (make.pid, signal.SIGKILL))
        limit.daemon = True
        limit.start()
        assert make.stdout is not None
        for line in make.stdout:
            log.append(line)
            console.print(line.rstrip(), style="dim", markup=False, highlight=False)
            built = BUILT.search(line)
            if built:
                built_s, end_of_build = float(built[1]), time.monotonic()
            elif built_s is not None and FIRST_LINE.search(line):
                first_line_s = time.monotonic() - begin
                os.killpg(make.pid, signal.SIGTERM)
                break
        limit.cancel()
    if built_s is None or first_line_s is None:
        raise RuntimeError("make train ended without a line of training:\n" + "".join(log[-30:]))
    return {
        "clone_s": cloned - begin,
        "environment_s": end_of_build - cloned - built_s,
        "build_s": built_s,
        "start_s": begin + first_line_s - end_of_build,
        "first_line_s": first_line_s,
        "compile_s": compile_seconds(folder),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repository", type=Path, default=REPOSITORY, help="repository to clone (default: this checkout)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    args = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.repository.resolve(), Path(folder) / "drivetrain", console)
    found |= {"processors": os.cpu_count(), "python": platform.python_version()}
    table = Table(title="From git clone to the first line of training", min_width=50)
    table.add_column("Phase")
    table.add_column("Seconds", justify="right")
    for phase, name in (
        ("clone_s", "git clone"),
        ("environment_s", "environment: venv, pip install of torch and the build's tools"),
        ("build_s", "build"),
        ("start_s", "start of the training"),
        ("first_line_s", "all, at most 180 wanted on two cores"),
    ):
        table.add_row(name, f"{found[phase]:.1f}")
    compiled = found["compile_s"]
    assert isinstance(compiled, dict)
    for name, seconds in list(compiled.items())[:SLOWEST_SHOWN]:
        table.add_row(f"  {name}", f"{seconds:.1f}", style="dim")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
