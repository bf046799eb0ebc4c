"""Implements `drivetrain monitor`, which shows where the time of recorded runs went, and compares them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
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
    parser.add_argument(
        "--stacks", action="store_true", help="print the stacks of all ranks of a run that is in progress on this host"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the steps into an .svg or .png file")


def run(args: argparse.Namespace) -> int:
    """Prints the tables, or the stacks.

    Returns:
        0; 1 if a rank gave no stacks; 2 if a file or an argument is wrong.
    """
    try:
        if (args.live or args.stacks) and len(args.files) > 1:
            raise ValueError(f"{'--live' if args.live else '--stacks'} takes one file: rank 0's")
        if args.plot is not None and args.plot.suffix not in (".svg", ".png"):
            raise ValueError(f"--plot is {args.plot}, expected a name that ends in .svg or .png")
        if args.stacks:
            return _print_stacks(args.files[0])
        if args.live:
            _follow(args.files[0])
        _show(args.files)
        if args.plot is not None:
            from ..monitor.plot import draw

            draw(args.files, args.plot)
            print(f"wrote {args.plot}")
    except (OSError, ValueError, ImportError) as error:
        print(f"drivetrain monitor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def _show(files: Sequence[Path]) -> None:
    from rich.console import Console

    from ..monitor.summary import compare, names_of

    console = Console()
    console.width = console.width if console.is_terminal else 120
    summaries = [_summary_of(file, name) for file, name in zip(files, names_of(files), strict=True)]
    for summary in summaries:
        # An empty table would say nothing.
        console.print(summary.table() if summary.num_steps else str(summary), markup=False, highlight=False)
    if len(summaries) > 1:
        console.print(compare(summaries))


def _print_stacks(file: Path) -> int:
    from ..monitor.stacks import files_of_ranks, report

    answers = [report(one) for one in files_of_ranks(file)]
    print("\n\n".join(text for text, _ in answers))
    return 0 if all(has_answered for _, has_answered in answers) else 1


def _summary_of(file: Path, name: str) -> Summary:
    from ..monitor import read_events, summarize

    events = read_events(file)
    if not events:
        raise ValueError(f"{file} has no event yet: no monitor has written to it")
    return summarize(events, name=name)


def _follow(file: Path) -> None:
    """Shows the table of a run that is in progress, until its last event."""
    from rich.live import Live

    from ..monitor import read_events, summarize

    with Live(auto_refresh=False, transient=True) as live:
        while True:
            events = read_events(file)
            live.update(summarize(events, name=file.stem).table(), refresh=True)
            if events and events[-1]["type"] == "end":
                return
            time.sleep(_LIVE_PERIOD_S)
