"""Injects every fault, examines many hosts, and repeats healthy examinations: `make doctor-faults`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from faults.hosts import Hosts

from .faults import FAULTS, on_hosts, shape
from .launch import Start, examine, ranks

_ONE_HOST_S, _MANY_HOSTS_S = 30, 120
_LEAST_NAMED = 18
_CASES = ("healthy", "one host spoils sums", "slow link")  # of many hosts

Row = dict[str, Any]  # what, whether the answer is right, seconds, and their limit


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make doctor-faults", description="Shows the faults that drivetrain doctor names."
    )
    parser.add_argument("--fault", action="append", choices=FAULTS, help="this one only; may be repeated")
    parser.add_argument("--faults", type=int, choices=(0, 1), default=1, help="0: no fault (default: 1)")
    parser.add_argument("--hosts", type=int, default=32, help="simulated hosts; 0: none (default: %(default)s)")
    parser.add_argument(
        "--case", action="append", choices=_CASES, help="of these hosts, this one only; may be repeated"
    )
    parser.add_argument("--healthy", type=int, default=50, help="healthy examinations (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows; rows of other parts there stay")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    parts: dict[str, list[Row]] = {}
    if arguments.faults:
        parts["faults"] = _faults(arguments.fault or list(FAULTS), console)
    if arguments.hosts:
        parts["hosts"] = _many_hosts(arguments.hosts, arguments.case or _CASES, console)
    if arguments.healthy:
        parts["healthy"] = _healthy(arguments.healthy, console)
    rows = [row for part in parts.values() for row in part]
    console.print(_table(rows))
    if arguments.json is not None:
        _write(arguments.json, parts)
    num_wrong = sum(not row["right"] for row in parts.get("faults", []))
    may_miss = max(0, len(parts.get("faults", [])) - _LEAST_NAMED) if arguments.fault is None else 0
    others = [row for name, part in parts.items() if name != "faults" for row in part]
    in_time = all(row["seconds"] <= row["limit"] for row in rows)
    return 0 if in_time and num_wrong <= may_miss and all(row["right"] for row in others) else 1


def _row(what: str, right: bool, seconds: float, limit: float) -> Row:
    return {"what": what, "right": right, "seconds": round(seconds, 2), "limit": limit}


def _table(rows: Sequence[Row]) -> Table:
    table = Table("what", "right", "seconds", "limit")
    for row in rows:
        table.add_row(row["what"], "yes" if row["right"] else "NO", f"{row['seconds']:.1f}", f"{row['limit']}")
    return table


def _write(path: Path, parts: dict[str, list[Row]]) -> None:
    """Writes the rows. They replace the file's earlier rows with the same names."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    facts = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    found: dict[str, list[Row]] = kept.get("doctor_faults", {})
    for name, rows in parts.items():
        by_name = {row["what"]: row for row in found.get(name, [])} | {row["what"]: row for row in rows}
        found[name] = list(by_name.values())
    path.write_text(json.dumps({**facts, "doctor_faults": found}, indent=2) + "\n")


def _faults(names: Sequence[str], console: Console) -> list[Row]:
    rows = []
    for name in names:
        report, *expected = FAULTS[name]()
        is_named = report.named(*expected)
        rows.append(_row(name.replace("_", " "), is_named, report.seconds, _ONE_HOST_S))
        if not is_named:
            console.print(f"{name}: expected {expected}, found {report.alarms()}", markup=False, highlight=False)
    return rows


def _many_hosts(count: int, cases: Sequence[str], console: Console) -> list[Row]:
    """Examines as many hosts: healthy, with a host that spoils sums, and with a slow link.

    Their ranks share the cores of one machine. So they measure links in turns, and their speeds are made up.
    """
    spoiled = count - 3
    # The better one of two measures counts, and no loss: other processes delay packets until TCP sends them again.
    in_turns = (
        "import fcntl\nfrom dataclasses import replace\nfrom drivetrain.cli import network, speed\n"
        "speed.flops_per_s = lambda: 1e11\nmeasure = network.measure_link\n"
        "def in_turn(*link):\n"
        f"    with open({__file__!r}) as file:\n"
        "        fcntl.flock(file, fcntl.LOCK_EX)\n"
        "        both = [measure(*link) for _ in range(2)]\n"
        "        return replace(max(both, key=lambda probe: probe.bytes_per_s), lost=0.0)\n"
        "network.measure_link = in_turn\n"
    )
    spoils = (
        "from drivetrain.cli import collectives\n"
        f"plain = collectives.values_of\ncollectives.values_of = lambda rank_, n: plain(rank_, n) + (rank == {spoiled})"
    )
    expected_of = {
        "one host spoils sums": ("all-reduce", f"it works without host-{spoiled}", "out of service"),
        "slow link": ("links", f"rank {spoiled} on host-{spoiled}", "check cable"),
    }
    rows = []
    with Hosts(count) as hosts:
        for case in cases:
            if case == "slow link":
                shape(hosts, spoiled, "rate", "20mbit", "burst", "256kb", "limit", "64mb")
            change = in_turns + (spoils if case == "one host spoils sums" else "")
            report = examine(on_hosts(hosts, change, ["--timeout", "60"]))
            is_right = report.named(*expected_of[case]) if case in expected_of else not report.alarms()
            rows.append(_row(f"{count} hosts: {case}", is_right, report.seconds, _MANY_HOSTS_S))
            if not is_right:
                console.print(f"{case}: {report.alarms()}", markup=False, highlight=False)
    return rows


def _healthy(count: int, console: Console) -> list[Row]:
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
    return [_row(f"{count} healthy runs, {alarms} with an alarm", alarms == 0, slowest, _ONE_HOST_S)]


if __name__ == "__main__":
    sys.exit(main())
