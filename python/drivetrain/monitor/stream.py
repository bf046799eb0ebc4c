"""The event stream, whose fields docs/monitoring.md documents.

Every sink has its own thread and a bounded queue, so that none delays training or another sink.
"""

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..threads import Thread

Event = dict[str, Any]
_logger = logging.getLogger("drivetrain")
CAPACITY = 4096  # events per sink
VERSION = 2  # grows when a field changes its meaning or goes; readers must ignore fields that they do not know


def event(kind: str, rank: int, step: int, **fields: Any) -> Event:
    """Returns an event with the fields that all events have, and with the fields of its kind.

    `step` is the number of the last step that has ended, from 1; 0 before the first.
    """
    return {"v": VERSION, "type": kind, "time": time.time(), "rank": rank, "step": step, **fields}


class Sink(ABC):
    """Receives the events of a run. All its methods run in one thread of its own and may block or raise."""

    name = "sink"
    close_s = 5.0  # the limit on waiting for it at the end of the run

    def open(self) -> None:  # noqa: B027
        """Opens files and connections."""

    @abstractmethod
    def write(self, event: Event) -> None:
        """Takes one event of docs/monitoring.md's schema."""

    def close(self) -> None:  # noqa: B027
        """Flushes and closes."""


class _Lane:
    """One sink with its queue and its thread. It drops events that find the queue full or that the sink refuses."""

    def __init__(self, sink: Sink, capacity: int) -> None:
        self.sink = sink
        self.num_dropped = 0
        self._has_failed = False
        self._capacity = capacity + 1  # with the event that the sink is writing
        self._events: deque[Event] = deque()
        self._has_news = threading.Event()
        self._is_closing = False
        self._lock = threading.Lock()
        self._thread = Thread(self._work, f"drivetrain-monitor-{sink.name}")
        self._thread.start()

    def offer(self, events: Sequence[Event]) -> None:
        with self._lock:
            num_free = max(self._capacity - len(self._events), 0)
            self._events.extend(events[:num_free])
            self.num_dropped += len(events[num_free:])
        # An event that is set already has not been cleared yet, and the thread looks into the queue after it clears it.
        if not self._has_news.is_set():
            self._has_news.set()

    def close(self, begin: float) -> None:
        """Waits until the sink has taken all queued events. Events left at its limit, from `begin` on, are dropped."""
        self._is_closing = True
        self._has_news.set()
        self._thread.join(max(begin + self.sink.close_s - time.monotonic(), 0.0))
        if self._thread.is_alive():
            with self._lock:
                self.num_dropped += len(self._events)  # the process may end before the sink takes them
                self._events.clear()
            self._note(f"took nothing until the end of the run, within {self.sink.close_s:g} s")

    def _work(self) -> None:
        is_open = is_last = False
        while not is_last:
            self._has_news.wait()
            self._has_news.clear()
            is_last = self._is_closing  # read first: no event comes after it
            while (event := self._next()) is not None:
                has_failed = False
                try:
                    if not is_open:
                        self.sink.open()
                        is_open = True
                    self.sink.write(event)
                except Exception as error:
                    has_failed = True
                    self._note(f"{type(error).__name__}: {error}")
                with self._lock:
                    if self._events:  # otherwise close() has counted the event as dropped
                        self._events.popleft()
                        self.num_dropped += has_failed
        if is_open:
            try:
                self.sink.close()
            except Exception as error:
                self._note(f"{type(error).__name__}: {error}")

    def _next(self) -> Event | None:
        with self._lock:
            return self._events[0] if self._events else None

    def _note(self, error: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            _logger.warning("monitor: %s drops events, and the training goes on: %s", self.sink.name, error)


class Stream:
    """Hands every event to all sinks without waiting for any. One that is `capacity` events behind drops some."""

    def __init__(self, sinks: Sequence[Sink], capacity: int = CAPACITY) -> None:
        self._lanes = [_Lane(sink, capacity) for sink in sinks]

    def send(self, *events: Event) -> None:
        """Queues events for every sink."""
        if not events:  # without news, no sink's thread need wake up
            return
        for lane in self._lanes:
            lane.offer(events)

    def dropped(self) -> dict[str, int]:
        """Returns the number of events that each sink has not taken."""
        return {lane.sink.name: lane.num_dropped for lane in self._lanes}

    def close(self) -> None:
        """Ends all sinks. Their limits run at the same time."""
        begin = time.monotonic()
        for lane in self._lanes:
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down and starts no thread
                lane.close(begin)
