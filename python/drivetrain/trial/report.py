"""Prints what `drivetrain try` has found: one table, and a verdict in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..budget.table import size
from ..notebook import text_table
from ..phases import LABELS
from .compare import Parting, distances, parting, ratios, step_s
from .record import RunRecord, Variant

_FASTER = 0.97  # of torch's time; a smaller difference is called none


@dataclass
class Tried:
    """All runs of one variant."""

    variant: Variant
    checked: RunRecord  # its run with prints of gradients and parameters
    timed: list[RunRecord] = field(default_factory=list)  # its runs for the times, by round


@dataclass
class TrialReport:
    """The runs of torch and of every variant."""

    torchs: Tried
    usual: Sequence[RunRecord]  # torch's run again, and with a change as small as rounding
    others: Sequence[Tried]
    elsewhere: dict[int, str] = field(default_factory=dict)  # by rank: what other ranks say of variants that fail

    def parting_of(self, tried: Tried) -> Parting | None:
        """Returns where a variant parts from torch; a format that rounds more by the user's wish always does."""
        if tried.variant.rounds_states:
            return None
        return parting(self.torchs.checked, tried.checked, self.usual, tried.variant.has_same_gradients)

    def repeats(self) -> bool:
        """Returns whether torch's run repeats to the bit."""
        again = self.usual[0]
        return [step.losses for step in again.steps] == [step.losses for step in self.torchs.checked.steps] and [
            step.parameters for step in again.steps
        ] == [step.parameters for step in self.torchs.checked.steps]

    def fails(self) -> bool:
        """Returns whether a variant failed, or trains something else, on any rank."""
        return bool(self.elsewhere or self.failures())

    def failures(self) -> str:
        """Returns the verdicts on variants that fail on this rank."""
        return "\n".join(
            self._verdict(one) for one in self.others if self._stops_elsewhere(one) or self.parting_of(one)
        )

    def _stops_elsewhere(self, tried: Tried) -> bool:
        """Returns whether a run ends after other steps than torch's. Errors have ports and names of their own."""
        mine, theirs = tried.checked, self.torchs.checked
        return bool(mine.error) != bool(theirs.error) or len(mine.steps) != len(theirs.steps)

    def __str__(self) -> str:
        every = [self.torchs, *self.others]
        rows: list[Sequence[str]] = []
        steps = self.torchs.checked.steps
        for index in sorted({0, len(steps) // 2, len(steps) - 1} if steps else ()):
            rows.append((f"loss at step {index + 1}", *(_loss(one.checked, index) for one in every)))
        if all(one.timed and all(run.steps for run in one.timed) for one in every):
            rows.append(("ms per step", *(f"{1e3 * min(map(step_s, one.timed)):.1f}" for one in every)))
            rows.append(("time / torch's", "1", *(_ratio(self.torchs, one) for one in self.others)))
            for phase, label in LABELS.items():
                times = [min(run.phases.get(phase, 0.0) for run in one.timed) for one in every]
                if max(times) > 0:
                    rows.append((f"  {label}", *(f"{1e3 * time:.1f}" for time in times)))
            rows.append(
                ("peak memory", *(f"{max(run.peak_bytes for run in one.timed) / 1e6:,.0f} MB" for one in every))
            )
            if any(one.timed[0].plain_bytes for one in every):
                plain = max(run.plain_bytes for one in every for run in one.timed)
                kept = [max(run.kept_bytes for run in one.timed) for one in every]
                rows.append(("kept for backward", *(size(num_bytes or plain) for num_bytes in kept)))
            sent = [min(run.network_bytes for run in one.timed) / max(len(one.timed[0].steps), 1) for one in every]
            rows.append(("network per step", *(f"{num_bytes / 1e6:,.2f} MB" for num_bytes in sent)))
        header = ("", *(one.variant.name for one in every))
        return "\n".join([text_table(header, rows), "", *self._lines()])

    def _lines(self) -> list[str]:
        lines = []
        if not self.repeats():
            pairs = zip(self.torchs.checked.steps, self.usual[0].steps, strict=False)
            far = [apart for pair in pairs for kind, _, apart in distances(*pair) if kind == "loss"]
            lines.append(
                "torch's own run does not repeat to the bit, because of operations without a fixed order or seed. Its "
                f"losses differ by up to {max(far, default=0.0):.1g} of themselves; smaller faults are not found."
            )
        if self.torchs.checked.changes:
            lines.append(f"kept from the machine: {'; '.join(self.torchs.checked.changes)}")
        for tried in self.others:
            new = [text for text in tried.checked.warnings if text not in self.torchs.checked.warnings]
            lines += [f"{tried.variant.name} warns: {text}" for text in new]
        if error := self.torchs.checked.error:
            lines.append(f"torch's run stops early: {error.splitlines()[-1]}")
        lines += [f"rank {rank}: {said}" for rank, said in self.elsewhere.items()]
        return [*lines, *(self._verdict(tried) for tried in self.others)]

    def _verdict(self, tried: Tried) -> str:
        name, theirs = tried.variant.name, self.torchs.checked
        if self._stops_elsewhere(tried):
            return f"{name} fails where torch does not:\n{tried.checked.error or theirs.error}"
        if (found := self.parting_of(tried)) is not None:
            return f"{name} TRAINS SOMETHING ELSE from {found}. Please report this."
        steps = len(theirs.steps)
        if tried.variant.rounds_states:
            same = f"{name} rounds states as asked for"
        elif tried.variant.budget and not tried.checked.plain_bytes:
            return f"{name} has changed nothing: no model got a budget, for the reasons above."
        elif not tried.checked.built:
            return f"{name} replaced nothing: the script builds no model or optimizer that drivetrain has"
        else:
            same = f"{name} trains the same, within rounding, for {steps} steps"
        if not (tried.timed and self.torchs.timed):
            return f"{same}."
        ratio, least, most = ratios(self.torchs.timed, tried.timed)
        speed = "as fast as torch's" if _FASTER < ratio < 1 / _FASTER else f"{ratio:.2f} of torch's time"
        memory = max(run.peak_bytes for run in tried.timed) / max(run.peak_bytes for run in self.torchs.timed)
        return f"{same}. Its steps are {speed} ({least:.2f} to {most:.2f}), with {memory:.2f} of torch's peak memory."


def _loss(record: RunRecord, index: int) -> str:
    losses = record.steps[index].losses if index < len(record.steps) else []
    return f"{sum(losses) / len(losses):.6g}" if losses else "none"


def _ratio(torchs: Tried, tried: Tried) -> str:
    median, least, most = ratios(torchs.timed, tried.timed)
    return f"{median:.2f} ({least:.2f}-{most:.2f})"
