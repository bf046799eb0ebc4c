"""Implements `drivetrain monitor`, which shows where the time of recorded runs went, and compares them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..monitor import Summary


def run(args: argparse.Namespace) -> int:
    """Prints the tables. Returns 0, or 2 if a file is wrong."""
    from ..monitor.summary import compare, names_of

    try:
        summaries = [_summary_of(file, name) for file, name in zip(args.files, names_of(args.files), strict=True)]
    except (OSError, ValueError) as error:
        print(f"drivetrain monitor: {error}", file=sys.stderr)
        return 2
    print("\n\n".join(map(str, summaries)))
    if len(summaries) > 1:
        print(f"\n{compare(summaries)}")
    return 0


def _summary_of(file: Path, name: str) -> Summary:
    from ..monitor import read_events, summarize

    events = read_events(file)
    if not events:
        raise ValueError(f"{file} has no event yet: no monitor has written to it")
    return summarize(events, name=name)
