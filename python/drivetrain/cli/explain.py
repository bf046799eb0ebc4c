"""Implements `drivetrain explain`, which finds the samples that make a training spike."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ..monitor.sinks.requirement import require
from ..spikes.plot import draw
from ..spikes.record import RecordedSteps
from ..spikes.search import FEWEST, Explanation, Runs, Sample, explain, replacements
from ..trial.runs import Runs as Processes
from ..trial.runs import Trial, TrialError

_MOST_SHOWN = 8


def run(args: argparse.Namespace) -> int:
    """Prints the step that spikes and its samples on rank 0.

    Returns:
        0 if samples explain the spike, 1 if none do or nothing spikes, and 2 if the script cannot be run.
    """
    if not Path(args.script).is_file():
        print(f"drivetrain explain: there is no file {args.script}", file=sys.stderr)
        return 2
    try:
        require("matplotlib", "--plot") if args.plot else None
    except ImportError as error:
        print(f"drivetrain explain: {error}", file=sys.stderr)
        return 2
    processes = Processes(Trial(args.script, args.arguments, args.steps, args.limit))
    try:
        with Console(stderr=True, quiet=processes.rank != 0).status("explain") as status:

            def once(num_steps: int, replaced: Sequence[Sample]) -> Runs:
                number = processes.num_runs + 1
                what = f"{len(replaced)} samples replaced" if replaced else "looks for a spike"
                status.update(f"run {number}: {what}")
                return _ranks(processes, args.step, num_steps, replaced)

            found = explain(once, args.steps, args.factor, args.step)
    except TrialError as error:
        print(f"drivetrain explain: rank {processes.rank}: {error}", file=sys.stderr)
        return 2
    if processes.rank == 0:
        if args.step and isinstance(found, Explanation) and found.first + found.spike.index + 1 != args.step:
            print(f"Nothing spikes at step {args.step}; this is the first that does.")
        print(described(found) if isinstance(found, Explanation) else _nothing(found))
        if isinstance(found, Explanation):
            if args.json:
                args.json.write_text(json.dumps(asdict(found)))
            if args.plot:
                draw(found, args.plot)
    return int(processes.rank == 0 and not (isinstance(found, Explanation) and found.guilty))


def _ranks(processes: Processes, spike: int | None, num_steps: int, replaced: Sequence[Sample]) -> list[RecordedSteps]:
    """Runs the script once on every rank, and returns all their records."""
    swaps = replacements(replaced, processes.rank)
    task = {"steps": num_steps, "spike": spike, "is_survey": not replaced, "replaced": swaps}
    mine = processes.start("drivetrain.spikes.script", task)
    ranks = [RecordedSteps.of(json.loads(one)) for one in processes.share(json.dumps(mine))]
    if not any(record.steps for record in ranks):
        raise TrialError(f"the script makes no optimizer step: {ranks[processes.rank].error}")
    return ranks


def _nothing(ranks: Runs) -> str:
    first, last = ranks[0].restored + 1, ranks[0].restored + len(ranks[0].steps)
    ended = f"\n{ranks[0].error}" if ranks[0].error else ""
    return (
        f"Nothing spikes in steps {first} to {last}. A spike needs {FEWEST} steps before it: --step begins with an "
        f"earlier checkpoint. --steps looks at more steps, and --factor finds smaller spikes.{ended}"
    )


def described(found: Explanation) -> str:
    """Returns what was found, for people."""
    step = found.first + found.spike.index + 1
    lines = [f"Step {step} spikes: {found.spike}."]
    if not found.num_tried:
        lines.append("Its samples are unknown: no DataLoader over a dataset with indices was used before it.")
    elif not found.guilty:
        lines.append(
            f"No sample explains it: it stays with all {found.num_tried} samples of its last steps replaced by earlier "
            f"ones. Look at the last learning rates, {', '.join(f'{rate:g}' for rate in found.rates)}, and "
            "at the parameters before it."
        )
    else:
        several = len(found.guilty) > 1
        lines.append(f"It goes without {f'these {len(found.guilty)} samples' if several else 'this sample'}:")
        for one in found.guilty[:_MOST_SHOWN]:
            name = found.names.get(str(one.index))
            place = f"rank {one.rank}, step {found.first + one.step + 1}, batch {one.micro_batch + 1} of the step"
            lines.append(f"  index {one.index}{f' ({name})' if name else ''}: {place}, position {one.position}")
        if len(found.guilty) > _MOST_SHOWN:
            lines.append(f"  and {len(found.guilty) - _MOST_SHOWN} more")
        indices = sorted({one.index for one in found.guilty})
        lines.append(
            f"With others in their places, the loss is {found.after[0]:.4g} and the gradient norm {found.after[1]:.4g}."
        )
        lines.append(f"To train without: dataset = drivetrain.data.LeaveOut(dataset, {indices})")
    lines.append(f"This took {found.num_runs} runs of the script, which have written nothing.")
    return "\n".join(lines)
