"""Runs a script on several numbers of ranks for `drivetrain try --ranks`, and finds where their bits part."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..notebook import text_table
from .record import ModuleCall, RunRecord, Variant
from .runs import Trial, TrialError, free_port, run

_MEETING_S = 120.0


@dataclass(frozen=True)
class Resized:
    """The run of a script on one number of ranks."""

    size: int
    record: RunRecord  # of rank 0
    parting: str  # where it parts from the first run; "": nowhere


def resized(trial: Trial, sizes: Sequence[int]) -> list[Resized]:
    """Runs a script on each number of ranks, one after the other.

    Raises:
        TrialError: A rank has given no record, or made no step.
    """
    found: list[Resized] = []
    for size in sizes:
        record = _run_on(trial, size)
        if not record.steps:
            raise TrialError(f"{trial.script} makes no optimizer step on {size} ranks: {record.error}")
        found.append(Resized(size, record, _parting(found[0].record if found else record, record)))
    return found


def describe(runs: Sequence[Resized]) -> str:
    """Returns the table and the verdict."""
    rows = [[str(run.size), str(len(run.record.steps)), "differ" if run.parting else "the same"] for run in runs]
    parted = [run for run in runs if run.parting]
    lines = [text_table(["ranks", "steps", "bits"], rows)]
    lines += [f"On {run.size} ranks the run parts from the one on {runs[0].size} at {run.parting}." for run in parted]
    if parted:
        lines.append(
            "Pass logical_ranks to DistributedDataParallel and train with drivetrain.accumulate(). A difference that "
            "stays comes from an operation that depends on the rank or on the whole batch: docs/logical-ranks.md."
        )
    else:
        lines.append(f"Gradients and parameters are the same on {', '.join(str(run.size) for run in runs)} ranks.")
    return "\n".join(lines)


def _parting(first: RunRecord, other: RunRecord) -> str:
    """Names the first difference; of gradients the last parameter's, with which backward begins."""
    for number, (one, same) in enumerate(zip(first.steps, other.steps, strict=False), 1):
        if difference := _first_difference(one.calls, same.calls):
            return f"step {number}, {difference}"
        for what, mine, theirs in (
            ("gradient of", one.gradients, same.gradients),
            ("parameter", one.parameters, same.parameters),
        ):
            # Text, in which nan is the same as nan.
            apart = [name for name in {**theirs, **mine} if repr(mine.get(name)) != repr(theirs.get(name))]
            if apart:
                return f"step {number}, {what} {apart[-1]!r} ({len(apart)} of {len(mine)} differ)"
    if len(first.steps) != len(other.steps):
        return f"step {min(len(first.steps), len(other.steps)) + 1}, which one of them does not make: {other.error}"
    return ""


def _run_on(trial: Trial, size: int) -> RunRecord:
    """Runs the script's first steps on new processes. Returns rank 0's record, with the calls of all ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_MEETING_S))
    port = str(free_port())
    world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    world["OMP_NUM_THREADS"] = "1"  # products of matrices may depend on it
    task = {"variant": asdict(Variant("drivetrain", {})), "prints": True, "calls": True, "noise": 0.0}
    task |= {"store": ("127.0.0.1", store.port) if size > 1 else None, "key": f"drivetrain-try/{size}"}
    own = [(world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, task) for rank in range(size)]
    ranks: list[RunRecord] = run("drivetrain.trial.script", trial, own, f" on {size} ranks")
    for step, *others in zip(*(rank.steps for rank in ranks), strict=False):
        step.calls += [call for other in others for call in other.calls]  # in the order of logical ranks
    return ranks[0]


def _first_difference(ones: Sequence[ModuleCall], others: Sequence[ModuleCall]) -> str:
    """Names the first difference between the calls of a step; "" if there is none."""
    for number, (one, other) in enumerate(zip(ones, others, strict=False)):
        if repr(one) != repr(other):  # Text, in which nan is the same as nan.
            number_of_pass = sum(call[0] == ones[0][0] for call in ones[: number + 1])
            return f"{one[0]} in forward pass {number_of_pass}"
    return "" if len(ones) == len(others) else "the number of calls of modules"
