"""Notices that this rank stands still, and says in which phase, file and line. A signal prints its stacks."""

from __future__ import annotations

import faulthandler
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from .. import _C
from ..frames import stack_of_thread, users_line
from ..phases import LABELS, PHASES

LIMIT_S = 20.0
_TIMES_THE_LONGEST = 3  # a phase that has taken longer before gets as many times that
STACKS_SIGNAL = signal.SIGRTMAX - 1  # programs rarely use the real-time signals


@dataclass(frozen=True)
class Hang:
    """A report that this rank stands still.

    Attributes:
        phase: Its phase.
        where: Its file, line and function.
        seconds: Seconds for which it has stood still.
        text: A sentence with all of it.
        stack: The stack of its training thread, outermost call first.
    """

    phase: str
    where: str
    seconds: float
    text: str
    stack: str


class HangWatch:
    """Watches the training thread of this rank, and reports a phase that does not end within `limit_s`; 0: none.

    `is_in_step` returns True between the first batch and the end of a step, where loops tell this.
    """

    def __init__(self, rank: int, thread: int, limit_s: float, is_in_step: Callable[[], bool]) -> None:
        self._rank, self._thread, self._limit_s, self._is_in_step = rank, thread, limit_s, is_in_step
        self._since_ns = 0  # when the wait began that was last looked at
        self._next_s = limit_s

    def report(self, standing: _C.TraceStanding, step: int) -> Hang | None:
        """Returns the hang, if it is time to report one: at the limit, and each time that the wait has doubled."""
        phase = PHASES[standing.phase]
        if self._limit_s <= 0 or standing.since_ns == 0 or (phase == "host" and not self._is_in_step()):
            return None
        if standing.since_ns != self._since_ns:
            self._since_ns = standing.since_ns
            self._next_s = max(self._limit_s, _TIMES_THE_LONGEST * standing.longest_ns * 1e-9)
        quiet_s = (time.monotonic_ns() - standing.since_ns) * 1e-9
        if quiet_s < self._next_s:
            return None
        self._next_s = 2 * quiet_s
        where, stack = "nowhere: its training thread has ended", ""
        if frames := stack_of_thread(self._thread):
            where, stack = users_line(frames), "".join(traceback.format_stack(frames[0]))
        text = f"rank {self._rank} has stood still for {quiet_s:.0f} s in step {step}"
        return Hang(phase, where, quiet_s, f"{text}, in the phase {LABELS[phase]!r} at {where}", stack)


def print_stacks_on_request() -> None:
    """Lets this process answer `kill -RTMAX-1` by the stacks of all threads on stderr, until its end.

    faulthandler answers from C, and so also while a call holds Python's lock or waits for another rank. A handler of
    the script's own stays.
    """
    if signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACKS_SIGNAL, 2, all_threads=True)
