"""Tells the other ranks where this rank is, and finds out where they are, for reports of ranks that stand still."""

import itertools
import time
from collections import defaultdict

from ..ddp.control_block import ControlBlock, RankRecord
from ..processes import this_process

_SILENT_BEATS = 3  # a rank that publishes nothing for so many is called silent
_PLACES_NAMED = 4
_RANKS_NAMED = 8
_RANKS_ASKED = 64  # where none is behind, silent or ended
_beats = itertools.count(1)  # of all monitors of this process, as the others see one rank


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
        named = [f"{_names(ranks)} {place if len(ranks) == 1 else _plural(place)}" for place, ranks in places]
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


def _plural(place: str) -> str:
    """Turns the place of one rank into the place of several."""
    return place.replace("is ", "are ", 1) if place.startswith("is ") else place.replace("has ", "have ", 1)
