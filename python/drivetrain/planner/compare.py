"""Compares a plan with what the monitor recorded of the run."""

import os
from dataclasses import dataclass

from ..monitor.summary import read_events, summarize
from ..notebook import text_table
from .result import Plan


@dataclass(frozen=True)
class Difference:
    """A predicted figure and the measured one. `error` is (predicted - measured) / measured."""

    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / self.measured


def compare(plan: Plan, path: str | os.PathLike[str]) -> list[Difference]:
    """Compares the plan with a record of `drivetrain.Monitor`.

    On a GPU, the record has the peak of allocated memory. On the CPU it has the resident memory of the process. That is
    compared with the planned peak and the table's figure for Python and its libraries.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no record, or has no complete step after the first ones.
    """
    events = read_events(path)
    summary = summarize(events)
    if not summary.num_steps:
        raise ValueError(f"{path} has no step to compare with: the first steps warm up")
    # The monitor's steps in one of the plan. They differ from each other if there are several.
    count = plan.trace.recorded_steps
    measured_s = summary.median_step_s if count == 1 else count * summary.wall_s / summary.num_steps
    found = [Difference("step", "ms", 1e3 * plan.time.step_s, 1e3 * measured_s)]
    for phase, seconds in (
        ("forward", plan.time.forward_s),
        ("backward", plan.time.backward_s),
        ("optimizer", plan.time.optimizer_s),
    ):
        measured = count * summary.phase_s[phase] / summary.num_steps
        if measured and seconds:
            found.append(Difference(phase, "ms", 1e3 * seconds, 1e3 * measured))
    if plan.time.samples and summary.samples:
        predicted = plan.time.samples_per_s / plan.options.world_size
        found.append(Difference("samples per second and rank", "1/s", predicted, summary.samples_per_s))
    samples = [event["values"] for event in events if event["type"] == "system"]
    planned, context = plan.memory.peak_allocated, plan.device.context_bytes
    memory = [("peak of allocated memory", "gpu_peak_memory_bytes", planned)]
    if plan.device.kind == "cpu":
        memory.append(("resident memory of the process", "process_memory_bytes", planned + context))
    for what, name, num_bytes in memory:
        if measured := max((values[name] for values in samples if name in values), default=0):
            found.append(Difference(what, "MiB", num_bytes / 2**20, measured / 2**20))
    return found


def table(differences: list[Difference]) -> str:
    """Returns the differences as a plain table."""
    rows = [
        (each.what, f"{each.predicted:,.2f} {each.unit}", f"{each.measured:,.2f} {each.unit}", f"{each.error:+.1%}")
        for each in differences
    ]
    return text_table(("", "planned", "measured", "error"), rows)
