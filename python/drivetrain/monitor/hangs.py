"""Notices a rank that stands still, and says in which phase, file and line, and for which rank it waits."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from .. import _C
from ..frames import stack_of, users_line
from ..phases import LABELS, PHASES

LIMIT_S = 20.0
_TIMES_THE_LONGEST = 3  # a phase that has taken longer before gets as many times that


class RankProgress(TypedDict):
    """The position of a rank in its training, as it shows the others."""

    beat: int  # grows with each message
    step: int  # in progress
    phase: str
    where: str  # the user's line
    quiet_s: float  # since a phase last began or ended; 0: it is in no step


@dataclass(frozen=True)
class Hang:
    """A rank that stands still.

    Attributes:
        rank: The rank that the others wait for, or this one.
        phase: Its phase.
        where: Its file, line and function.
        seconds: Seconds for which this rank has stood still.
        text: A sentence with all of it.
        stack: The stack of this rank's training thread, outermost call first.
    """

    rank: int
    phase: str
    where: str
    seconds: float
    text: str
    stack: str


class HangWatch:
    """Watches the training thread of this rank.

    Args:
        rank: This rank.
        thread: Identifier of the training thread.
        limit_s: Seconds after which a phase that does not end is reported; 0 reports none.
        is_in_step: Returns True between the first batch and the end of a step, where loops tell this.
    """

    def __init__(self, rank: int, thread: int, limit_s: float, is_in_step: Callable[[], bool]) -> None:
        self._rank, self._thread, self.limit_s, self._is_in_step = rank, thread, limit_s, is_in_step
        self._beat = 0
        self._place: RankProgress | None = None
        self._limit_here_s = limit_s
        self._since_ns = 0  # when the wait began that was last reported
        self._next_s = limit_s
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: its last beat, and when it came

    def look(self, standing: _C.TraceStanding, step: int) -> RankProgress:
        """Returns where this rank is now.

        Args:
            standing: The standing of the trace, after its records were read.
            step: Number of the step that is in progress.
        """
        self._beat += 1
        phase = PHASES[standing.phase]
        is_in_step = standing.since_ns > 0 and (phase != "host" or self._is_in_step())
        quiet_s = max(time.monotonic_ns() - standing.since_ns, 0) * 1e-9 if is_in_step else 0.0
        innermost = sys._current_frames().get(self._thread)
        where = users_line(stack_of(innermost)) if innermost is not None else "nowhere: its training thread has ended"
        if not is_in_step or standing.since_ns != self._since_ns:
            self._heard.clear()  # the silence of the others counts from the first look at them in this wait
            self._since_ns = standing.since_ns
            self._limit_here_s = max(self.limit_s, _TIMES_THE_LONGEST * standing.longest_ns * 1e-9)
            self._next_s = self._limit_here_s
        self._place = {"beat": self._beat, "step": step, "phase": phase, "where": where, "quiet_s": round(quiet_s, 3)}
        return self._place

    @property
    def wants_others(self) -> bool:
        """True if the other ranks' places are needed, because this one may soon be reported."""
        return self._place is not None and self.limit_s > 0 and self._place["quiet_s"] >= self._limit_here_s / 2

    def hear(self, places: Mapping[int, RankProgress]) -> None:
        """Notes the places of other ranks, by rank, as they were last published."""
        for rank, place in places.items():
            beat, _ = self._heard.get(rank, (-1, 0.0))
            if place["beat"] != beat:
                self._heard[rank] = (place["beat"], time.monotonic())

    def report(self, places: Mapping[int, RankProgress]) -> Hang | None:
        """Returns the hang, if it is time to report one: at the limit, and each time that the wait has doubled.

        Args:
            places: The places of the other ranks, by rank; empty if they are not known.
        """
        place = self._place
        if place is None or self.limit_s <= 0 or place["quiet_s"] < self._next_s:
            return None
        self._next_s = 2 * place["quiet_s"]
        culprit = self._culprit(place, places)
        text = f"rank {self._rank} has stood still for {place['quiet_s']:.0f} s in step {place['step']}, {_at(place)}"
        if culprit != self._rank:
            other = places[culprit]
            text += f"; it waits for rank {culprit}, {self._silence_of(culprit)}in step {other['step']}, {_at(other)}"
        found = other if culprit != self._rank else place
        return Hang(culprit, found["phase"], found["where"], place["quiet_s"], text, self._stack())

    def _culprit(self, own: RankProgress, places: Mapping[int, RankProgress]) -> int:
        """Returns the rank that the others wait for: the first one that does not wait itself, or is silent."""
        if own["phase"] != "communication":
            return self._rank
        working = [
            (place["step"], -place["quiet_s"], rank)
            for rank, place in places.items()
            if place["phase"] != "communication" or self._silence_s(rank) >= self._limit_here_s / 4
        ]
        return min(working)[2] if working else self._rank

    def _silence_s(self, rank: int) -> float:
        return time.monotonic() - self._heard[rank][1] if rank in self._heard else 0.0

    def _silence_of(self, rank: int) -> str:
        silence = self._silence_s(rank)
        return f"not heard of for {silence:.0f} s, last seen " if silence >= self._limit_here_s / 4 else ""

    def _stack(self) -> str:
        innermost = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(innermost)) if innermost is not None else ""


def _at(place: RankProgress) -> str:
    return f"in the phase {LABELS[place['phase']]!r} at {place['where']}"
