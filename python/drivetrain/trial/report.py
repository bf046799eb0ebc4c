"""Compares the runs of `drivetrain try`: where trajectories part, how long steps take, a table and a verdict."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..budget.table import size
from ..notebook import text_table
from ..phases import LABELS
from .record import Print, RunRecord, Step, Variant

_FASTER = 0.97  # of torch's time; a smaller difference is called none
_FACTOR = 10.0  # how much further than by rounding alone a variant may be from torch's run
_FLOOR, _MOST_FLOOR = 64.0, 0.01  # units of rounding that always pass, and the largest distance that does
_AHEAD = 2  # steps: the run with rounding begins to differ after the first
_SMALLEST = 1e-3  # of the largest norm of a step: smaller tensors may consist of rounding
_WARM_UP = 0.2  # share of the steps that do not count in times


@dataclass(frozen=True)
class Parting:
    """The first step at which a run differs from another by more than rounding makes of itself."""

    step: int  # its number, from 1
    what: str  # the tensor that is furthest, such as "gradient of 0.weight", or "loss"
    distance: float  # relative
    usual: float  # the largest distance that rounding alone makes at this step

    def __str__(self) -> str:
        return f"step {self.step}, {self.what}: {self.distance:.1e} from torch's, where rounding makes {self.usual:.1e}"


def distances(one: Step, other: Step, with_gradients: bool = True) -> Iterator[tuple[str, str, float]]:
    """Yields kind, name and relative distance of everything that two runs have recorded of a step."""
    if with_gradients:
        yield from _between("gradient of ", one.gradients, other.gradients)
    yield from _between("", one.parameters, other.parameters)
    if len(one.losses) != len(other.losses):
        yield "loss", "number of backward passes", math.inf
    for mine, theirs in zip(one.losses, other.losses, strict=False):
        yield "loss", "loss", _relative(abs(mine - theirs), abs(mine))


def _between(prefix: str, ones: dict[str, Print], others: dict[str, Print]) -> Iterator[tuple[str, str, float]]:
    kind = prefix or "parameter "
    largest = max((norm for norm, _ in ones.values() if math.isfinite(norm)), default=0.0)
    for name in ones.keys() ^ others.keys():
        yield kind, f"{kind}{name}", math.inf
    for name in ones.keys() & others.keys():
        (norm, product), (other_norm, other_product) = ones[name], others[name]
        apart = max(abs(norm - other_norm), abs(product - other_product))
        if math.isnan(norm) and math.isnan(other_norm):
            apart = 0.0
        yield kind, f"{kind}{name}", _relative(apart, max(norm, _SMALLEST * largest))


def _relative(apart: float, size: float) -> float:
    if apart == 0 or (math.isnan(apart) and math.isnan(size)):
        return 0.0
    return apart / size if size and math.isfinite(apart) else math.inf


def parting(
    torchs: RunRecord, other: RunRecord, usual_runs: Sequence[RunRecord], with_gradients: bool = True
) -> Parting | None:
    """Returns where a run parts from torch's by more than rounding, or None.

    Args:
        torchs: The run of torch.
        other: The other run.
        usual_runs: Runs of torch again, unchanged and with parameters changed by rounding before the first step.
        with_gradients: Gradients before a step must be the same as well.
    """
    floor = min(_FLOOR * torchs.resolution, _MOST_FLOOR)
    usual: dict[str, float] = {}
    for index, (mine, theirs) in enumerate(zip(torchs.steps, other.steps, strict=False)):
        for run in usual_runs:
            for one, again in list(zip(torchs.steps, run.steps, strict=False))[index : index + _AHEAD + 1]:
                for kind, _, distance in distances(one, again):
                    usual[kind] = max(usual.get(kind, 0.0), distance)
        far = [
            (distance / max(usual.get(kind, 0.0), floor), name, distance, max(usual.get(kind, 0.0), floor))
            for kind, name, distance in distances(mine, theirs, with_gradients)
        ]
        ratio, name, distance, limit = max(far, default=(0.0, "", 0.0, 0.0))
        if ratio > _FACTOR:
            return Parting(index + 1, name, distance, limit)
    return None


def step_s(record: RunRecord) -> float:
    """Returns the median seconds of a run's steps after its first."""
    times = [step.seconds for step in record.steps]
    return statistics.median(times[min(math.ceil(_WARM_UP * len(times)), len(times) - 1) :])


def ratios(torchs: Sequence[RunRecord], others: Sequence[RunRecord]) -> tuple[float, float, float]:
    """Returns median, least and largest ratio of the times of a step over rounds, another's by torch's."""
    found = sorted(step_s(other) / step_s(one) for one, other in zip(torchs, others, strict=True))
    return statistics.median(found), found[0], found[-1]


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
        if tried.variant.formats:
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
            found = [ratios(self.torchs.timed, one.timed) for one in self.others]
            shown = (f"{ratio:.2f} ({least:.2f}-{most:.2f})" for ratio, least, most in found)
            rows.append(("time / torch's", "1", *shown))
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
        if tried.variant.formats:
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
