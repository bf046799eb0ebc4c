"""Implements `drivetrain monitor`, which shows where the time of recorded runs went, and compares them."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..monitor import Summary

_LIVE_PERIOD_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments to its parser."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSONL files of drivetrain.Monitor; several are compared"
    )
    parser.add_argument("--live", action="store_true", help="update the table of one file until its run ends")


def run(args: argparse.Namespace) -> int:
    """Prints the tables. Returns 0, or 2 if a file or an argument is wrong."""
    from ..monitor.summary import compare, names_of

    try:
        if args.live:
            if len(args.files) > 1:
                raise ValueError("--live takes one file: rank 0's")
            _follow(args.files[0])
        summaries = [_summary_of(file, name) for file, name in zip(args.files, names_of(args.files), strict=True)]
        print("\n\n".join(map(str, summaries)))
        if len(summaries) > 1:
            print(f"\n{compare(summaries)}")
    except (OSError, ValueError) as error:
        print(f"drivetrain monitor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _summary_of(file: Path, name: str) -> Summary:
    from ..monitor import read_events, summarize

    events = read_events(file)
    if not events:
        raise ValueError(f"{file} has no event yet: no monitor has written to it")
    return summarize(events, name=name)


def _follow(file: Path) -> None:
    """Shows the table of a run that is in progress, until its last event."""
    from rich.live import Live
    from rich.text import Text

    from ..monitor import read_events, summarize

    with Live(auto_refresh=False, transient=True) as live:
        while True:
            events = read_events(file)
            live.update(Text(str(summarize(events, name=file.stem))), refresh=True)
            if events and events[-1]["type"] == "end":
                return
            time.sleep(_LIVE_PERIOD_S)
