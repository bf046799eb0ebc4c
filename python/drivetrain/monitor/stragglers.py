"""Names the rank that makes the others wait, and the phase in which it loses the time."""

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from ..ddp.control_block import ControlBlock

WINDOW = 32  # steps that are compared
_LEAST_EXCESS = 0.03
_SIGMAS = 6.0
_PREFIX = "drivetrain/monitor/steps/"
_OWN = ("data", "copy", "forward", "backward", "recomputation", "optimizer", "checkpoint", "host")


class Profile(TypedDict):
    """A rank's last steps, as it shows them to the others."""

    own_s: float  # median of its own time
    error_s: float  # standard error of that median
    phases: dict[str, float]  # medians in seconds, without the wait for others


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


def profile_of(steps: Sequence[Mapping[str, float]]) -> Profile | None:
    """Returns the medians of a rank's last `WINDOW` steps, given by their seconds by phase; None with fewer."""
    if len(steps) < WINDOW:
        return None
    window = steps[-WINDOW:]
    times = [sum(step[name] for name in _OWN) for step in window]
    own_s = statistics.median(times)
    # The standard error of the median, from the median absolute deviation: outliers do not widen it.
    deviation = statistics.median(abs(each - own_s) for each in times)
    return {
        "own_s": own_s,
        "error_s": 1.4826 * 1.2533 * deviation / math.sqrt(WINDOW),
        "phases": {phase: statistics.median(step[phase] for step in window) for phase in _OWN},
    }


def find_straggler(profiles: Mapping[int, Profile]) -> Straggler | None:
    """Compares the ranks' last steps.

    A rank's own time leaves out exposed communication, because a fast rank waits there for the slow one. The slowest
    rank is named if its median exceeds the median of the others' by 3 %, and by six standard errors of both medians.
    Ranks need not have the same steps.
    """
    if len(profiles) < 2:
        return None
    slow = max(profiles, key=lambda rank: profiles[rank]["own_s"])
    others = [profile for rank, profile in profiles.items() if rank != slow]
    normal = statistics.median(other["own_s"] for other in others)
    if normal <= 0:
        return None
    error = math.hypot(profiles[slow]["error_s"], statistics.median(other["error_s"] for other in others))
    excess = profiles[slow]["own_s"] - normal
    if excess < _LEAST_EXCESS * normal or excess < _SIGMAS * error:
        return None
    lost = {
        phase: seconds - statistics.median(other["phases"][phase] for other in others)
        for phase, seconds in profiles[slow]["phases"].items()
    }
    return Straggler(slow, max(lost, key=lambda phase: lost[phase]), excess / normal)


class Exchange:
    """Publishes this rank's steps; on rank 0, compares the ranks' steps.

    After the store has failed, as at the end of a job, nothing is exchanged.

    Attributes:
        has_compared: True on rank 0 once all ranks have published enough steps.
    """

    def __init__(self, block: ControlBlock) -> None:
        self.has_compared = False
        # Only its questions with a time limit are used here, none of its keys.
        self._block = block
        self._keys = [f"{_PREFIX}{other}" for other in range(len(block.ranks))]
        self._steps: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._is_new = self._have_all_come = False

    def add(self, phases: Mapping[str, float]) -> None:
        """Notes a step of this rank: seconds by phase."""
        self._steps.append(phases)
        self._is_new = True

    def compare(self) -> Straggler | None:
        """Publishes the noted steps, if there are new ones, and returns on rank 0 the straggler, by its global rank."""
        profile = profile_of(list(self._steps)) if self._is_new else None
        self._is_new = False
        if profile is None:
            return None
        mine = json.dumps(profile)
        found = self._block.ask(lambda store: self._ask(store, mine))
        if not found:
            return None
        self.has_compared = True
        return find_straggler(dict(zip(self._block.ranks, map(json.loads, found), strict=True)))

    def _ask(self, store: Any, mine: str) -> list[bytes]:
        """Publishes this rank's profile, and returns on rank 0 all ranks' once they are there."""
        store.set(self._keys[self._block.rank], mine)
        if self._block.rank != 0:
            return []
        # The store would wait for a key that does not exist.
        self._have_all_come = self._have_all_come or store.check(self._keys)
        return list(store.multi_get(self._keys)) if self._have_all_come else []
