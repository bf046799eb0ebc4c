"""Names the rank that makes the others wait, and the phase in which it loses the time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW = 40  # steps that are compared
_LEAST_EXCESS = 0.03
_SIGMAS = 6.0
_OWN = ("data", "copy", "forward", "backward", "recomputation", "optimizer", "checkpoint", "host")


@dataclass(frozen=True)
class Straggler:
    """A slow rank.

    Attributes:
        rank: The rank.
        phase: The phase in which it loses most.
        excess: Its own time per step over the median of the other ranks', minus 1.
    """

    rank: int
    phase: str
    excess: float


def own_time(phases: Mapping[str, float]) -> float:
    """Returns the seconds of a step in which the rank worked: all phases but waiting for other ranks."""
    return sum(phases[name] for name in _OWN)


def find_straggler(steps: Mapping[int, Sequence[Mapping[str, float]]]) -> Straggler | None:
    """Compares the ranks' last steps.

    A rank's own time leaves out exposed communication, because a fast rank waits there for the slow one. A rank is
    named if its median exceeds the median of the others' by 3 %, and by six standard errors of both medians.

    Args:
        steps: Seconds by phase of the last `WINDOW` steps of every rank. Ranks need not have the same steps.

    Returns:
        The slowest such rank, or None. Also None with fewer than two ranks, or fewer than `WINDOW` steps of one.
    """
    windows = {rank: list(own)[-WINDOW:] for rank, own in steps.items()}
    if len(windows) < 2 or any(len(window) < WINDOW for window in windows.values()):
        return None
    times = {rank: [own_time(step) for step in window] for rank, window in windows.items()}
    centers = {rank: statistics.median(values) for rank, values in times.items()}
    errors = {rank: _standard_error(values, centers[rank]) for rank, values in times.items()}
    slow = max(centers, key=lambda rank: centers[rank])
    others = [rank for rank in centers if rank != slow]
    normal = statistics.median(centers[rank] for rank in others)
    if normal <= 0:
        return None
    error = math.hypot(errors[slow], statistics.median(errors[rank] for rank in others))
    excess = centers[slow] - normal
    if excess < _LEAST_EXCESS * normal or excess < _SIGMAS * error:
        return None
    lost = {
        phase: _median(windows[slow], phase) - statistics.median(_median(windows[rank], phase) for rank in others)
        for phase in _OWN
    }
    return Straggler(slow, max(lost, key=lambda phase: lost[phase]), excess / normal)


def _standard_error(values: Sequence[float], center: float) -> float:
    """Returns the standard error of the median, from the median absolute deviation: outliers do not widen it."""
    deviation = statistics.median(abs(value - center) for value in values)
    return 1.4826 * 1.2533 * deviation / math.sqrt(len(values))


def _median(window: Sequence[Mapping[str, float]], phase: str) -> float:
    return statistics.median(step[phase] for step in window)
