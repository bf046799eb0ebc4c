"""Finds the step at which a training spikes, and the fewest samples without which it does not."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .record import RecordedSteps

_WINDOW = 64  # steps before a step that tell what is usual there
FEWEST = 8  # of those, below which only values that are not finite are a spike
_NARROWEST = 0.25  # of the median: batches differ by this much at least, also where the first few happen not to
_ABOVE_LARGEST = 0.4  # of the factor; times the largest value before, as losses of small batches have wide tails
_STEPS_BACK = (1, 4)  # steps whose samples are tried: a loader may fetch ahead, and a step may spoil the next ones
_DONORS = 16  # batches before those, whose samples are harmless


@dataclass(frozen=True)
class Spike:
    """A step whose loss or gradients are far beyond what is usual."""

    index: int  # of the step in the records
    what: str  # such as "loss of rank 1"
    value: float
    usual: float  # the median of the steps before

    def __str__(self) -> str:
        return f"the {self.what} is {self.value:.4g} there (median before: {self.usual:.4g})"


@dataclass(frozen=True)
class Sample:
    """A sample that the script takes, and another one that can take its place."""

    rank: int
    step: int  # the index of the step that it has been taken for
    micro_batch: int  # the batch of that step, from 0
    loader: int
    number: int
    position: int  # in its batch
    index: int  # in the dataset
    donor: int


Runs = Sequence[RecordedSteps]  # one run, by rank
Replaced = dict[str, dict[str, int]]  # as TakenBatches takes it


def spike_at(ranks: Runs, index: int, factor: float) -> Spike | None:
    """Returns what spikes at a step, or None.

    A value spikes if it is not finite. It also does if it is above the median of the steps before by `factor` scaled
    median absolute deviations (Leys et al. 2013). It must then exceed the largest of them 0.4 x `factor` times.
    """
    found: list[tuple[float, Spike]] = []
    for name, values in _watched(ranks, index):
        *before, value = values
        before = [one for one in before[-_WINDOW:] if math.isfinite(one)]
        usual = statistics.median(before) if before else math.nan
        if not math.isfinite(value):
            found.append((math.inf, Spike(index, name, value, usual)))
        elif len(before) >= FEWEST:
            spread = 1.4826 * statistics.median(abs(one - usual) for one in before)
            above = (value - usual) / max(spread, _NARROWEST * abs(usual), 1e-30)
            if above > factor and value > max(1.0, _ABOVE_LARGEST * factor) * max(before):
                found.append((above, Spike(index, name, value, usual)))
    return max(found, key=lambda one: one[0])[1] if found else None


def _watched(ranks: Runs, index: int) -> Iterator[tuple[str, list[float]]]:
    """Yields the name of each value that is watched, with its course up to a step."""
    for rank, record in enumerate(ranks):
        steps = record.steps[: index + 1]
        if not 0 <= index < len(steps):
            continue
        suffix = f" of rank {rank}" if len(ranks) > 1 else ""
        yield f"loss{suffix}", [_largest(step.losses) for step in steps]
        yield f"gradient norm{suffix}", [step.norm for step in steps]


def _course(ranks: Runs) -> list[tuple[float, float]]:
    steps = [[record.steps[index] for record in ranks] for index in range(min(len(one.steps) for one in ranks))]
    return [(_largest([loss for one in step for loss in one.losses]), max(one.norm for one in step)) for step in steps]


def _largest(losses: Sequence[float]) -> float:
    """Returns the largest magnitude, or one that is not finite."""
    return max((abs(one) if math.isfinite(one) else math.inf for one in losses), default=0.0)


def samples_of(ranks: Runs, index: int, num_steps: int) -> list[Sample]:
    """Returns the samples of `num_steps` steps up to a step, of all ranks."""
    first = max(0, index + 1 - num_steps)
    found: list[Sample] = []
    for rank, record in enumerate(ranks):
        earlier: dict[int, list[int]] = {}  # samples of the latest batches before, by dataset
        for batch in [batch for step in record.steps[:first] for batch in step.batches][-_DONORS:]:
            earlier.setdefault(batch.dataset, []).extend(batch.indices)
        for place, step in enumerate(record.steps[first : index + 1], first):
            for micro_batch, batch in enumerate(step.batches):
                donors = earlier.get(batch.dataset, [])
                for position, sample in enumerate(batch.indices):
                    # Without an earlier batch, the neighbor in the dataset must do.
                    donor = donors[len(found) % len(donors)] if donors else sample + 1
                    found.append(Sample(rank, place, micro_batch, batch.loader, batch.number, position, sample, donor))
    return found


def replacements(samples: Sequence[Sample], rank: int) -> Replaced:
    """Returns what lets a rank load the others in the places of these samples."""
    found: Replaced = {}
    for one in samples:
        if one.rank == rank:
            found.setdefault(f"{one.loader}:{one.number}", {})[str(one.position)] = one.donor
    return found


def fewest(samples: Sequence[Sample], goes_without: Callable[[Sequence[Sample]], bool]) -> list[Sample]:
    """Returns a smallest set of samples without which the spike goes, where it goes without all of them.

    Each half is tried alone. If neither suffices, both have a part of it (Zeller and Hildebrandt 2002).
    """

    def search(among: Sequence[Sample], besides: Sequence[Sample]) -> list[Sample]:
        if len(among) == 1:
            return list(among)
        halves = among[: len(among) // 2], among[len(among) // 2 :]
        for half in halves:
            if goes_without([*half, *besides]):
                return search(half, besides)
        first = search(halves[0], [*halves[1], *besides])
        return first + search(halves[1], [*first, *besides])

    return search(samples, [])


@dataclass
class Explanation:
    """The result of `explain`."""

    spike: Spike
    first: int  # the step of the checkpoint at which the records begin
    rates: list[float]  # learning rates of the latest steps and of the spike
    guilty: list[Sample]  # samples without which it goes; empty if it goes without none
    names: dict[str, str]  # what the dataset calls them, by index
    num_tried: int  # samples that were tried
    course: list[tuple[float, float]]  # largest loss and gradient norm over ranks, by step
    after: tuple[float, float] = (math.nan, math.nan)  # those at the spike without the samples
    num_runs: int = 0


def explain(
    run: Callable[[int, Sequence[Sample]], Runs], num_steps: int, factor: float, step: int | None = None
) -> Explanation | Runs:
    """Finds a spike and its samples.

    Args:
        run: Runs the script up to a number of steps, with the given samples replaced.
        num_steps: Steps in which the spike is looked for.
        factor: As of `spike_at`.
        step: The training's step that spikes, from 1, which goes before earlier ones.

    Returns:
        The explanation, or the run in which nothing spikes.
    """
    survey = run(num_steps, [])
    spike = spike_at(survey, step - survey[0].restored - 1, factor) if step is not None else None
    places = range(max(len(one.steps) for one in survey))
    spike = spike or next((one for place in places if (one := spike_at(survey, place, factor))), None)
    if spike is None:
        return survey
    index = spike.index
    rates = next([step.rate for step in one.steps[: index + 1]] for one in survey if len(one.steps) > index)
    found = Explanation(spike, survey[0].restored, rates[-max(_STEPS_BACK) :], [], {}, 0, _course(survey), num_runs=1)

    def goes_without(samples: Sequence[Sample]) -> bool:
        again = run(index + 1, samples)
        found.num_runs += 1
        goes = all(len(one.steps) > index for one in again) and spike_at(again, index, factor) is None
        if goes and math.isfinite(spike.value):  # It may have come just below the factor.
            goes = dict(_watched(again, index))[spike.what][-1] <= spike.value / 2
        if goes:
            found.names = {name: text for one in again for name, text in one.names.items()}
            found.after = _course(again)[index]
        return goes

    for steps_back in _STEPS_BACK:
        samples = samples_of(survey, index, steps_back)
        if samples and len(samples) > found.num_tried:
            found.num_tried = len(samples)
            if goes_without(samples):
                found.guilty = fewest(samples, goes_without)
                break
    return found
