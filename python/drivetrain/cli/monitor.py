"""Implements `drivetrain monitor`, which shows where the time of recorded runs went, and compares them."""

from __future__ import annotations

import argparse
import sys


def run(args: argparse.Namespace) -> int:
    """Prints the tables. Returns 0, or 2 if a file is wrong."""
    from ..monitor import read_events, summarize
    from ..monitor.summary import compare, names_of

    try:
        summaries = []
        for file, name in zip(args.files, names_of(args.files), strict=True):
            if not (events := read_events(file)):
                raise ValueError(f"{file} has no event yet: no monitor has written to it")
            summaries.append(summarize(events, name=name))
    except (OSError, ValueError) as error:
        print(f"drivetrain monitor: {error}", file=sys.stderr)
        return 2
    print("\n\n".join(map(str, summaries)))
    if len(summaries) > 1:
        print(f"\n{compare(summaries)}")
    return 0
