"""Runs many rounds of kills, power cuts, flipped bits and signals with a progress bar: `make crashes`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from checkpoint_crashes import damage, harness, moves, resumes, signals, writes
from checkpoint_crashes.contents import Round, rounds_of

RECORDED_RUNS = 10
KINDS = [
    *("kill -9 of one rank", "kill -9 of one of two ranks", "kill -9, encrypted"),
    *("power cut", "power cut, encrypted", "flipped bit", "SIGTERM", "signal to a job with workers"),
    *("write between steps", "damage of files and their copies", "resume of a loop"),
    "move to other numbers of ranks",
]
SIGNALS_PER_ROUND = 10  # one signal for so many rounds of the other kinds, because each starts a training


def main() -> int:
    parser = argparse.ArgumentParser(prog="make crashes", description="Crashes saves at random points.")
    parser.add_argument("--rounds", type=int, default=1000, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the first round, the next have the next ones (default: drawn)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="this one only; may be repeated")
    parser.add_argument("--directory", type=Path, help="where the checkpoints are written (default: temporary files)")
    arguments = parser.parse_args()
    first = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    seeds = range(first, first + arguments.rounds)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"{len(seeds)} rounds of each kind, seeds {seeds[0]} to {seeds[-1]}")
    table = Table()
    for column in ("crash", "rounds", "crashed", "with problems", "seconds"):
        table.add_column(column, justify="left" if column == "crash" else "right")
    failed = False
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name, Progress(console=console) as progress:
        folder = Path(name)
        for kind, rounds in kinds(folder, seeds):
            if arguments.kind and kind not in arguments.kind:
                continue
            task = progress.add_task(kind, total=len(seeds))
            begin, crashed, bad, done = time.monotonic(), 0, 0, 0
            for seed, is_crash, problems in rounds:
                crashed += is_crash
                done += seed in seeds
                bad += bool(problems)
                for problem in problems:
                    console.print(f"{kind}, seed {seed}: {problem}", markup=False, highlight=False)
                progress.update(task, completed=done)
            table.add_row(kind, str(done), str(crashed), str(bad), f"{time.monotonic() - begin:.0f}")
            failed |= bad > 0
    console.print(table)
    return int(failed)


def kinds(folder: Path, seeds: range) -> Iterator[tuple[str, Iterator[Round]]]:
    """Yields each kind of crash with its rounds: (seed, whether the process crashed, problems)."""
    with harness.Server(harness.build_shim(folder)) as server:
        yield "kill -9 of one rank", harness.kill_rounds(server, folder, seeds, 1)
        yield "kill -9 of one of two ranks", harness.kill_rounds(server, folder, seeds, 2)
        yield "kill -9, encrypted", harness.kill_rounds(server, folder, seeds, 1, is_encrypted=True)
        directory, calls = harness.record_saves(server, folder, RECORDED_RUNS)
        encrypted = harness.record_saves(server, folder, RECORDED_RUNS, is_encrypted=True)
    yield "power cut", harness.cut_rounds(directory, calls, folder, seeds)
    yield "power cut, encrypted", harness.cut_rounds(*encrypted, folder, seeds, is_encrypted=True)
    yield "flipped bit", harness.flip_rounds(folder, seeds)
    yield "write between steps", writes.write_rounds(folder, seeds)
    yield "damage of files and their copies", damage.damage_rounds(folder, seeds)
    some = seeds[: -(-len(seeds) // SIGNALS_PER_ROUND)]
    yield "SIGTERM", rounds_of(signals.signal_round, folder, some)
    yield "signal to a job with workers", rounds_of(signals.group_round, folder, some)
    yield "resume of a loop", rounds_of(resumes.resume_round, folder, some)
    yield "move to other numbers of ranks", rounds_of(moves.move_round, folder, some)


if __name__ == "__main__":
    raise SystemExit(main())
