"""Runs many rounds of every fault with a progress bar, and prints a table: `make faults`."""

import argparse
import random
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .harness import Harness, Outcome, transports
from .plan import FAULTS, SCALE


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults", description="Shows what becomes of the ranks when one fails.")
    parser.add_argument("--rounds", type=int, default=100, help="of each fault (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the first round, the next have the next ones (default: drawn)")
    parser.add_argument("--fault", action="append", choices=[*FAULTS, "scale"], help="this one only; may be repeated")
    parser.add_argument("--transport", action="append", choices=transports(), help="this one only; may be repeated")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.ranks < 2:
        parser.error("--rounds must be at least 1, --ranks at least 2")
    faults, choices = arguments.fault or [*FAULTS, "scale"], arguments.transport or transports()
    has_scale = "scale" in faults
    faults = [fault for fault in faults if fault in FAULTS]
    first = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    console = Console(width=None if sys.stdout.isatty() else 120)
    seeds = range(first, first + arguments.rounds)
    console.print(f"{arguments.ranks} ranks, {len(seeds)} rounds of each fault, seeds {seeds[0]} to {seeds[-1]}")

    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    skipped: dict[str, str] = {}
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
    begin = time.monotonic()
    harness = Harness()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        skipped.update({fault: why for fault in faults if (why := harness.why_not(fault))})
        todo = [(fault, choice) for fault in faults if fault not in skipped for choice in choices]
        task = bar.add_task("", total=len(todo) * len(seeds))
        for fault, choice in todo:
            bar.update(task, description=f"{fault}, {choice}")
            for seed in seeds:
                outcome = harness.run(fault, seed, choice, arguments.ranks)
                outcomes.setdefault((fault, choice), []).append(outcome)
                if outcome.problems:
                    console.print(outcome.report(), markup=False, highlight=False)
                bar.advance(task)
        if has_scale:  # once: it takes a minute or two
            bar.update(task, description="64 ranks", total=len(todo) * len(seeds) + 1)
            outcome = harness.run_scale(first)
            outcomes[("scale", outcome.round.transport)] = [outcome]
            if outcome.problems:
                console.print(outcome.report(), markup=False, highlight=False)
            bar.advance(task)
    console.print(table(outcomes, time.monotonic() - begin))
    for fault, why in skipped.items():
        console.print(f"[yellow]skipped:[/] {fault}: {why}")
    return int(any(outcome.problems for rounds in outcomes.values() for outcome in rounds))


def table(outcomes: dict[tuple[str, str], list[Outcome]], seconds: float) -> Table:
    result = Table(title=f"faults, in {seconds:.0f} s", title_justify="left")
    for column in ("fault", "transport", "rounds", "passed", "slowest error", "timeout"):
        result.add_column(column, justify="left" if column in ("fault", "transport") else "right")
    for (fault, transport), rounds in outcomes.items():
        passed = sum(not outcome.problems for outcome in rounds)
        slowest = max(outcome.seconds for outcome in rounds)
        result.add_row(
            FAULTS.get(fault, SCALE),
            transport,
            str(len(rounds)),
            f"[{'green' if passed == len(rounds) else 'red'}]{passed}",
            # A full /dev/shm is no error.
            "none" if fault == "full-shm" else f"{slowest:.2f} s",
            "" if fault == "full-shm" else f"{rounds[0].round.timeout_s:g} s",
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
