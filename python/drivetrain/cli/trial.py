"""Implements `drivetrain try`, which compares a script's first steps under torch and under drivetrain."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..memory import bytes_of
from ..trial.record import RunRecord, Variant
from ..trial.report import TrialReport, Tried
from ..trial.resized import describe, resized
from ..trial.runs import Runs, Trial, TrialError


def run(args: argparse.Namespace) -> int:
    """Prints the table and the verdict on rank 0.

    Returns:
        0 if drivetrain trains the same as torch, 1 if not, and 2 if the script cannot be run.
    """
    if not Path(args.script).is_file():
        print(f"drivetrain try: there is no file {args.script}", file=sys.stderr)
        return 2
    if args.budget is not None:
        try:
            bytes_of(args.budget, 1, "--budget")
        except ValueError as error:
            print(f"drivetrain try: {error}", file=sys.stderr)
            return 2
    trial = Trial(args.script, args.arguments, args.steps, args.limit)
    if args.ranks is not None:
        return _compare_ranks(trial, args.ranks)
    runs = Runs(trial)
    try:
        report = _tried(runs, args)
    except TrialError as error:
        print(f"drivetrain try: rank {runs.rank}: {error}", file=sys.stderr)
        return 2
    if runs.rank == 0:
        print(report)
        if args.json:
            args.json.write_text(json.dumps(asdict(report)))
    return int(report.fails() and runs.rank == 0)  # a launcher ends rank 0 once another rank has failed


def _compare_ranks(trial: Trial, sizes: list[int]) -> int:
    """Prints if the script gives the same bits on these numbers of ranks."""
    if "RANK" in os.environ:
        print("drivetrain try: --ranks starts the ranks itself: leave torchrun out", file=sys.stderr)
        return 2
    try:
        runs = resized(trial, sizes)
    except TrialError as error:
        print(f"drivetrain try: {error}", file=sys.stderr)
        return 2
    print(describe(runs))
    return int(any(run.parting for run in runs))


def _variants(args: argparse.Namespace, world_size: int) -> list[Variant]:
    """Returns the columns of the table. In a single process only optimizers can be replaced."""
    variants = [Variant("drivetrain", {})] if world_size > 1 else []
    if args.optim or world_size == 1:
        variants.append(Variant("with --optim", {}, optim=True))
    formats = {name: bits for name in ("state_bits", "master_bits") if (bits := getattr(args, name)) is not None}
    if formats:
        named = " ".join(f"--{name.replace('_', '-')} {bits}" for name, bits in formats.items())
        variants.append(Variant(f"with {named}", {}, optim=True, formats=formats))
    if args.shard:
        variants.append(Variant(f"with --shard {args.shard}", {"shard": args.shard}, optim=args.optim))
    if args.budget:
        variants.append(Variant(f"with --budget {args.budget}", {}, optim=args.optim, budget=args.budget))
    return variants


def _tried(runs: Runs, args: argparse.Namespace) -> TrialReport:
    variants = _variants(args, runs.world_size)
    torchs = Variant("torch")
    console = Console(stderr=True, quiet=runs.rank != 0)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=3 + len(variants) + args.rounds * (1 + len(variants)))

        def one(variant: Variant, what: str, prints: bool = False, noise: float = 0.0) -> RunRecord:
            progress.update(bar, description=f"{variant.name}: {what}")
            record = runs.run(variant, prints=prints, noise=noise)
            progress.advance(bar)
            return record

        checked = one(torchs, "losses and gradients", prints=True)
        if not checked.steps:
            raise TrialError(f"{args.script} makes no optimizer step under torch: {checked.error}")
        report = TrialReport(
            Tried(torchs, checked),
            [one(torchs, "the same again", prints=True), one(torchs, "with rounding", prints=True, noise=1.0)],
            [Tried(variant, one(variant, "losses and gradients", prints=True)) for variant in variants],
        )
        said = enumerate(runs.share(report.failures()))
        report.elsewhere = {rank: text for rank, text in said if text and rank != runs.rank}
        if not report.fails():
            for number in range(1, args.rounds + 1):
                for tried in (report.torchs, *report.others):
                    tried.timed.append(one(tried.variant, f"round {number} of {args.rounds}"))
    return report
