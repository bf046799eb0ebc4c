"""Ablates the solver of activation budgets: planned times with each of its parts left out.

The cases are the models of `benchmarks/run.py activations` at three budgets each. Every model is profiled once on this
machine, with one thread and in its CPU time. Each case is then solved with the whole solver and without one part.
"""

import json
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from drivetrain import _C
from drivetrain.bench.measure import keep_freed_memory
from drivetrain.budget.trace import STORAGE_FORMATS, BackwardUse, profile

from .activation_models import ModelCase, cases
from .activations import SHARES, Variant, seconds_of

PARTS = ("segments", "min cut", "local search")
WHOLE = "whole solver"


class Recorded(NamedTuple):
    """A model's trace, as the solver takes it, and the figures that plans of it are compared with."""

    name: str
    trace: tuple[list[Any], list[Any], list[BackwardUse]]
    unplanned_bytes: int
    step_seconds: float


@dataclass
class Planned:
    """The result of one solver for one case; None where the solver finds no plan that fits."""

    extra_seconds: float | None  # time that the plan adds to a step
    extra_share: float | None  # of the step without a budget
    total_seconds: float | None  # the step and the extra seconds
    total_ratio: float | None  # of total_seconds, this solver's to the whole solver's
    smallest_bytes: int  # the smallest budget that this solver can fulfill


@dataclass
class CaseResult:
    """One case: a model, a budget as percent of the unplanned bytes, and what each solver plans."""

    model: str
    percent: int
    num_ops: int
    step_seconds: float
    planned: dict[str, Planned]


def run(json_file: Path | None) -> int:
    """Profiles the models, solves every case with and without each part, and prints a table; returns exit code 0."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        results = [result for recorded in recorded_models() for result in solved_cases(recorded)]
    finally:
        torch.set_num_threads(before)
    _print_table(results)
    if json_file is not None:
        facts = {"torch": torch.__version__, "isa": _C.isa(), "machine": platform.machine()}
        json_file.write_text(json.dumps({**facts, "ablation": [asdict(result) for result in results]}, indent=2) + "\n")
    return 0


def recorded_models() -> Iterator[Recorded]:
    """Profiles the models one after another."""
    return (_recorded(case) for case in cases())


def solved_cases(recorded: Recorded) -> Iterator[CaseResult]:
    """Solves one model at each of the budgets."""
    for percent in SHARES:
        budget = max(recorded.unplanned_bytes * percent // 100, 1)
        whole = _C.activation_solve(*recorded.trace, budget)
        planned = {WHOLE: _planned(whole, whole, recorded.step_seconds)}
        for part in PARTS:
            found = _C.activation_solve(*recorded.trace, budget, without=[part])
            planned[f"without {part}"] = _planned(found, whole, recorded.step_seconds)
        yield CaseResult(recorded.name, percent, len(recorded.trace[1]), recorded.step_seconds, planned)


def _planned(found: dict[str, object], whole: dict[str, object], step_seconds: float) -> Planned:
    smallest, extra, extra_of_whole = found["smallest_bytes"], found["seconds"], whole["seconds"]
    assert isinstance(smallest, int)
    assert isinstance(extra, float)
    assert isinstance(extra_of_whole, float)
    if not found["is_feasible"]:
        return Planned(None, None, None, None, smallest)
    total, total_of_whole = step_seconds + extra, step_seconds + extra_of_whole
    ratio = total / total_of_whole if whole["is_feasible"] else None
    return Planned(extra, extra / step_seconds, total, ratio, smallest)


def _recorded(case: ModelCase) -> Recorded:
    variant = Variant.of("profiled", case)
    for _ in range(2):
        variant.step()
    step_seconds = statistics.median(seconds_of(variant.step) for _ in range(3))
    trace, unplanned_bytes = profile(variant.model, variant.step, [STORAGE_FORMATS["bits"]])
    return Recorded(case.name, trace.for_solver(), unplanned_bytes, step_seconds)


def _print_table(results: list[CaseResult]) -> None:
    ways = list(results[0].planned)
    table = Table(
        title="Planned time of a step: milliseconds, added share of the step, and change of the planned time",
        title_justify="left",
    )
    for column in ("model and budget", "step", *ways):
        table.add_column(column, justify="left" if column == "model and budget" else "right")
    for result in results:
        cells = [_cell(result.planned[way], is_whole=way == WHOLE) for way in ways]
        table.add_row(f"{result.model}, {result.percent} %", f"{1e3 * result.step_seconds:.0f} ms", *cells)
    Console(width=None if Console().is_terminal else 160).print(table)


def _cell(planned: Planned, *, is_whole: bool) -> str:
    if planned.total_seconds is None or planned.extra_share is None:
        return "no plan fits"
    figures = f"{1e3 * planned.total_seconds:.1f} ms, +{planned.extra_share:.2%}"
    if is_whole or planned.total_ratio is None:
        return figures
    return f"{figures}, {planned.total_ratio - 1:+.2%}"
