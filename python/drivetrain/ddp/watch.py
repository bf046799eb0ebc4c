"""Says who keeps whom waiting: one thread per process tells other ranks where this one is, and asks when it waits.

Each rank puts a short record of its own (`Record`) into the process group's store every quarter of the limit, and one
per host a summary of its ranks' (`Seen`). A rank that has waited for the limit reads its own host's records and the
others' summaries, and logs which ranks have not come to where it is. Nothing here
takes the reducer's lock, which a waiting rank holds, and no clock is compared with another host's.
"""

import atexit
import contextlib
import ctypes
import json
import logging
import math
import os
import queue
import re
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .. import _C
from ..frames import self_of, stack_of, users_line
from ..processes import Process, has_ended, this_process

R = TypeVar("R")

VARIABLE = "DRIVETRAIN_REPORT_HANG_AFTER"
DEFAULT_LIMIT_S = 30.0

_BEATS_PER_LIMIT = 4
_STALE_BEATS = 1.25  # after so many the record itself is read, in place of a summary that is another beat old
_SILENT_BEATS = 2  # a rank that publishes nothing for so many is called silent
_SHORTEST_BEAT_S = 0.05
_LONGEST_STORE_CALL_S = (1.0, 10.0)  # a beat, within these
_EXIT_S = 0.5  # for the thread to end in, should the store stand still at exit
_RANKS_NAMED = 4
# A process closes its connections, which the others notice, a moment before it has ended.
_ENDING_S = 0.5

_logger = logging.getLogger("drivetrain")


class Seen(NamedTuple):
    """What is told of a rank to other hosts: see Record."""

    beat: int
    step: int
    place: int
    wait_s: float | None


class Record(TypedDict):
    """What a rank tells the others."""

    beat: int  # grows with every one
    step: int
    place: int
    awaited: str
    where: str
    wait_s: float | None  # None: no step has ended yet
    process: Process
    has_failed: bool  # a collective of its has, so that its end is no wonder


def _seen_in(record: Record) -> Seen:
    return Seen(record["beat"], record["step"], record["place"], record["wait_s"])


def limit_from(argument: float | None) -> float:
    """The limit asked for, in seconds, 0 for none: the argument, or the environment variable, or the default."""
    source, limit = "report_hang_after", argument
    if limit is None:
        given = os.environ.get(VARIABLE) or DEFAULT_LIMIT_S
        source = VARIABLE
        try:
            limit = float(given)
        except ValueError:
            raise ValueError(f"{source} is {given!r}, expected seconds >= 0, or 0: never") from None
    if not isinstance(limit, int | float) or isinstance(limit, bool):
        raise TypeError(f"{source} is a {type(limit).__name__}, expected seconds as a number")
    if not limit >= 0:
        raise ValueError(f"{source} is {limit}, expected seconds >= 0, or 0: never")
    return 0.0 if math.isinf(limit) else float(limit)


@contextlib.contextmanager
def waiting(progress: _C.Progress, what: str) -> Iterator[None]:
    """Around a wait, in or before a forward, for the other ranks. An error also names the ranks that have ended."""
    progress.begin_wait(what)
    try:
        yield
    except RuntimeError as error:
        watched = next((one for one in _all_watched() if one.watches(progress)), None)
        if watched is not None and (ended := watched.ended_ranks()):
            error.args = (f"{error}\ndrivetrain: {what} has failed. {ended}",)
        raise
    finally:
        progress.end_wait()


# ---- The other ranks.


class _Board:
    """What the ranks of a process group tell each other, for one reducer, in the group's store.

    A rank reads the records of its own host, and of every other host a summary, which the first rank to come there
    makes of its records at each beat. It reads another host's records themselves only where it has heard nothing new
    for a while, as that first rank may have ended, and of ranks that a report names.
    """

    def __init__(self, store: Any, key: str, ranks: Sequence[int], rank: int, host: str, beat_s: float) -> None:
        """ranks: all of them, for messages; rank: this one's place there; host: its name."""
        self.rank = rank
        self.ranks = ranks
        self._store = store
        self._key = key
        self._host = host
        self._beat_s = beat_s
        least, most = _LONGEST_STORE_CALL_S
        self._timeout_s = min(max(beat_s, least), most)
        self._heard = [time.monotonic()] * len(ranks)
        self._place_on_host = 0  # counts from 1, in the order of coming; 0: has not come yet
        self._on_host: list[int] = []  # the ranks that are known to be here
        self._hosts: list[str] = []  # all that are known, in the order of coming
        self._there: set[str] = set()  # keys that were once found
        self.seen: list[Seen | None] = [None] * len(ranks)  # of every rank, as last read
        self.last: list[Record | None] = [None] * len(ranks)  # of this host's, and of those fetched
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None

    def publish(self, record: Record) -> None:
        def put(store: Any) -> list[tuple[int, Record]]:
            store.set(self._key + str(self.rank), json.dumps(record))
            if self._place_on_host == 0:
                self._place_on_host = self._come(store)
            if self._place_on_host != 1 or len(self._on_host) == len(self.ranks):
                return []
            records = self._records(store, self._find_ranks(store))
            store.set(self._summary_of(self._host), json.dumps({rank: _seen_in(one) for rank, one in records}))
            return records

        self._take(self._ask(put) or ())

    def read(self) -> bool:
        """Looks for what has changed; False if the store does not answer. Marks who is heard."""

        def get(store: Any) -> tuple[list[tuple[int, Record]], dict[int, Seen]]:
            records = self._records(store, self._find_ranks(store))
            others = [self._summary_of(host) for host in self._find_hosts(store) if host != self._host]
            summaries = [json.loads(text) for text in self._values(store, others) if text is not None]
            seen = {int(rank): Seen(*facts) for summary in summaries for rank, facts in summary.items()}
            known = {rank for rank, _ in records}
            stale = [
                rank
                for rank in range(len(self.ranks))
                if rank not in known
                and (rank not in seen or not self._is_new(rank, seen[rank]))
                and self.silence_s(rank) >= _STALE_BEATS * self._beat_s
            ]
            return records + self._records(store, stale), seen

        found = self._ask(get)
        if found is None:
            return False
        records, seen = found
        for rank, facts in seen.items():
            self._take_seen(rank, facts)
        self._take(records)
        return True

    def fetch(self, ranks: Sequence[int]) -> None:
        """Reads those ranks' own records."""
        self._take(self._ask(lambda store: self._records(store, ranks)) or ())

    def begin_listening(self) -> None:
        self._heard = [time.monotonic()] * len(self.ranks)

    def silence_s(self, rank: int) -> float:
        """How long, as far as reading has shown, that rank has told nothing new."""
        return time.monotonic() - self._heard[rank]

    def _take(self, records: Iterable[tuple[int, Record]]) -> None:
        for rank, record in records:
            self.last[rank] = record
            self._take_seen(rank, _seen_in(record))

    def _take_seen(self, rank: int, facts: Seen) -> None:
        if self._is_new(rank, facts):
            self.seen[rank], self._heard[rank] = facts, time.monotonic()

    def _is_new(self, rank: int, facts: Seen) -> bool:
        seen = self.seen[rank]
        return seen is None or facts.beat > seen.beat

    # What is in the store.

    def _come(self, store: Any) -> int:
        """Enters this rank in the lists; its place among its host's."""
        place = int(store.add(f"{self._key}{self._host}/ranks", 1))
        store.set(f"{self._key}{self._host}/rank/{place}", str(self.rank))
        if place == 1:
            store.set(f"{self._key}host/{store.add(f'{self._key}hosts', 1)}", self._host)
        return place

    def _find_ranks(self, store: Any) -> list[int]:
        """This host's ranks, those included that have come since."""
        if None in self.seen:
            count = int(store.add(f"{self._key}{self._host}/ranks", 0))
            keys = [f"{self._key}{self._host}/rank/{place}" for place in range(1, count + 1)]
            self._on_host = [int(text) for text in self._values(store, keys) if text is not None]
        return self._on_host

    def _find_hosts(self, store: Any) -> list[str]:
        if None in self.seen and len(self._on_host) < len(self.ranks):
            keys = [f"{self._key}host/{i}" for i in range(1, int(store.add(f"{self._key}hosts", 0)) + 1)]
            self._hosts = [text.decode() for text in self._values(store, keys) if text is not None]
        return self._hosts

    def _summary_of(self, host: str) -> str:
        return f"{self._key}{host}/summary"

    def _records(self, store: Any, ranks: Sequence[int]) -> list[tuple[int, Record]]:
        """Those ranks' records, without those that have none."""
        texts = self._values(store, [self._key + str(rank) for rank in ranks])
        return [(rank, json.loads(text)) for rank, text in zip(ranks, texts, strict=True) if text is not None]

    def _values(self, store: Any, keys: Sequence[str]) -> list[bytes | None]:
        """None for a key that is not there, which would be waited for."""
        new = [key for key in keys if key not in self._there]
        if new and store.check(new):
            self._there.update(new)
        else:
            self._there.update(key for key in new if store.check([key]))
        there = [key for key in keys if key in self._there]
        found = dict(zip(there, store.multi_get(there), strict=True)) if there else {}
        return [found.get(key) for key in keys]

    def _ask(self, question: Callable[[Any], R]) -> R | None:
        """Asks the store, until it fails once: then never again. At the end that is usual, as a rank may serve it.

        In a thread of its own: a TCPStore's calls wait for a server that stands still, whatever timeout they are given.
        While one waits nothing else is asked. A forked child asks nothing: the connection is its parent's, and a thread
        that it does not have may have held the lock.
        """
        if os.getpid() != self._process:
            return None
        with self._lock:
            store, answers = self._store, queue.SimpleQueue[R | None]()
            if store is None or (self._asking is not None and self._asking.is_alive()):
                return None

            def ask() -> None:
                try:
                    if _has_hung_up(store):
                        raise ConnectionError("its server has closed the connection")
                    answers.put(question(store))
                except Exception as error:
                    _logger.debug("the process group's store has failed, each rank watches on alone: %s", error)
                    self._store = None
                    answers.put(None)

            self._asking = threading.Thread(target=ask, name="drivetrain-watch-store", daemon=True)
            self._asking.start()
            try:
                return answers.get(timeout=self._timeout_s)
            except queue.Empty:
                return None


# Per process group: our connection to its store, and how many reducers it has had; the same number on every rank.
_stores: WeakKeyDictionary[dist.ProcessGroup, tuple[Any, int]] = WeakKeyDictionary()


def _store_of(group: dist.ProcessGroup) -> tuple[Any, int]:
    store: Any = dist.distributed_c10d._world.pg_map.get(group, ("", None))[1]
    if group not in _stores and _tcp_store_in(store) is not None:
        # A connection carries one call at a time: a rank that waits for a key would keep ours waiting.
        store = store.clone()
    store, number = _stores.get(group, (store, 0))
    _stores[group] = (store, number + 1)
    return store, number


def _tcp_store_in(store: Any) -> TCPStore | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _has_hung_up(store: Any) -> bool:
    """Whether the server of our connection is gone: a call that finds it out has torch print a stack trace."""
    found = re.search(r"client=\S*?fd=(\d+)", repr(_tcp_store_in(store)))
    if found is None:
        return False
    poll = select.poll()
    poll.register(int(found[1]), select.POLLRDHUP)
    return bool(poll.poll(0))


def _board_of(group: dist.ProcessGroup, beat_s: float) -> _Board:
    """A board of its own for each reducer of the group."""
    store, number = _store_of(group)
    ranks = [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]
    return _Board(store, f"drivetrain/watch/{number}/", ranks, dist.get_rank(group), _host_name(), beat_s)


def _host_name() -> str:
    return this_process()["host"] or socket.gethostname()


# ---- This rank.


class Watched:
    """One reducer as the thread sees it. The reducer owns it and it does not know the reducer, so that both end when
    the wrapper does."""

    def __init__(
        self,
        progress: _C.Progress,
        group: dist.ProcessGroup,
        modules: Sequence[tuple[str, nn.Module]],
        limit_s: float,
        wrapper: str,
        device: torch.device | None = None,
    ) -> None:
        """device: one whose streams wait for other ranks while the host goes on; None: the host itself waits."""
        self._wrapper = wrapper
        self._progress = progress
        self._limit_s = limit_s
        self._board = _board_of(group, self.beat_s)
        self._group = weakref.ref(group)
        self._device = device
        self._thread = threading.get_ident()  # the one that builds a model trains it
        self._modules = {id(module): (weakref.ref(module), name) for name, module in modules}
        self._beats = 0
        self._has_failed = False
        self._hang: tuple[int, str] | None = None  # the step and what was awaited there
        self._next_report_s = limit_s
        self._listening_since = 0.0
        _add(self)

    @property
    def beat_s(self) -> float:
        return max(self._limit_s / _BEATS_PER_LIMIT, _SHORTEST_BEAT_S)

    def look(self) -> float:
        """Tells the other ranks where this one is, and reports a wait that is too long.

        Returns:
            Seconds until it should look again.
        """
        now = self._progress.snapshot()
        self._board.publish(self._record(now))
        if None in self._board.seen:  # so that every rank's process is known, should the store end with one
            self._board.read()
        if self._device is not None and now.seconds >= self._limit_s:
            self._give_up_if_hopeless(self._device)
        if not now.awaited or now.seconds < self.beat_s:
            self._hang = None
            return self.beat_s
        if self._hang != (now.step, now.awaited):
            self._hang = (now.step, now.awaited)
            self._next_report_s = self._limit_s
            self._board.read()  # what was published before does not count as heard
            self._board.begin_listening()
            self._listening_since = time.monotonic()
        is_answered = self._board.read()
        # Which ranks are silent is known after so long; a thread that had to wait for a core begins late.
        has_listened = time.monotonic() - self._listening_since >= _SILENT_BEATS * self.beat_s
        if now.seconds >= self._next_report_s and has_listened:
            self._next_report_s = 2 * now.seconds
            report = self._report(now, is_answered)
            self._progress.set_report(now.step, report)
            _logger.warning("%s", report)
        return max(min(self.beat_s, self._next_report_s - now.seconds), _SHORTEST_BEAT_S)

    def watches(self, progress: _C.Progress) -> bool:
        return self._progress is progress

    def ended_ranks(self) -> str:
        """Sentences that name the ranks whose processes are known to have ended, and where they were last seen.

        "" if none is. To be called once a collective has failed.
        """
        deadline = time.monotonic() + _ENDING_S
        self._board.read()
        while not (ended := self._ended()) and time.monotonic() < deadline:
            time.sleep(_ENDING_S / 20)
        # For the others, who are to name the rank that ended first, and not those that ended over it.
        self._has_failed = True
        self._board.publish(self._record(self._progress.snapshot()))
        if ended:
            self._board.read()
        return self._ended()

    def _ended(self) -> str:
        """Those come first that have told of no error of their own."""
        board = self._board
        ended = [
            (record["has_failed"], rank, record)
            for rank, record in enumerate(board.last)
            if rank != board.rank and record is not None and has_ended(record["process"])
        ]
        sentences = [
            f"Rank {board.ranks[rank]} has ended: its process {record['process']['pid']} is gone, last seen "
            f"{record['where']} in step {record['step']}."
            for _, rank, record in sorted(ended, key=lambda one: one[:2])
        ]
        if len(sentences) > _RANKS_NAMED:
            sentences[_RANKS_NAMED:] = [f"{len(sentences) - _RANKS_NAMED} more have ended."]
        return " ".join(sentences)

    def _give_up_if_hopeless(self, device: torch.device) -> None:
        """Ends a wait of the device's for a rank that has ended: aborts the group, and raises in the training thread.

        Only that: ranks may end before others, and whoever is silent may come back.
        """
        lag = self._progress.device_lag()
        if lag is None or lag.seconds < self._limit_s or self._progress.why_given_up():
            return
        self._board.read()
        ended, group = self._ended(), self._group()
        if not ended or group is None:
            return
        why = (
            f"drivetrain: {device} has waited {_rounded(lag.seconds)} s for collectives of step {lag.step} of "
            f"{self._wrapper} that cannot complete, and the process group was aborted. {ended} Look for the first "
            "error in that rank's log, and start the job again: the gradients of this step are undefined."
        )
        _logger.error("%s", why)
        self._progress.give_up(why)
        _raise_in(self._thread, why)
        # An abort may itself wait for what the device is in the middle of.
        threading.Thread(target=_abort, args=(group, device), name="drivetrain-watch-abort", daemon=True).start()

    def lateness(self) -> list[float]:
        """See DistributedDataParallel.lateness."""
        seen = self._board.seen if self._board.read() else [None] * len(self._board.ranks)
        waits = [facts.wait_s if facts else None for facts in seen]
        waits[self._board.rank] = self._record(self._progress.snapshot())["wait_s"]
        longest = max((wait for wait in waits if wait is not None), default=0.0)
        return [math.nan if wait is None else longest - wait for wait in waits]

    def _record(self, now: _C.ProgressSnapshot) -> Record:
        self._beats += 1
        return {
            "beat": self._beats,
            "step": now.step,
            "place": now.place,
            "awaited": now.awaited,
            "where": _where(self._thread, self._modules),
            "wait_s": now.wait_s if now.num_waits else None,
            "process": this_process(),
            "has_failed": self._has_failed,
        }

    def _report(self, now: _C.ProgressSnapshot, is_answered: bool) -> str:
        board = self._board
        name = f"rank {board.ranks[board.rank]}"
        step = f"step {now.step} of {self._wrapper}" if len(_watched) > 1 else f"step {now.step}"
        waits = f"{name} has waited {_rounded(now.seconds)} s: {now.awaited} of {step} waits"
        if not is_answered:
            return (
                f"{waits}; for whom is not known, as the process group's store does not answer either (it is served by "
                "torchrun, or else by rank 0's process)"
            )
        board.fetch([rank for _, rank in self._behind(now)])  # a summary may be older than what it sums up
        behind = self._behind(now)
        if not behind:
            return f"{waits} although every rank has come to it: what carries it is slow or stands still"
        named = [self._describe(rank, now.step) for _, rank in behind[:_RANKS_NAMED]]
        if len(behind) > _RANKS_NAMED:
            named.append(f"{len(behind) - _RANKS_NAMED} more")
        return f"{waits} for {'; for '.join(named)}"

    def _behind(self, now: _C.ProgressSnapshot) -> list[tuple[tuple[int, int], int]]:
        """The ranks that have not come to what is awaited, or are silent, each with where it is.

        The furthest behind come first: others may wait for them, too.
        """
        places = [(facts.step, facts.place) if facts else (0, 0) for facts in self._board.seen]
        return sorted(
            (place, rank)
            for rank, place in enumerate(places)
            if rank != self._board.rank and (place < (now.step, now.needed) or self._is_silent(rank))
        )

    def _is_silent(self, rank: int) -> bool:
        return self._board.seen[rank] is None or self._board.silence_s(rank) >= _SILENT_BEATS * self.beat_s

    def _describe(self, rank: int, step: int) -> str:
        name, record = f"rank {self._board.ranks[rank]}", self._board.last[rank]
        if record is None:
            return f"{name}, which has not been heard of at all"
        silence = f"which has not been heard of for {_rounded(self._board.silence_s(rank))} s"
        facts = [silence] if self._is_silent(rank) else []
        facts.append(f"last seen {record['where']}")
        if record["awaited"]:
            facts.append(f"itself waiting for {record['awaited']} of step {record['step']}")
        elif record["step"] != step:
            facts.append(f"in step {record['step']}")
        return f"{name}, {', '.join(facts)}"


def _raise_in(thread: int, why: str) -> None:
    """Raises RuntimeError(why) in that thread, once it runs Python again."""

    class RankHasEnded(RuntimeError):
        def __init__(self) -> None:  # Python makes it, from the class alone
            super().__init__(why)

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(RankHasEnded))


def _abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """Ends the group's collectives on that device, where its backend can."""
    try:
        group._get_backend(device).abort()
    except Exception as error:
        _logger.error("the process group's backend for %s cannot be aborted: %s", device, error)


def _rounded(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _where(thread: int, modules: dict[int, tuple["weakref.ref[nn.Module]", str]]) -> str:
    """Where that thread is: "in layer9.mlp (train.py:88 in forward)", or "at train.py:52 in train"."""
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return "nowhere: the thread that built the model has ended"
    stack = stack_of(innermost)
    line = users_line(stack)
    for frame in stack:
        module = self_of(frame)
        reference, name = modules.get(id(module), (None, ""))
        if reference is not None and reference() is module:
            return f"in {name or type(module).__name__} ({line})"
    return f"at {line}"


# ---- The thread.

_watched: "dict[int, weakref.ref[Watched]]" = {}
_lock = threading.Lock()  # around the thread's beginning and end
_thread: threading.Thread | None = None
_is_exiting = False
# For waking the thread: its put() may come at any moment in any thread, from garbage collection.
_wake: "queue.SimpleQueue[None]" = queue.SimpleQueue()
_has_exit_hooks = False


def _add(watched: Watched) -> None:
    global _thread, _has_exit_hooks
    key = id(watched)

    def forget(_: object) -> None:
        _watched.pop(key, None)
        _wake.put(None)

    with _lock:
        if not _has_exit_hooks:
            atexit.register(_end_at_exit)
            os.register_at_fork(after_in_child=_forget_after_fork)
            _has_exit_hooks = True
        _watched[key] = weakref.ref(watched, forget)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="drivetrain-watch", daemon=True)
            _thread.start()
    _wake.put(None)


def _all_watched() -> list[Watched]:
    return [watched for reference in list(_watched.values()) if (watched := reference()) is not None]


def _run() -> None:
    global _thread
    while True:
        wait_s = _look_at_all()
        with contextlib.suppress(queue.Empty):
            _wake.get(timeout=wait_s)
        with _lock:
            if _is_exiting or not _watched:
                _thread = None
                return


def _look_at_all() -> float:
    """Seconds until the next look is due. No reference to what was looked at outlives it."""
    wait_s = DEFAULT_LIMIT_S
    for reference in list(_watched.values()):
        watched = reference()
        if watched is None:
            continue
        try:
            wait_s = min(wait_s, watched.look())
        except Exception:  # a report that cannot be made must not end the others
            _logger.debug("looking after a reducer failed", exc_info=True)
            wait_s = min(wait_s, watched.beat_s)
    return wait_s


def _end_at_exit() -> None:
    """Without it the thread might ask for the GIL when Python has shut down, and that aborts the process."""
    global _is_exiting
    with _lock:
        _is_exiting = True
        thread = _thread
    _wake.put(None)
    if thread is not None:
        thread.join(_EXIT_S)


def _forget_after_fork() -> None:
    """The child has no such thread, and the parent's connection is not its to use."""
    global _lock, _thread, _wake
    _lock = threading.Lock()
    _wake = queue.SimpleQueue()
    _thread = None
    _watched.clear()
    _stores.clear()
