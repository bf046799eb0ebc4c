"""Builds and tests the package for aarch64 under qemu, and prints a table of the suites: `make test-aarch64`.

qemu takes 10 to 30 times as long as the processor, and a process that imports torch takes half a minute. So a run has
the files that reach the parts which depend on the processor: kernels, formats, files and shared memory. WHOLE=1 runs
the whole folders. Arguments name suites: `make test-aarch64 ARGS="bits native"`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from aarch64.machine import EMULATOR, REPOSITORY, Machine, require_tools
from effort import IS_WHOLE

# The part of each folder that runs by default, and the whole.
SUITES = {
    "optimizer": (
        ("optim/test_optim.py", "optim/test_lamb.py", "optim/test_adafactor.py", "optim/test_special_values.py"),
        ("optim",),
    ),
    "formats": (
        ("optim/test_float8_states.py", "saved_tensors/test_pack.py", "grad/test_main_grads.py"),
        ("optim/test_precision.py", "saved_tensors", "grad"),
    ),
    "checkpoint": (
        ("checkpointing/test_identity.py", "checkpointing/test_encoding.py", "checkpointing/test_damage.py"),
        ("checkpointing",),
    ),
    "shared memory": (("ddp/test_shm.py", "ddp/test_wire.py"), ("ddp",)),
}
# With SVE, and the vectors of a Graviton3. torch itself runs on a processor without, which qemu emulates faster.
WITH_SVE = {"QEMU_CPU": "max,pauth-impdef=on,sve-default-vector-length=32"}


class Result(NamedTuple):
    """Counts the tests of a suite; `text` is shown if any failed."""

    passed: int
    failed: int
    skipped: int
    text: str


def output(command: list[str | Path], **variables: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "tests"), "OMP_WAIT_POLICY": "passive", **variables}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def run_native(machine: Machine) -> Result:
    status, text = output([EMULATOR, "-L", machine.root, machine.folder / "native/native_tests"], **WITH_SVE)
    return Result(int(status == 0), int(status != 0), 0, text)


def run_model(machine: Machine) -> Result:
    status, text = output([machine.folder / "native-here/memory_order"])
    return Result(int(status == 0), int(status != 0), 0, text)


def hashes(command: list[str | Path], **variables: str) -> dict[str, dict[str, str]]:
    """Returns the hash of each computation, by instruction set."""
    status, text = output(command, **variables)
    if status != 0:
        sys.exit(text)
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if line.count("\t") == 2:
            isa, value, what = line.split("\t")
            found.setdefault(isa, {})[what] = value
    return found


def run_bits(machine: Machine) -> Result:
    """Compares what the kernels compute on this processor and on aarch64, with every instruction set of both."""
    of_sums = [EMULATOR, "-L", machine.root, machine.folder / "native/kernel_bits"]
    here = [hashes([sys.executable, "-m", "aarch64.bits"]), hashes([machine.folder / "native-here/kernel_bits"])]
    there = [hashes([machine.python, "-m", "aarch64.bits"], **WITH_SVE), hashes(of_sums, **WITH_SVE)]
    passed, different = 0, []
    for ours, theirs in zip(here, there, strict=True):
        expected = ours["baseline"]
        for isa, found in [*ours.items(), *theirs.items()]:
            wrong = [what for what in {**expected, **found} if expected.get(what) != found.get(what)]
            different += [f"{isa}: {what}" for what in wrong]
            passed += len(expected) - len(wrong)
    return Result(passed, len(different), 0, "other bits than the baseline here:\n" + "\n".join(different))


def run_tests(machine: Machine, paths: tuple[str, ...]) -> Result:
    report = machine.folder / "report.xml"
    report.unlink(missing_ok=True)
    processes = ["--numprocesses", "2", "--dist", "loadfile", "--max-worker-restart", "0", "-p", "no:cacheprovider"]
    command = [machine.python, "-m", "pytest", "-q", *processes, f"--junitxml={report}", "-m", "not sanitizer"]
    _, text = output([*command, *(f"tests/{path}" for path in paths)])
    if not report.exists():
        return Result(0, 1, 0, text)
    suite = ElementTree.parse(report).getroot()[0]
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return Result(total - failed - skipped, failed, skipped, text)


# Suites that are no tests of pytest: the native tests, the orders of atomics on a model of memory, and the same bits.
OTHERS = {"native": run_native, "memory order": run_model, "bits": run_bits}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-aarch64", description=__doc__)
    names = (*OTHERS, *SUITES)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of: {', '.join(names)}")
    parser.add_argument("--torch", default="torch==2.13.0", help="a requirement of pip (default: %(default)s)")
    arguments = parser.parse_args()
    require_tools()
    machine = Machine(REPOSITORY / "build/aarch64", arguments.torch)
    begin = time.monotonic()
    machine.make()
    print(f"built in {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
    rows = []
    for name in arguments.suites or names:
        begin = time.monotonic()
        result = OTHERS[name](machine) if name in OTHERS else run_tests(machine, SUITES[name][int(IS_WHOLE)])
        if result.failed:
            print(result.text, flush=True)
        minutes = (time.monotonic() - begin) / 60
        rows.append((name, result.passed, result.failed, result.skipped, minutes))
        print(f"{name}: {result.passed} passed, {result.failed} failed", flush=True)
    print(f"\n{'suite':16}{'passed':>8}{'failed':>8}{'skipped':>9}{'minutes':>9}")
    for name, passed, failed, skipped, minutes in rows:
        print(f"{name:16}{passed:8}{failed:8}{skipped:9}{minutes:9.1f}")
    return int(any(row[2] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
