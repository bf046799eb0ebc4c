"""Installs the wheel for each pair of Python and torch, runs a part of the suite there, and prints a table.

python tests/matrix.py                                       the oldest and the newest of both
python tests/matrix.py --python 3.12 --torch 2.12.1 2.13.0   other pairs
python tests/matrix.py --python /opt/python3.14/bin/python3 --keep

For each Python, tools/wheels.py builds one wheel for these releases of torch. Each pair gets an environment of 2 to
6 GB in build/matrix, which is removed after its tests unless --keep is given. With nvcc on PATH, the wheel has CUDA
kernels, and each pair takes a CUDA build of torch. No GPU is needed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.14")
TORCHES = ("2.11.0", "2.14.1")
# What each row of the table runs: at most four minutes on two cores.
PARTS = {
    "optimizers": ("optim/test_optim.py", "optim/test_wrappers.py"),
    "DDP": ("ddp/test_ddp.py", "ddp/test_unusual_wrapping.py", "ddp/test_bucket_planner.py"),
    "accumulation": ("ddp/test_accumulate.py", "grad"),
    "activations": (
        "recompute",
        *(f"budget/test_{name}.py" for name in ("bits", "errors", "hooks", "memory", "out_of_memory")),
        *(f"budget/test_{name}.py" for name in ("plans", "profile", "threads")),
    ),
    "checkpoint, resume": (
        "checkpointing/test_checkpointer.py",
        "checkpointing/test_resume.py",
        "data/test_sampler.py",
    ),
    "run": ("cli/test_swap.py", "package/test_stub.py"),
}


@dataclass
class Row:
    """What one pair of Python and torch has shown."""

    python: str
    torch: str
    install: float = 0.0  # seconds from `pip install drivetrain` to the end of `drivetrain doctor`
    passed: dict[str, str] = field(default_factory=dict)  # by part
    minutes: float = 0.0
    failure: str = ""

    def cells(self) -> list[str]:
        if self.failure:
            return [self.python, self.torch, self.failure]
        parts = [self.passed.get(part, "none") for part in PARTS]
        return [self.python, self.torch, f"{self.install:.1f} s", *parts, f"{self.minutes:.1f} min"]


def find_python(wanted: str) -> Path | None:
    """Returns the Python of a path, or of a version such as "3.12" on PATH or among pyenv's, or None."""
    if "/" in wanted:
        return Path(wanted)
    on_path = shutil.which(f"python{wanted}")
    of_pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{wanted}.*/bin/python"))
    for python in [*([Path(on_path)] if on_path else []), *of_pyenv]:
        # pyenv has a program for each version on PATH, which only says which versions are selected.
        if subprocess.run([python, "-c", ""], capture_output=True, timeout=60, check=False).returncode == 0:
            return python
    return None


def run(*command: str | Path, log: Path, limit: float, **environment: str) -> None:
    """Runs a command and adds its output to a log. Raises RuntimeError with the log's end if it fails."""
    with log.open("a") as output:
        print("$", *command, file=output, flush=True)
        try:
            status: object = subprocess.run(
                list(map(str, command)),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=tempfile.gettempdir(),  # Python imports the installed package, not the checkout's
                env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
                timeout=limit,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"no end after {limit:.0f} s"
    if status != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{command[0]} ended with {status}; the end of {log}:\n{end}")


def examine(row: Row, python: Path, wheels: Path, folder: Path, has_cuda: bool) -> None:
    """Installs the wheel into a fresh environment with this torch, and fills the row with what the tests show."""
    log, report = (folder.with_name(f"{folder.name}.{ending}") for ending in ("log", "xml"))
    tests = REPOSITORY / "tests"
    log.unlink(missing_ok=True)
    report.unlink(missing_ok=True)
    own, only_wheels = folder / "bin/python", ("--no-index", "--find-links", wheels)
    run(python, "-m", "venv", "--clear", folder, log=log, limit=300)
    pip = (own, "-m", "pip", "install", "--quiet")
    # The third sign excludes a CPU build that an index offers under that number.
    run(*pip, f"torch={'==' if has_cuda else '='}{row.torch}", "numpy", "rich", "tomli", log=log, limit=3600)
    begin = time.monotonic()
    run(*pip, *only_wheels, "drivetrain", log=log, limit=300, PATH=str(own.parent), CXX="/nonexistent")
    run(own, "-m", "drivetrain", "doctor", log=log, limit=300)
    row.install = time.monotonic() - begin
    run(*pip, "--find-links", wheels, f"torch=={row.torch}", "drivetrain[test]", "torchdata>=0.10", log=log, limit=3600)
    run(own, tests / "wheel_smoke.py", *(["--cuda"] if has_cuda else []), log=log, limit=600)
    files = [tests / file for files in PARTS.values() for file in files]
    options = ("-q", "-n", "2", "--dist", "loadfile", "-m", "not sanitizer", "-c", REPOSITORY / "pyproject.toml")
    begin = time.monotonic()
    try:
        run(
            *(own, "-m", "pytest", *options, "--rootdir", REPOSITORY, "--junitxml", report, *files),
            log=log,
            limit=1800,
            PYTHONPATH=str(tests),
        )
    finally:
        row.minutes = (time.monotonic() - begin) / 60
        if report.exists():
            row.passed = by_part(report)


def by_part(report: Path) -> dict[str, str]:
    """Returns the number of tests that passed for each part, and of those that did not, from pytest's report."""
    passed: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/")
        for part, files in PARTS.items():
            if any(f"tests/{each.removesuffix('.py')}" in file for each in files):
                kinds = {child.tag for child in case}
                passed[part] += not kinds & {"failure", "error", "skipped"}
                failed[part] += bool(kinds & {"failure", "error"})
    return {part: f"{passed[part]}" + (f", {failed[part]} failed" if failed[part] else "") for part in PARTS}


def snapshot(folder: Path) -> Path:
    """Copies what a build needs, so that wheels are of the same sources whatever is edited while they are built."""
    parts = ("csrc", "python", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")
    listed = subprocess.run(
        ["git", "-C", REPOSITORY, "ls-files", "-z", *parts], capture_output=True, text=True, check=True
    ).stdout
    shutil.rmtree(folder, ignore_errors=True)
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def table(rows: list[Row]) -> str:
    """Returns the rows as a table in Markdown."""
    head = ["Python", "torch", "install and doctor", *PARTS, "tests took"]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)], *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS, help=f"versions or paths; default: {' '.join(PYTHONS)}")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="RELEASE", help=f"default: {' '.join(TORCHES)}")
    parser.add_argument(
        "--architectures", default="90", help="of GPUs, for CUDA kernels where there is nvcc; default: 90"
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    args = parser.parse_args()
    work = REPOSITORY / "build/matrix"
    source = snapshot(work / "source")
    kernels: tuple[str, ...] = ()  # the wheels of all Pythons may have the same library
    has_cuda = shutil.which("nvcc") is not None
    cuda = f"--architectures={args.architectures}" if has_cuda else "--no-cuda"
    rows = []
    for wanted in args.python:
        python = find_python(wanted)
        if python is None:
            rows.append(
                Row(wanted, "any", failure=f"no python{wanted} on PATH; install it, or pass its path to --python")
            )
            continue
        wheels = work / f"wheels-{wanted.replace('/', '-')}"
        shutil.rmtree(wheels, ignore_errors=True)
        print(f"building the wheel for Python {wanted}", flush=True)
        build = [
            python,
            REPOSITORY / "tools/wheels.py",
            cuda,
            "--source",
            source,
            "--out",
            wheels,
            *kernels,
            "--torch",
            *args.torch,
        ]
        subprocess.run(build, check=True, timeout=3600)
        built = (REPOSITORY / "build/wheels").glob("cp*/merged/drivetrain/libdrivetrain_kernels.so")
        kernels = ("--kernels", str(max(built, key=lambda path: path.stat().st_mtime)))
        for release in args.torch:
            row = Row(wanted, release)
            rows.append(row)
            folder = work / f"{wanted.replace('/', '-')}-torch-{release}"
            print(f"testing Python {wanted} with torch {release}", flush=True)
            try:
                examine(row, python, wheels, folder, has_cuda)
            except RuntimeError as error:
                print(error, flush=True)
                row.failure = "" if row.passed else "failed, see above"
            if not args.keep:
                shutil.rmtree(folder, ignore_errors=True)
            print(table([row]), flush=True)
    print(table(rows))
    return int(any(row.failure or "failed" in " ".join(row.cells()) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
