"""Injects every fault, examines many hosts, and repeats healthy examinations: `make doctor-faults`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from faults.hosts import Hosts

from .faults import FAULTS, on_hosts, shape
from .launch import Start, examine, ranks

_ONE_HOST_S, _MANY_HOSTS_S = 30, 120
_LEAST_NAMED = 18


def main() -> int:
    parser = argparse.ArgumentParser(prog="make doctor-faults", description="What drivetrain doctor names.")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="this one only; may be repeated")
    parser.add_argument("--hosts", type=int, default=32, help="simulated hosts; 0: none (default: %(default)s)")
    parser.add_argument("--healthy", type=int, default=50, help="healthy examinations (default: %(default)s)")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    table = Table("what", "named", "seconds", "limit")
    is_met = [
        _faults(arguments.fault or list(FAULTS), table, console),
        _many_hosts(arguments.hosts, table, console) if arguments.hosts else True,
        _healthy(arguments.healthy, table, console) if arguments.healthy else True,
    ]
    console.print(table)
    return 0 if all(is_met) else 1


def _faults(names: Sequence[str], table: Table, console: Console) -> bool:
    num_named, slowest = 0, 0.0
    for name in names:
        report, *expected = FAULTS[name]()
        is_named = report.named(*expected)
        num_named += is_named
        slowest = max(slowest, report.seconds)
        table.add_row(name.replace("_", " "), "yes" if is_named else "NO", f"{report.seconds:.1f}", f"{_ONE_HOST_S}")
        if not is_named:
            console.print(f"{name}: expected {expected}, found {report.alarms()}", markup=False, highlight=False)
    table.add_row(f"{len(names)} faults", str(num_named), f"at most {slowest:.1f}", f"{_ONE_HOST_S}", style="bold")
    return num_named >= min(_LEAST_NAMED, len(names)) and slowest <= _ONE_HOST_S


def _many_hosts(count: int, table: Table, console: Console) -> bool:
    """Examines as many hosts: healthy, with a slow link, and with a host that spoils sums."""
    spoiled = count - 3
    spoils = (
        "from drivetrain.cli import collectives\n"
        f"plain = collectives.values_of\ncollectives.values_of = lambda rank_, n: plain(rank_, n) + (rank == {spoiled})"
    )
    is_met = True
    with Hosts(count) as hosts:
        cases = [
            ("healthy", "", None),
            ("one host spoils sums", spoils, ("all-reduce", f"it works without host-{spoiled}", "out of service")),
            ("slow link", "", ("links", f"rank {spoiled} on host-{spoiled}", "check cable")),
        ]
        for what, change, expected in cases:
            if what == "slow link":
                shape(hosts, spoiled, "rate", "20mbit", "burst", "256kb", "limit", "64mb")
            report = examine(on_hosts(hosts, change, ["--timeout", "60"]))
            is_right = not report.alarms() if expected is None else report.named(*expected)
            is_met &= is_right and report.seconds <= _MANY_HOSTS_S
            answer = ("no alarm" if expected is None else "yes") if is_right else "NO"
            table.add_row(f"{count} hosts: {what}", answer, f"{report.seconds:.1f}", f"{_MANY_HOSTS_S}")
            if not is_right:
                console.print(f"{what}: {report.alarms()}", markup=False, highlight=False)
    return is_met


def _healthy(count: int, table: Table, console: Console) -> bool:
    """Examines this machine in turn as one process and as two ranks."""
    alarms, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            starts = [Start()] if number % 2 else ranks(2)
            starts[0].arguments = ["--checkpoint", folder]
            report = examine(starts)
            alarms += bool(report.alarms())
            slowest = max(slowest, report.seconds)
            for alarm in report.alarms():
                console.print(f"healthy run {number}: {alarm}", markup=False, highlight=False)
    table.add_row(f"{count} healthy runs", f"{alarms} alarms", f"at most {slowest:.1f}", f"{_ONE_HOST_S}", style="bold")
    return alarms == 0


if __name__ == "__main__":
    sys.exit(main())
