"""Compares the runs of `drivetrain try`: where two trajectories part, and how long their steps take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .record import Print, RunRecord, Step

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
