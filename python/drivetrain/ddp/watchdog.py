"""The watchdog: one thread per process that looks at every watched reducer from time to time."""

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ..threads import Thread, settle_on_device
from .control_block import forget_connections, wait_for_questions

if TYPE_CHECKING:
    from .hang_reports import HangReporter

_LONGEST_WAIT_S = 30.0
_EXIT_S = 5.0  # time that the threads get to end at exit, in case the store does not answer

_logger = logging.getLogger("drivetrain")


_watched: "dict[int, weakref.ref[HangReporter]]" = {}
_lock = threading.Lock()  # guards the thread's start and end
_thread: threading.Thread | None = None
_is_exiting = False
# Wakes the thread. A SimpleQueue's put() may come at any moment in any thread, from garbage collection.
_wake: "queue.SimpleQueue[None]" = queue.SimpleQueue()
_has_exit_hooks = False


def add(watched: "HangReporter") -> None:
    """Looks at `watched` for as long as it exists. Starts the thread if it is the first."""
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
            _thread = Thread(_run, "drivetrain-watch")
            _thread.start()
    _wake.put(None)


def all_watched() -> "list[HangReporter]":
    """Returns everything that the watchdog looks at."""
    return [watched for reference in list(_watched.values()) if (watched := reference()) is not None]


def has_several() -> bool:
    """Returns True if the watchdog looks at more than one object."""
    return len(_watched) > 1


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
    """Returns the seconds until the next look. Keeps no reference to the objects."""
    settle_on_device()  # a process may use its GPU later than the thread began
    wait_s = _LONGEST_WAIT_S
    for reference in list(_watched.values()):
        watched = reference()
        if _is_exiting:
            break
        if watched is None:
            continue
        try:
            wait_s = min(wait_s, watched.look())
        except Exception:  # a failed report must not prevent the others
            _logger.debug("looking after a reducer failed", exc_info=True)
            wait_s = min(wait_s, watched.beat_s)
    return wait_s


def _end_at_exit() -> None:
    """Ends the threads: if one asked for the GIL after Python has shut down, the process would abort."""
    global _is_exiting
    deadline = time.monotonic() + _EXIT_S
    with _lock:
        _is_exiting = True
        thread = _thread
    _wake.put(None)
    if thread is not None:
        thread.join(_EXIT_S)
    wait_for_questions(max(deadline - time.monotonic(), 0))


def _forget_after_fork() -> None:
    """Resets the state of a forked child, which has no such thread."""
    global _lock, _thread, _wake
    _lock = threading.Lock()
    _wake = queue.SimpleQueue()
    _thread = None
    _watched.clear()
    forget_connections()
