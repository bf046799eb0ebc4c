"""Notices that this rank stands still, and says where it and the others are. A signal prints its stacks."""

import faulthandler
import itertools
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from .. import _C
from ..ddp.control_block import ControlBlock, RankRecord
from ..frames import stack_of_thread, users_line
from ..phases import LABELS, PHASES
from ..processes import this_process

# The first pass through a phase may compile, or start workers.
LIMIT_S, FIRST_LIMIT_S = 8.0, 20.0
_TIMES_THE_LONGEST = 3  # a phase that has taken longer before gets as many times that
_TIMES_OUTSIDE = 8  # ranks wait longer between steps: for an evaluation or a checkpoint of one of them
_BEATS_PER_LIMIT, _SHORTEST_BEAT_S, _LONGEST_BEAT_S = 5, 0.4, 1.6
_DISTRIBUTED = str(Path(dist.__file__).parent)
STACKS_SIGNAL = signal.SIGRTMAX - 1  # programs rarely use the real-time signals
_SILENT_BEATS = 3  # a rank that publishes nothing for so many is called silent
_PLACES_NAMED = 4
_RANKS_NAMED = 8
_RANKS_ASKED = 64  # where none is behind, silent or ended
_beats = itertools.count(1)  # of all monitors of this process, as the others see one rank


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


class Places:
    """Publishes this rank's place every `beat_s` seconds, in a control block that has no other user."""

    def __init__(self, block: ControlBlock, beat_s: float) -> None:
        self._block, self._beat_s = block, beat_s
        self._next_s = self._next_read_s = 0.0
        self._wait_ns = 0  # when the wait began through which the others are listened to

    def publish(self, step: int, where: str) -> None:
        """Publishes this rank's place: a text that goes on behind "rank 0 is "."""
        self._next_s = time.monotonic() + self._beat_s
        record: RankRecord = {
            "beat": next(_beats),
            "step": step,
            "position": 0,
            "awaited": "",
            "where": where,
            "wait_s": None,
            "process": this_process(),
            "has_failed": False,
        }
        self._block.publish(record)

    def is_due(self) -> bool:
        """Returns True if the last record is a beat old."""
        return time.monotonic() >= self._next_s

    def listen(self, wait_ns: int) -> None:
        """Reads the others' records at each beat of one wait, given by its start, so that silent ranks are known."""
        if self._wait_ns != wait_ns:
            self._wait_ns, self._next_read_s = wait_ns, time.monotonic() + self._beat_s
            self._block.begin_listening()
        elif time.monotonic() >= self._next_read_s:
            self._next_read_s = time.monotonic() + self._beat_s
            self._block.read()

    def others(self, step: int) -> list[str]:
        """Describes where the others are, by place, and first the place with the fewest ranks.

        A rank without a monitor is left out. In a large group, these are the ranks that are behind, silent or gone.
        """
        block = self._block
        block.read()
        known = {rank: status for rank, status in enumerate(block.seen) if status is not None and rank != block.rank}
        behind = [
            rank
            for rank, one in known.items()
            if one.step < step or block.has_ended(rank) or block.is_silent(rank, _SILENT_BEATS)
        ]
        block.fetch(behind[:_RANKS_ASKED] or list(known)[:_RANKS_ASKED])
        ranks_of = defaultdict(list)
        for rank in known:
            if (record := block.last[rank]) is not None:
                ranks_of[self._place_of(rank, record, step)].append(block.ranks[rank])
        places = sorted(ranks_of.items(), key=lambda item: (len(item[1]), item[1]))
        plural = {"is": "are", "has": "have"}
        named = []
        for place, ranks in places:
            verb, _, rest = place.partition(" ")
            named.append(f"{_names(ranks)} {verb if len(ranks) == 1 else plural[verb]} {rest}")
        if len(named) > _PLACES_NAMED:
            named[_PLACES_NAMED:] = [f"others are at {len(named) - _PLACES_NAMED} more places"]
        return named

    def _place_of(self, rank: int, record: RankRecord, step: int) -> str:
        where = record["where"] if record["step"] == step else f"{record['where']}, in step {record['step']}"
        if self._block.has_ended(rank):
            return f"has ended: its process {record['process']['pid']} is gone, last seen {where}"
        if self._block.is_silent(rank, _SILENT_BEATS):
            return f"has not been heard of for {self._block.silence_s(rank):.0f} s, last seen {where}"
        return f"is {where}"


def _names(ranks: list[int]) -> str:
    more = [] if len(ranks) <= _RANKS_NAMED else [f"{len(ranks) - _RANKS_NAMED} more"]
    names = [str(rank) for rank in ranks[:_RANKS_NAMED]] + more
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def print_stacks_on_request() -> None:
    """Lets this process answer `kill -RTMAX-1` by the stacks of all threads on stderr, until its end.

    faulthandler answers from C, and so also while a call holds Python's lock or waits for another rank. A handler of
    the script's own stays.
    """
    if signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACKS_SIGNAL, 2, all_threads=True)
