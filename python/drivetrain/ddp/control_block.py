"""The control block: what the ranks of a process group tell each other about their progress, in the group's store."""

import itertools
import json
import logging
import os
import queue
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..processes import Process, has_ended, this_process
from ..threads import Thread

R = TypeVar("R")

_STALE_BEATS = 1.25  # after so many beats the record itself is read, as its summary may be another beat old
_LONGEST_STORE_CALL_S = (1.0, 10.0)  # a call may take one beat, within these bounds

_logger = logging.getLogger("drivetrain")


class Status(NamedTuple):
    """The part of a rank's record that other hosts read."""

    beat: int
    step: int
    position: int
    wait_s: float | None
    has_ended: bool  # a rank of the same host has found its process gone


class RankRecord(TypedDict):
    """The record of a rank, which the others read."""

    beat: int  # grows with every record
    step: int
    position: int
    awaited: str  # "": nothing
    where: str  # module, file and line
    wait_s: float | None  # median seconds of waiting per step; None: no step has ended yet
    process: Process
    has_failed: bool  # a collective of this rank has failed, so that its end is a consequence


def status_of(record: RankRecord) -> Status:
    """Returns the part of a record that other hosts read."""
    ended = has_ended(record["process"])
    return Status(record["beat"], record["step"], record["position"], record["wait_s"], ended)


class ControlBlock:
    """Publishes this rank's record and reads the others', for one reducer.

    A rank reads the records of its own host. From every other host it reads a summary, which the first rank there that
    has not ended makes of its host's records at each beat. It reads another host's records for ranks that a report
    names. It also reads them where nothing new has come for a while, as all ranks there may have ended.

    Args:
        store: The process group's store.
        key: Prefix of all keys.
        ranks: The global rank of every rank of the group, for messages.
        rank: This rank in the group.
        host: Name of this host.
        beat_s: Seconds between two records.
    """

    def __init__(self, store: Any, key: str, ranks: Sequence[int], rank: int, host: str, beat_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self._store = store
        self._key = key
        self._host = host
        self._beat_s = beat_s
        least, most = _LONGEST_STORE_CALL_S
        self._timeout_s = min(max(beat_s, least), most)
        self._heard = [time.monotonic()] * len(ranks)
        self._arrival = 0  # this rank's number among its host's ranks, from 1 in order of arrival; 0: has not arrived
        self._on_host: list[int] = []  # the known ranks of this host
        self._hosts: list[str] = []  # all known hosts, in order of arrival
        self._found: set[str] = set()  # keys that are known to exist
        self.seen: list[Status | None] = [None] * len(ranks)  # by rank, as last read
        self.last: list[RankRecord | None] = [None] * len(ranks)  # of this host's ranks, and of those fetched
        self._process = os.getpid()
        self._socket: int | None = None  # of the store's connection; unknown before the first question
        self._lock = threading.Lock()
        self._is_asking = False

    def publish(self, record: RankRecord) -> None:
        """Writes this rank's record, and its host's summary if that is its task."""

        def put(store: Any) -> list[tuple[int, RankRecord]]:
            store.set(self._key + str(self.rank), json.dumps(record))
            if self._arrival == 0:
                self._arrival = self._arrive(store)
            earlier = [self.last[rank] for rank in self._on_host[: self._arrival - 1]]
            is_first = len(earlier) == self._arrival - 1 and all(one and has_ended(one["process"]) for one in earlier)
            if not is_first or len(self._on_host) == len(self.ranks):
                return []
            records = self._records(store, self._find_ranks(store))
            store.set(self._summary_of(self._host), json.dumps({rank: status_of(one) for rank, one in records}))
            return records

        self._take(self.ask(put) or ())

    def read(self) -> bool:
        """Reads what has changed, and notes which ranks have published. Returns False if the store does not answer."""

        def get(store: Any) -> tuple[list[tuple[int, RankRecord]], dict[int, Status]]:
            records = self._records(store, self._find_ranks(store))
            others = [self._summary_of(host) for host in self._find_hosts(store) if host != self._host]
            summaries = [json.loads(text) for text in self._values(store, others) if text is not None]
            seen = {int(rank): Status(*fields) for summary in summaries for rank, fields in summary.items()}
            known = {rank for rank, _ in records}
            stale = [
                rank
                for rank in range(len(self.ranks))
                if rank not in known
                and (rank not in seen or not self._is_new(rank, seen[rank]))
                and self.silence_s(rank) >= _STALE_BEATS * self._beat_s
            ]
            # A report names where these were last seen.
            stale += [rank for rank, status in seen.items() if status.has_ended and self.last[rank] is None]
            return records + self._records(store, stale), seen

        found = self.ask(get)
        if found is None:
            return False
        records, seen = found
        for rank, status in seen.items():
            self._take_status(rank, status)
        self._take(records)
        return True

    def fetch(self, ranks: Sequence[int]) -> None:
        """Reads the records of these ranks."""
        self._take(self.ask(lambda store: self._records(store, ranks)) or ())

    def begin_listening(self) -> None:
        """Counts the silence of every rank from now. Earlier records do not count as heard."""
        self.read()
        self._heard = [time.monotonic()] * len(self.ranks)

    def silence_s(self, rank: int) -> float:
        """Returns the seconds since reading has last shown something new of that rank."""
        return time.monotonic() - self._heard[rank]

    def is_silent(self, rank: int, beats: int) -> bool:
        """Returns True if that rank has published nothing for so many beats, or never."""
        return self.seen[rank] is None or self.silence_s(rank) >= beats * self._beat_s

    def has_ended(self, rank: int) -> bool:
        """Returns True if this rank, or one of the other's host, finds its process gone."""
        record, seen = self.last[rank], self.seen[rank]
        return (record is not None and has_ended(record["process"])) or (seen is not None and seen.has_ended)

    def _take(self, records: Iterable[tuple[int, RankRecord]]) -> None:
        for rank, record in records:
            self.last[rank] = record
            self._take_status(rank, status_of(record))

    def _take_status(self, rank: int, status: Status) -> None:
        if self._is_new(rank, status):
            self.seen[rank], self._heard[rank] = status, time.monotonic()

    def _is_new(self, rank: int, status: Status) -> bool:
        seen = self.seen[rank]
        return seen is None or status.beat > seen.beat or (status.has_ended and not seen.has_ended)

    # ---- Keys of the store.

    def _arrive(self, store: Any) -> int:
        """Enters this rank in the lists, and returns its number among its host's ranks."""
        number = int(store.add(f"{self._key}{self._host}/ranks", 1))
        store.set(f"{self._key}{self._host}/rank/{number}", str(self.rank))
        if number == 1:
            store.set(f"{self._key}host/{store.add(f'{self._key}hosts', 1)}", self._host)
        return number

    def _find_ranks(self, store: Any) -> list[int]:
        """Returns this host's ranks, with those that have arrived since the last call."""
        if None in self.seen:
            count = int(store.add(f"{self._key}{self._host}/ranks", 0))
            keys = [f"{self._key}{self._host}/rank/{number}" for number in range(1, count + 1)]
            self._on_host = [int(text) for text in self._values(store, keys) if text is not None]
        return self._on_host

    def _find_hosts(self, store: Any) -> list[str]:
        if None in self.seen and len(self._on_host) < len(self.ranks):
            keys = [f"{self._key}host/{i}" for i in range(1, int(store.add(f"{self._key}hosts", 0)) + 1)]
            self._hosts = [text.decode() for text in self._values(store, keys) if text is not None]
        return self._hosts

    def _summary_of(self, host: str) -> str:
        return f"{self._key}{host}/summary"

    def _records(self, store: Any, ranks: Sequence[int]) -> list[tuple[int, RankRecord]]:
        """Returns the records of the ranks that have published one."""
        texts = self._values(store, [self._key + str(rank) for rank in ranks])
        return [(rank, json.loads(text)) for rank, text in zip(ranks, texts, strict=True) if text is not None]

    def _values(self, store: Any, keys: Sequence[str]) -> list[bytes | None]:
        """Returns None for a key that does not exist, as the store would wait for it."""
        new = [key for key in keys if key not in self._found]
        if new and store.check(new):
            self._found.update(new)
        else:
            self._found.update(key for key in new if store.check([key]))
        found_keys = [key for key in keys if key in self._found]
        values = dict(zip(found_keys, store.multi_get(found_keys), strict=True)) if found_keys else {}
        return [values.get(key) for key in keys]

    def ask(self, question: Callable[[Any], R]) -> R | None:
        """Asks the store in a thread of its own, and returns None if it does not answer in time.

        A TCPStore's call waits for a stopped server whatever timeout it gets. While a call waits nothing else is asked.
        After a failure nothing is asked again: at the end of a job that is usual, as a rank may serve the store. A
        forked child asks nothing. The connection is its parent's, and a thread that it lacks may hold the lock.
        """
        if os.getpid() != self._process:
            return None
        with self._lock:
            store, answers = self._store, queue.SimpleQueue[R | None]()
            if store is None or self._is_asking:
                return None

            def ask() -> None:
                answer = None
                try:
                    if self._socket is None:
                        self._socket = _socket_of(store)
                    if _has_hung_up(self._socket):
                        raise ConnectionError("its server has closed the connection")
                    answer = question(store)
                except Exception as error:
                    _logger.debug("the process group's store has failed, each rank watches on alone: %s", error)
                    self._store = None
                self._is_asking = False  # before the answer, as the next question may follow at once
                answers.put(answer)

            self._is_asking = True
            thread = Thread(ask, "drivetrain-watch-store")
            _questions.add(thread)
            thread.start()
            try:
                return answers.get(timeout=self._timeout_s)
            except queue.Empty:
                return None


# This process's connections to stores of groups, and the numbers of their control blocks, the same on every rank.
_connections: WeakKeyDictionary[dist.ProcessGroup, tuple[Any, Iterator[int]]] = WeakKeyDictionary()
_questions: WeakSet[threading.Thread] = WeakSet()  # threads that ask a store


def control_block_of(group: dist.ProcessGroup, beat_s: float) -> ControlBlock:
    """Returns a new control block for a reducer of the group. Every rank of the group must call it."""
    if group not in _connections:
        _connections[group] = connection_to_store(group), itertools.count()
    store, numbers = _connections[group]
    ranks = [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]
    return ControlBlock(store, f"drivetrain/watch/{next(numbers)}/", ranks, dist.get_rank(group), host_name(), beat_s)


def forget_connections() -> None:
    """Forgets all connections: a forked child must not use its parent's."""
    _connections.clear()
    _questions.clear()


def wait_for_questions(seconds: float) -> None:
    """Waits until no thread asks a store any more, for `seconds` at most."""
    deadline = time.monotonic() + seconds
    for thread in list(_questions):
        thread.join(max(deadline - time.monotonic(), 0))


def host_name() -> str:
    """Returns a name that is the same for all ranks of this host."""
    return this_process()["host"] or socket.gethostname()


def connection_to_store(group: dist.ProcessGroup) -> Any:
    """Returns a connection of its own to the group's store; None if the group has no store.

    A connection carries one call at a time: a rank that waits for a key would block another user's calls.
    """
    store: Any = dist.distributed_c10d._world.pg_map.get(group, ("", None))[1]
    return store.clone() if _tcp_store_in(store) is not None else store


def _tcp_store_in(store: Any) -> TCPStore | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _socket_of(store: Any) -> int:
    """Returns the file descriptor of the store's connection, -1 if it has none.

    torch tells it in a text with host names. Looking them up takes seconds where the name server is slow.
    """
    found = re.search(r"client=\S*?fd=(\d+)", repr(_tcp_store_in(store)))
    return -1 if found is None else int(found[1])


def _has_hung_up(connection: int) -> bool:
    """Returns True if the server has closed our connection. A call that finds this makes torch print a stack trace."""
    if connection < 0:
        return False
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
