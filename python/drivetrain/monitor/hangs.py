"""Notices that this rank stands still, and says in which phase, file and line. A signal prints its stacks."""

import faulthandler
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from .. import _C
from ..frames import stack_of_thread, users_line
from ..phases import LABELS, PHASES

# The first pass through a phase may compile, or start workers.
LIMIT_S, FIRST_LIMIT_S = 8.0, 20.0
_TIMES_THE_LONGEST = 3  # a phase that has taken longer before gets as many times that
_TIMES_OUTSIDE = 8  # ranks wait longer between steps: for an evaluation or a checkpoint of one of them
_BEATS_PER_LIMIT, _SHORTEST_BEAT_S, _LONGEST_BEAT_S = 5, 0.4, 1.6
_DISTRIBUTED = str(Path(dist.__file__).parent)
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
    """Watches the training thread of this rank, and reports a phase that does not end within the limit.

    Outside of steps it reports only waits for other ranks, after eight times the limit.

    Args:
        limit_s: Seconds, 0 for no reports. None takes 8, and 20 for a phase that has never ended before.
        is_in_step: Returns True between the first batch and the end of a step, where loops tell this.
    """

    def __init__(self, rank: int, thread: int, limit_s: float | None, is_in_step: Callable[[], bool]) -> None:
        self._rank, self._thread, self._is_in_step = rank, thread, is_in_step
        self._limit_s = LIMIT_S if limit_s is None else limit_s
        self._first_limit_s = FIRST_LIMIT_S if limit_s is None else limit_s
        # Seconds between two looks at the other ranks; 0: none.
        beat_s = min(max(self._limit_s / _BEATS_PER_LIMIT, _SHORTEST_BEAT_S), _LONGEST_BEAT_S)
        self.beat_s = beat_s if self._limit_s else 0.0
        self._since_ns = 0  # when the wait began that was last looked at
        self._next_s = 0.0

    def place(self, standing: _C.TraceStanding) -> str:
        """Says where the training thread is, in words that go on behind "rank 0 is "."""
        return self._place(PHASES[standing.phase], self._where()[0])

    def _place(self, phase: str, where: str) -> str:
        if phase == "host" and not self._is_in_step():
            return f"outside of a step, at {where}"
        return f"in the phase {LABELS[phase]!r} at {where}"

    def _where(self) -> tuple[str, list[FrameType]]:
        frames = stack_of_thread(self._thread)
        return (users_line(frames) if frames else "nowhere: its training thread has ended"), frames

    def report(self, standing: _C.TraceStanding, step: int) -> Hang | None:
        """Returns the hang, if it is time to report one: at the limit, and each time that the wait has doubled."""
        if self._limit_s <= 0 or standing.since_ns == 0:
            return None
        phase = PHASES[standing.phase]
        is_outside = phase == "host" and not self._is_in_step()
        if standing.since_ns != self._since_ns:
            self._since_ns = standing.since_ns
            limit_s = self._limit_s if standing.longest_ns else self._first_limit_s
            limit_s *= _TIMES_OUTSIDE if is_outside else 1
            self._next_s = max(limit_s, _TIMES_THE_LONGEST * standing.longest_ns * 1e-9)
        quiet_s = (time.monotonic_ns() - standing.since_ns) * 1e-9
        if quiet_s < self._next_s:
            return None
        where, frames = self._where()
        if is_outside and not (frames and frames[0].f_code.co_filename.startswith(_DISTRIBUTED)):
            return None
        self._next_s = 2 * quiet_s
        stack = "".join(traceback.format_stack(frames[0])) if frames else ""
        text = f"rank {self._rank} has stood still for {quiet_s:.0f} s in step {step}, {self._place(phase, where)}"
        return Hang(phase, where, quiet_s, text, stack)


def print_stacks_on_request() -> None:
    """Lets this process answer `kill -RTMAX-1` by the stacks of all threads on stderr, until its end.

    faulthandler answers from C, and so also while a call holds Python's lock or waits for another rank. A handler of
    the script's own stays.
    """
    if signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACKS_SIGNAL, 2, all_threads=True)
