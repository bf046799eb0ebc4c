"""Runs other projects' test suites with torch's classes, then with drivetrain's in their place, and prints a table.

Each suite comes from its sdist on the package index, or from a folder of yours (SUITES). Its requirements go into an
environment of its own under build/strangers, which also sees this one's packages; torch stays as it is. A test that
passes with torch's classes and fails with drivetrain's runs again alone with both, so that flaky tests do not count.

  make strangers                                          all packaged suites (an hour)
  make strangers ARGS="timm schedulefree"                 some of them
  make strangers SUITES=folder                            each subfolder of `folder` with test files, and no others

build/strangers/result.json keeps the last row of each suite, with each differing test and its error. The table shows
them all. Logs of pytest lie in the same folder.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .suites import PACKAGED, Suite, in_folder

MOST_CRASHES = 20  # of one run of a suite; then the rest counts as not run
MARK = "<!-- table of make strangers -->"
_SWAP = "import os; os.environ.get('STRANGERS_SWAP') and __import__('drivetrain').install(optim=True)\n"


class Outcome(NamedTuple):
    """Holds pytest's word for how a test ended, and the first line of its error."""

    outcome: str
    why: str


class Runner:
    """Runs suites in a scratch folder.

    Args:
        scratch: Receives sources, environments, records and logs.
        patience: Seconds without a test's end after which the running test counts as one that hangs.
        progress: Shows how many tests have run.
    """

    def __init__(self, scratch: Path, patience: float, progress: Progress) -> None:
        self.scratch, self.patience, self.progress = scratch, patience, progress
        scratch.mkdir(parents=True, exist_ok=True)
        self.constraints = scratch / "constraints.txt"
        self.constraints.write_text(f"torch=={version('torch')}\n")

    def compare(self, suite: Suite) -> dict[str, Any]:
        """Returns the suite's row: counts, and each test that only torch's classes pass, with its error."""
        source, python = self.source_of(suite), self.environment_of(suite)
        torchs = self.outcomes(suite, source, python, "torch")
        passed = {test for test, outcome in torchs.items() if outcome.outcome == "passed"}
        if not passed:
            raise RuntimeError(f"no test passed with torch's classes; {self.scratch / suite.name}-torch.log says why")
        ours = self.outcomes(suite, source, python, "swapped", passed)
        differing = {test for test in passed if ours.get(test, Outcome("failed", "did not run")).outcome != "passed"}
        again: dict[str, dict[str, Outcome]] = {"torch": {}, "swapped": {}}
        if differing:
            again = {kind: self.outcomes(suite, source, python, kind, differing, "again") for kind in again}
        flaky = {test for test in differing if again["torch"].get(test, Outcome("", "")).outcome != "passed"}
        failing = {
            test: again["swapped"].get(test, Outcome("failed", "did not run")).why
            for test in sorted(differing - flaky)
            if again["swapped"].get(test, Outcome("failed", "")).outcome != "passed"
        }
        count = len(passed) - len(flaky)
        return {
            "suite": suite.name,
            "version": suite.version or "sources",
            "date": f"{datetime.date.today():%Y-%m-%d}",
            "passed": count,
            "passed_swapped": count - len(failing),
            "failing": failing,
            "flaky": sorted(flaky),
        }

    def source_of(self, suite: Suite) -> Path:
        """Returns the folder with the suite's tests, after a download of its sdist if there is none yet."""
        if suite.source is not None:
            return suite.source
        folder = self.scratch / "sources" / f"{suite.name}-{suite.version}"
        if not folder.exists():
            downloads = self.scratch / "downloads"
            name = f"{suite.name}=={suite.version}"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", suite.name]
            self.call([*command, "--dest", downloads, name], suite, "download")
            prefix = suite.name.lower().replace("-", "_")
            archives = [path for path in downloads.iterdir() if path.name.lower().replace("-", "_").startswith(prefix)]
            archive = next(path for path in archives if suite.version in path.name)
            with tarfile.open(archive) as file:
                file.extractall(self.scratch / "unpacked", filter="data")
                root = file.getnames()[0].partition("/")[0]
            folder.parent.mkdir(exist_ok=True)
            (self.scratch / "unpacked" / root).rename(folder)
        return folder

    def environment_of(self, suite: Suite) -> Path:
        """Returns the Python of the suite's environment, which has its requirements and sees this one's packages."""
        folder = self.scratch / "environments" / suite.name
        python = folder / "bin/python"
        if not (folder / "complete").exists():
            venv.create(folder, clear=True, symlinks=True)
            site = next(folder.glob("lib/python*/site-packages"))
            (site / "base.pth").write_text(
                "".join(f"import site; site.addsitedir({path!r})\n" for path in sys.path if path.endswith("-packages"))
            )
            (site / "zz_swap.pth").write_text(_SWAP)  # every process of a swapped run, also those that tests start
            package = [f"{suite.name}=={suite.version}"] if suite.version else []
            command = [python, "-m", "pip", "install", "--quiet", "--constraint", self.constraints]
            self.call([*command, "pytest", *package, *suite.requirements], suite, "install")
            (folder / "complete").touch()
        return python

    def call(self, command: Iterable[Any], suite: Suite, name: str) -> None:
        log = self.scratch / f"{suite.name}-{name}.log"
        with log.open("w") as file:
            ended = subprocess.run(
                [*map(str, command)], stdout=file, stderr=subprocess.STDOUT, timeout=1800, check=False
            )
        if ended.returncode != 0:
            raise RuntimeError(f"{suite.name}: {name} failed with status {ended.returncode}; {log} says why")

    def outcomes(
        self, suite: Suite, source: Path, python: Path, kind: str, only: set[str] | None = None, label: str = ""
    ) -> dict[str, Outcome]:
        """Runs the suite's tests, or those of `only`, in as many processes as it takes after crashes and hangs."""
        stem = self.scratch / f"{suite.name}-{kind}{label}"
        record = stem.with_suffix(".jsonl")
        record.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STRANGERS_")}
        environment |= {"RECORD": str(record), "PYTHONPATH": str(Path(__file__).parent), "HF_HUB_OFFLINE": "1"}
        if kind == "swapped":
            environment["STRANGERS_SWAP"] = "1"
        if only is not None:
            chosen = stem.with_suffix(".only")
            chosen.write_text("\n".join(sorted(only)))
            environment["ONLY"] = str(chosen)
        command = [python, "-m", "pytest", "-p", "recorder", "-p", "no:cacheprovider", "-o", "addopts=", "-q"]
        command += ["-W", "ignore::DeprecationWarning"]  # some suites make errors of them, and torch has new ones
        command += [*(["-k", suite.skips] if suite.skips else []), *suite.paths]
        task = self.progress.add_task(f"{suite.name}, {kind} {label}", total=None)
        for _ in range(MOST_CRASHES):
            with stem.with_suffix(".log").open("a") as log:
                process = subprocess.Popen(
                    [*map(str, command)],
                    cwd=source,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                how = self.wait(process, record, task)
            running = _running(record)
            if running is None:
                break
            with record.open("a") as file:
                file.write(json.dumps({"id": running, "outcome": "failed", "why": how}) + "\n")
        self.progress.remove_task(task)
        return _outcomes(record)

    def wait(self, process: subprocess.Popen[bytes], record: Path, task: TaskID) -> str:
        """Waits until the process ends, or kills it if the record stays as it is for too long; returns which it was."""
        size, changed = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            now = record.stat().st_size if record.exists() else 0
            if now != size:
                size, changed = now, time.monotonic()
                total = next((line["total"] for line in reversed(_lines(record)) if "total" in line), None)
                self.progress.update(task, completed=len(_outcomes(record)), total=total)
            elif time.monotonic() - changed > self.patience:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"hangs: killed after {self.patience:.0f} s"
        return f"crashes: the process ended with status {process.returncode}"


def _lines(record: Path) -> list[dict[str, Any]]:
    text = record.read_text() if record.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _outcomes(record: Path) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for line in _lines(record):
        if "outcome" in line and found.get(line["id"], Outcome("", "")).outcome != "failed":  # also if teardown passes
            found[line["id"]] = Outcome(line["outcome"], line["why"])
    return found


def _running(record: Path) -> str | None:
    """Returns the test that began last, if it has no outcome."""
    started = [line["started"] for line in _lines(record) if "started" in line]
    return started[-1] if started and started[-1] not in _outcomes(record) else None


def _reasons(row: dict[str, Any]) -> str:
    """Returns the distinct errors of a row, with the number of tests that each stands for."""
    counts: dict[str, int] = {}
    for why in row["failing"].values():
        text = why.replace("|", "/")[:120]
        counts[text] = counts.get(text, 0) + 1
    return "; ".join(f"{count}: {why}" for why, count in sorted(counts.items(), key=lambda each: -each[1]))


def write_page(page: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the rows between the marks of the page, with the versions."""
    lines = [
        f"torch {version('torch')}, Python {sys.version.split()[0]}:",
        "",
        "| Suite | Version | Date | Passed with torch's classes | Of these with drivetrain's | Why not |",
        "| --- | --- | --- | ---: | ---: | --- |",
        *(
            f"| {row['suite']} | {row['version']} | {row['date']} | {row['passed']} | {row['passed_swapped']} "
            f"| {_reasons(row)} |"
            for row in rows
        ),
    ]
    before, _, after = page.read_text().split(MARK)
    page.write_text(MARK.join([before, "\n" + "\n".join(lines) + "\n", after]))


def main() -> int:
    parser = argparse.ArgumentParser(
        "strangers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="names of suites; default: all")
    parser.add_argument("--folder", type=Path, help="run the suites of this folder instead, one per subfolder")
    parser.add_argument("--scratch", type=Path, default=Path("build/strangers"), help="default: %(default)s")
    parser.add_argument("--patience", type=float, default=300, help="seconds after which a test hangs; default: 300")
    parser.add_argument("--page", type=Path, help="write the table into this page, as docs/compatibility.md has it")
    options = parser.parse_args()
    known = in_folder(options.folder) if options.folder else PACKAGED
    unknown = {*options.suites} - {suite.name for suite in known}
    if unknown:
        parser.error(f"no suite is named {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in known)}")
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failures = []
    result = options.scratch / "result.json"
    found = {row["suite"]: row for row in json.loads(result.read_text())} if result.exists() else {}
    with Progress(*columns, console=console, transient=True) as progress:
        runner = Runner(options.scratch.resolve(), options.patience, progress)
        for name in options.suites or [suite.name for suite in known]:
            suite = next(suite for suite in known if suite.name == name)
            try:
                row = found[name] = runner.compare(suite)
            except (RuntimeError, StopIteration, subprocess.TimeoutExpired) as error:
                failures.append(f"{suite.name} did not run: {error}")
                continue
            console.print(f"{name}: {row['passed_swapped']} of {row['passed']}")
            result.write_text(json.dumps([*found.values()], indent=1))
    rows = sorted(found.values(), key=lambda row: str(row["suite"]).lower())
    table = Table("Suite", "Version", "Passed with torch's", "Of these with drivetrain's", "Why not")
    for row in rows:
        table.add_row(row["suite"], row["version"], str(row["passed"]), str(row["passed_swapped"]), _reasons(row))
    console.print(table)
    for failure in failures:
        console.print(failure, style="red")
    if options.page:
        write_page(options.page, rows)
    return 1 if failures or any(row["failing"] or not row["passed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
