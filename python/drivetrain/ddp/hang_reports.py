"""Hang reports: the watchdog thread publishes this rank's progress and names the ranks that delay it.

Each rank writes a short record into the process group's store every quarter of the limit (see control_block.py). A rank
that has waited for the limit reads what the others have written, and logs which ranks are behind it. Nothing here takes
the reducer's lock, which a waiting rank holds, and no clock is compared with another host's. The watchdog is one thread
per process, which looks at every reducer from time to time.
"""

import atexit
import contextlib
import ctypes
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from .. import _C
from ..frames import self_of, stack_of_thread, users_line
from ..processes import this_process
from ..threads import Thread, settle_on_device
from . import nccl_ras
from .control_block import RankRecord, control_block_of, forget_connections, wait_for_questions

if TYPE_CHECKING:
    from .reducer import Reducer

VARIABLE = "DRIVETRAIN_REPORT_HANG_AFTER"
DEFAULT_LIMIT_S = 8.0

_TIMES_THE_LONGEST = 3  # a wait that has ended, as for the evaluation of one rank, lets later ones take as many times
_BEATS_PER_LIMIT = 4
_SILENT_BEATS = 2  # a rank that publishes nothing for so many is called silent
_SHORTEST_BEAT_S = 0.05
_RANKS_NAMED = 4
_LONGEST_QUESTION_S = 5.0  # to NCCL
# A process closes its connections, which the others notice, shortly before it has ended.
_ENDING_S = 0.5
_LONGEST_PAUSE_S = 30.0  # between two looks
_EXIT_S = 5.0  # time that the threads get to end at exit, in case the store does not answer

_logger = logging.getLogger("drivetrain")

_Modules = dict[int, tuple["weakref.ref[nn.Module]", str]]  # module and name, by id
_Wait = tuple[int, str]  # the step, and what is awaited
_Position = tuple[int, int]  # a synchronized step, and a position of `Progress` in it; the smaller one is behind


def limit_from(argument: float | None) -> float:
    """Returns the limit in seconds, 0 for none: the argument, else the environment variable, else the default."""
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
    """Marks a wait for the other ranks, in or before a forward. An error also names the ranks that have ended."""
    progress.begin_wait(what)
    try:
        yield
    except RuntimeError as error:
        for reference in list(_watched.values()):
            reporter = reference()
            if reporter is not None and reporter.progress is progress and (ended := reporter.ended_ranks()):
                error.args = (f"{error}\ndrivetrain: {what} has failed. {ended}",)
        raise
    finally:
        progress.end_wait()


class HangReporter:
    """Reports the waits of one reducer.

    The reducer owns it and it does not know the reducer, so that both end when the wrapper does.

    Attributes:
        progress: Progress that the reducer publishes.
    """

    def __init__(self, reducer: "Reducer") -> None:
        self._wrapper, self._thread = reducer.title, reducer.thread
        self.progress: _C.Progress = reducer.progress()
        self._limit_s = reducer.report_hang_after
        self._block = control_block_of(reducer.process_group, self.beat_s)
        self._group = weakref.ref(reducer.process_group)
        # Its streams wait for other ranks while the host goes on. On the CPU a collective with an ended rank fails.
        self._device = device if (device := reducer.params[0].device).type != "cpu" else None
        self._comm = weakref.ref(reducer.comm)  # its last owner waits for its end, which the watchdog must not
        self._modules: _Modules = {id(module): (weakref.ref(module), name) for name, module in reducer.modules}
        self._beats = 0
        self._has_failed = False
        self._wait: _Wait | None = None
        self._waited_s = self._longest_s = 0.0  # of this wait as last seen, and of those that ended
        self._next_report_s = self._limit_s
        self._listening_since = 0.0
        _watch(self)

    @property
    def beat_s(self) -> float:
        """Seconds between two records."""
        return max(self._limit_s / _BEATS_PER_LIMIT, _SHORTEST_BEAT_S)

    def look(self) -> float:
        """Publishes this rank's record, and reports a wait that is too long.

        Returns:
            Seconds until the next look.
        """
        now = self.progress.snapshot()
        self._block.publish(self._record(now))
        if None in self._block.seen:  # learn every rank's process early: the store may end with one
            self._block.read()
        if self._device is not None and now.seconds >= self._limit_s:
            self._look_at_device(self._device, now)
        if not now.awaited or now.seconds < self.beat_s:
            if now.seconds < self.beat_s:
                self._begin_wait(None, 0.0)
            return self.beat_s
        self._begin_wait((now.step, now.awaited), now.seconds)
        is_answered = self._block.read()
        if now.seconds >= self._next_report_s and self._has_listened():
            self._next_report_s = 2 * now.seconds
            self._tell(now.step, self._report(now, is_answered))
        return max(min(self.beat_s, self._next_report_s - now.seconds), _SHORTEST_BEAT_S)

    def wait_times(self) -> list[float | None]:
        """Returns every rank's seconds of waiting per step; None for a rank that has published nothing."""
        seen = self._block.seen if self._block.read() else [None] * len(self._block.ranks)
        waits = [status.wait_s if status else None for status in seen]
        waits[self._block.rank] = self._record(self.progress.snapshot())["wait_s"]
        return waits

    def ended_ranks(self) -> str:
        """Names the ranks whose processes have ended, and where they were last seen; "" if none has.

        Call it after a collective has failed.
        """
        deadline = time.monotonic() + _ENDING_S
        self._block.read()
        while not (ended := self._describe_ended()) and time.monotonic() < deadline:
            time.sleep(_ENDING_S / 20)
        # Lets the others name the rank that ended first, and not those that ended because of it.
        self._has_failed = True
        self._block.publish(self._record(self.progress.snapshot()))
        if ended:
            self._block.read()
        return self._describe_ended()

    def _describe_ended(self) -> str:
        block = self._block
        ended = [
            (rank, record)
            for rank, record in enumerate(block.last)
            if rank != block.rank and record is not None and block.has_ended(rank)
        ]
        sentences = [
            f"Rank {block.ranks[rank]} has ended: its process {record['process']['pid']} is gone, last seen "
            f"{record['where']} in step {record['step']}."
            # Those come first that reported no error of their own.
            for rank, record in sorted(ended, key=lambda one: (one[1]["has_failed"], one[0]))
        ]
        if len(sentences) > _RANKS_NAMED:
            sentences[_RANKS_NAMED:] = [f"{len(sentences) - _RANKS_NAMED} more have ended."]
        return " ".join(sentences)

    def _look_at_device(self, device: torch.device, now: _C.ProgressSnapshot) -> None:
        """Reports a device that waits too long for other ranks, unless the host itself waits, which look() reports.

        If one of them has ended, this aborts the group, and raises in the training thread. It does so for no other
        reason: ranks may end before others, and a silent rank may come back.
        """
        lag = self.progress.device_lag()
        if lag is None or lag.seconds < self._limit_s or self.progress.why_given_up():
            return
        self._block.read()
        ended, group = self._describe_ended(), self._group()
        if not ended or group is None:
            if not now.awaited:  # It is reported once silent ranks are known, and each time that it has doubled.
                self._begin_wait((lag.step, str(device)), lag.seconds)
                if lag.seconds >= self._next_report_s and self._has_listened():
                    self._next_report_s = 2 * lag.seconds
                    self._tell(lag.step, self._report_of_device(device, lag))
            return
        why = (
            f"drivetrain: {device} has waited {_rounded(lag.seconds)} s for collectives of step {lag.step} of "
            f"{self._wrapper} that cannot complete, and the process group was aborted. {ended} Look for the first "
            "error in that rank's log, and start the job again: the gradients of this step are undefined."
        )
        _logger.error("%s", why)
        self.progress.give_up(why)
        _raise_in(self._thread, why)
        # An abort may itself wait for what the device is executing.
        Thread(_abort, "drivetrain-watch-abort", (self._comm(), group, device, why)).start()

    def _begin_wait(self, wait: _Wait | None, seconds: float) -> None:
        """Notes that this wait has lasted for so many seconds; None: nothing is awaited."""
        if wait != self._wait:
            self._wait, self._longest_s = wait, max(self._longest_s, self._waited_s)
            self._next_report_s = max(self._limit_s, _TIMES_THE_LONGEST * self._longest_s)
            if wait is not None:
                self._block.begin_listening()
                self._listening_since = time.monotonic()
        self._waited_s = seconds

    def _has_listened(self) -> bool:
        """Returns True once silent ranks are known. This thread may begin late where it had to wait for a core."""
        return time.monotonic() - self._listening_since >= _SILENT_BEATS * self.beat_s

    def _tell(self, step: int, report: str) -> None:
        self.progress.set_report(step, report)
        _logger.warning("%s", report)

    def _record(self, now: _C.ProgressSnapshot) -> RankRecord:
        self._beats += 1
        return {
            "beat": self._beats,
            "step": now.step,
            "position": now.position,
            "awaited": now.awaited,
            "where": _where(self._thread, self._modules),
            "wait_s": now.wait_s if now.num_waits else None,
            "process": this_process(),
            "has_failed": self._has_failed,
        }

    # ---- Reports.

    def _report(self, now: _C.ProgressSnapshot, is_answered: bool) -> str:
        block = self._block
        name = f"rank {block.ranks[block.rank]}"
        step = f"step {now.step} of {self._wrapper}" if len(_watched) > 1 else f"step {now.step}"
        waits = f"{name} has waited {_rounded(now.seconds)} s: {now.awaited} of {step} waits"
        if not is_answered:
            return (
                f"{waits}; for which rank is not known, as the process group's store does not answer either "
                "(torchrun, or else rank 0, serves it)"
            )
        block.fetch(self._behind((now.step, now.needed)))  # a summary may be older than the records
        behind = self._behind((now.step, now.needed))
        if not behind:
            return f"{waits} although every rank has come to it: what carries it is slow or stands still"
        return f"{waits} for {self._named(behind, now.step)}"

    def _report_of_device(self, device: torch.device, lag: _C.DeviceLag) -> str:
        """Names the ranks that have not started all collectives of the step that the device has not ended."""
        waits = (
            f"rank {self._block.ranks[self._block.rank]} has waited {_rounded(lag.seconds)} s: {device} has not ended "
        )
        waits += f"the collectives of step {lag.step} of {self._wrapper}, and waits"
        self._block.fetch(self._behind((lag.step + 1, 0)))
        behind = self._behind((lag.step + 1, 0))
        whom = f" for {self._named(behind, lag.step)}" if behind else ", although every rank has started them"
        said = nccl_ras.describe(min(_LONGEST_QUESTION_S, self.beat_s))
        return f"{waits}{whom}. {said}" if said else f"{waits}{whom}"

    def _named(self, behind: list[int], step: int) -> str:
        named = [self._describe(rank, step) for rank in behind[:_RANKS_NAMED]]
        if len(behind) > _RANKS_NAMED:
            named.append(f"{len(behind) - _RANKS_NAMED} more")
        return "; for ".join(named)

    def _behind(self, needed: _Position) -> list[int]:
        """Returns the ranks that are behind or silent, the furthest first, as others may wait for it as well."""
        positions = [(one.step, one.position) if one else (0, 0) for one in self._block.seen]
        behind = (
            rank
            for rank, position in enumerate(positions)
            if rank != self._block.rank and (position < needed or self._block.is_silent(rank, _SILENT_BEATS))
        )
        return sorted(behind, key=lambda rank: positions[rank])

    def _describe(self, rank: int, step: int) -> str:
        name, record = f"rank {self._block.ranks[rank]}", self._block.last[rank]
        if record is None:
            return f"{name}, which has not been heard of at all"
        silence = f"which has not been heard of for {_rounded(self._block.silence_s(rank))} s"
        facts = [silence] if self._block.is_silent(rank, _SILENT_BEATS) else []
        facts.append(f"last seen {record['where']}")
        if record["awaited"]:
            facts.append(f"itself waiting for {record['awaited']} of step {record['step']}")
        elif record["step"] != step:
            facts.append(f"in step {record['step']}")
        return f"{name}, {', '.join(facts)}"


def delays(reporter: HangReporter | None, device: torch.device, group: dist.ProcessGroup) -> list[float]:
    """Returns the result of `DistributedDataParallel.stragglers`."""
    if device.type != "cpu":
        raise NotImplementedError(
            f"stragglers() is for parameters on the CPU, and these are on {device}: there a stream waits, not the host."
        )
    if reporter is None:
        if dist.get_world_size(group) == 1:
            return [0.0]
        raise RuntimeError(
            "stragglers() needs the records that ranks publish for hang reports, and report_hang_after is 0: pass "
            "seconds > 0."
        )
    waits = reporter.wait_times()
    longest = max((wait for wait in waits if wait is not None), default=0.0)
    return [math.nan if wait is None else longest - wait for wait in waits]


def _raise_in(thread: int, why: str) -> None:
    """Raises RuntimeError(why) in that thread, once it runs Python again."""

    class RankHasEnded(RuntimeError):
        def __init__(self) -> None:  # Python instantiates the class without arguments
            super().__init__(why)

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(RankHasEnded))


def _abort(comm: _C.Comm | None, group: dist.ProcessGroup, device: torch.device, why: str) -> None:
    """Ends the transport's own collectives, and the group's on that device, where its backend can."""
    if comm is not None:
        comm.give_up(why)
    try:
        group._get_backend(device).abort()
    except Exception as error:
        _logger.error("the process group's backend for %s cannot be aborted: %s", device, error)


def _rounded(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _where(thread: int, modules: _Modules) -> str:
    """Returns where that thread is: "in layer9.mlp (train.py:88 in forward)", or "at train.py:52 in train"."""
    stack = stack_of_thread(thread)
    if not stack:
        return "nowhere: the thread that built the model has ended"
    line = users_line(stack)
    for frame in stack:
        module = self_of(frame)
        reference, name = modules.get(id(module), (None, ""))
        if reference is not None and reference() is module:
            return f"in {name or type(module).__name__} ({line})"
    return f"at {line}"


# ---- The watchdog.

_watched: dict[int, "weakref.ref[HangReporter]"] = {}
_threads_lock = threading.Lock()  # guards the thread's start and end
_thread: threading.Thread | None = None
_is_exiting = False
# Wakes the thread. A SimpleQueue's put() may come at any moment in any thread, from garbage collection.
_wake: "queue.SimpleQueue[None]" = queue.SimpleQueue()
_has_exit_hooks = False


def _watch(watched: HangReporter) -> None:
    """Looks at `watched` for as long as it exists. Starts the thread if it is the first."""
    global _thread, _has_exit_hooks
    key = id(watched)

    def forget(_: object) -> None:
        _watched.pop(key, None)
        _wake.put(None)

    with _threads_lock:
        if not _has_exit_hooks:
            atexit.register(_end_at_exit)
            os.register_at_fork(after_in_child=_forget_after_fork)
            _has_exit_hooks = True
        _watched[key] = weakref.ref(watched, forget)
        if _thread is None:
            _thread = Thread(_run_watchdog, "drivetrain-watch")
            _thread.start()
    _wake.put(None)


def _run_watchdog() -> None:
    global _thread
    while True:
        wait_s = _look_at_all()
        with contextlib.suppress(queue.Empty):
            _wake.get(timeout=wait_s)
        with _threads_lock:
            if _is_exiting or not _watched:
                _thread = None
                return


def _look_at_all() -> float:
    """Returns the seconds until the next look. Keeps no reference to the objects."""
    settle_on_device()  # a process may use its GPU later than the thread began
    wait_s = _LONGEST_PAUSE_S
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
    with _threads_lock:
        _is_exiting = True
        thread = _thread
    _wake.put(None)
    if thread is not None:
        thread.join(_EXIT_S)
    wait_for_questions(max(deadline - time.monotonic(), 0))


def _forget_after_fork() -> None:
    """Resets the state of a forked child, which has no such thread."""
    global _threads_lock, _thread, _wake
    _threads_lock = threading.Lock()
    _wake = queue.SimpleQueue()
    _thread = None
    _watched.clear()
    forget_connections()
