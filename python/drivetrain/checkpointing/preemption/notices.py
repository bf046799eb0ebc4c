"""Notices that the machine will be taken away: by a signal, a file, or the cloud's metadata service.

Workers of DataLoaders stay alive under the signals until the last step is saved.
"""

import functools
import logging
import multiprocessing as python_multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from .cloud import Poller, Source, source_of

_logger = logging.getLogger("drivetrain")
_SAME_NOTICE_SECONDS = 2.0  # launchers and schedulers both deliver one notice, so two signals may be one
_FILE_CHECK_SECONDS = 1.0
_handling: list["Notices"] = []  # signals, in the order of their handlers
_NOTICE_S = 0.5  # within which the rank is signaled as well, where one notice goes to a whole process group
_END_S = 5.0
_shields: list["Shield"] = []  # that are open
_plain: dict[type, Any] = {}  # methods that make iterators, by class, while shields are open


class Preempted(SystemExit):
    """Leaves the loop after the last step was saved. Nothing should catch it but `with Checkpointer(...)`."""


class Notices:
    """Collects notices from all sources until it is closed.

    Attributes:
        reason: The notice, or None.
    """

    def __init__(self, signals: Iterable[int], file: str | os.PathLike[str] | None, cloud: str | Source | None) -> None:
        self.reason: str | None = None
        if isinstance(signals, int):
            raise TypeError(f"signals is {signals!r}, expected several, such as (signal.SIGTERM,)")
        self._signals = [signal.Signals(number) for number in signals]
        if fatal := {signal.SIGKILL, signal.SIGSTOP} & {*self._signals}:
            raise ValueError(f"signals has {min(fatal).name}, which no process can handle: expected others")
        if file is not None and not os.fspath(file):
            raise ValueError(f"preemption_file is {file!r}, expected a path, or None")
        self._file = None if file is None else Path(file)
        self._file_checked = -_FILE_CHECK_SECONDS
        self._source = None if cloud is None else source_of(cloud)
        self._poller: Poller | None = None
        self._originals: dict[int, Any] = {}
        self._pid = os.getpid()
        self._noticed_at: dict[int, float] = {}  # by signal
        self._shield = Shield(self._signals, self.has_come)

    def has_come(self) -> bool:
        return self.reason is not None

    def open(self) -> None:
        """Handles the signals, and begins to poll. A second call has no effect."""
        if self._originals:
            return
        if self._signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in self._signals)
            _logger.warning(
                "Checkpointer is not in the main thread, where Python handles %s: they take no effect", names
            )
        else:
            for number in self._signals:
                self._originals[number] = signal.signal(number, self._on_signal)
            _handling.append(self)
            self._shield.open()
        if self._source is not None and self._poller is None:
            self._poller = Poller(self._source)

    def close(self) -> None:
        """Restores the original signal handlers and ends polling."""
        self._shield.close()
        self._restore_handlers()
        for number, original in self._originals.items():
            for later in _handling:
                if later._originals.get(number) == self._on_signal:
                    later._originals[number] = original
        self._originals = {}
        if self in _handling:
            _handling.remove(self)
        if self._poller is not None:
            self._poller.close()
            self._poller = None

    def _restore_handlers(self) -> None:
        for number, original in self._originals.items():
            if signal.getsignal(number) == self._on_signal:  # otherwise the script has replaced it since
                signal.signal(number, signal.SIG_DFL if original is None else original)

    def check(self) -> str | None:
        """Returns the reason to leave, or None. Looks for the file once per second."""
        if self.reason is None and self._poller is not None:
            self.reason = self._poller.reason
        if self.reason is None and self._file is not None:
            now = time.monotonic()
            if now - self._file_checked >= _FILE_CHECK_SECONDS:
                self._file_checked = now
                if self._file.exists():
                    self.reason = f"the file {self._file} exists"
        return self.reason

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        first = self._noticed_at.setdefault(number, now)
        # In a process that the script forks, only a handler of the script's own can have called this one.
        if os.getpid() == self._pid and (first == now or now - first < _SAME_NOTICE_SECONDS):
            for one in _handling:  # Only the newest handler is called, and the notice is for all.
                if number in one._originals:
                    one._noticed_at.setdefault(number, now)
                    one.reason = one.reason or signal.Signals(number).name
            return
        original = self._originals[number]
        signal.signal(number, signal.SIG_DFL if original is None else original)
        os.kill(os.getpid(), number)


def say_how_to_continue(reason: str | None, steps: int, directory: Path) -> None:
    """Writes on stderr why the process ends, how far the run is, and how to continue."""
    reason = reason or "another rank has it"
    file = reason.removeprefix("the file ").removesuffix(" exists")
    start = "Start" if file == reason else f"Delete {file}, then start"
    saved = f"Step {steps} is saved in {directory}" if steps else "No step was made"
    sys.stderr.write(
        f"drivetrain ends this process on a notice: {reason}. {saved}. {start} the script again to continue.\n"
    )
    sys.stderr.flush()


def _restore_in_child() -> None:
    """Lets a process that the script forks end as it would without drivetrain: its parent may wait for that.

    A handler in Python cannot do this: it does not run if the signal comes just before a system call that waits.
    """
    for one in reversed(_handling):
        one._restore_handlers()


os.register_at_fork(after_in_child=_restore_in_child)


# ---- Workers of DataLoaders.


class Shield:
    """Lets new workers ignore the signals, and takes the end of a worker under a notice for no error.

    Schedulers signal whole process groups. A worker that ends at once fails the training in the middle of its step.
    """

    def __init__(self, signals: list[signal.Signals], is_noticed: Callable[[], bool]) -> None:
        self._signals, self._is_noticed = signals, is_noticed
        self._on_child: Any = None  # the handler of SIGCHLD that DataLoader has set

    def open(self) -> None:
        """Begins with the next iterators over DataLoaders of this process."""
        _shields.append(self)
        if len(_shields) == 1:
            for kind in (DataLoader, *_subclasses(DataLoader)):
                if "_get_iterator" in vars(kind):
                    _plain[kind] = kind._get_iterator
                    kind._get_iterator = _shielded(kind._get_iterator)

    def close(self) -> None:
        """Ends what `open` began. Workers that run stay as they are."""
        if self not in _shields:
            return
        _shields.remove(self)
        if self._on_child is not None and signal.getsignal(signal.SIGCHLD) == self._on_death:
            signal.signal(signal.SIGCHLD, self._on_child)
        self._on_child = None
        if not _shields:
            for kind, plain in _plain.items():
                kind._get_iterator = plain  # type: ignore[attr-defined]
            _plain.clear()

    @contextmanager
    def starting(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Holds the signals back from workers that start inside of the block, until they ignore them."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        resource_tracker.ensure_running()  # It must outlive the signals as well. This call unblocks SIGTERM.
        if (loader.multiprocessing_context or python_multiprocessing).get_start_method() == "forkserver":
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # which children of the server inherit
            forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        init = loader.worker_init_fn
        loader.worker_init_fn = functools.partial(_begin_ignoring, init, self._signals)
        try:
            yield
        finally:
            loader.worker_init_fn = init
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._watch()

    def _watch(self) -> None:
        """Puts a handler before DataLoader's, which raises an error wherever the training is when a worker ends."""
        found = signal.getsignal(signal.SIGCHLD)
        if callable(found) and found != self._on_death and threading.current_thread() is threading.main_thread():
            self._on_child = found
            signal.signal(signal.SIGCHLD, self._on_death)

    def _on_death(self, number: int, frame: FrameType | None) -> None:
        try:
            self._on_child(number, frame)
        except RuntimeError:
            deadline = time.monotonic() + _NOTICE_S
            while not self._is_noticed() and time.monotonic() < deadline:
                time.sleep(0.01)
            if not self._is_noticed():
                raise


def _begin_ignoring(init: Callable[[int], Any] | None, signals: list[signal.Signals], worker: int) -> None:
    """Ignores signals in a worker, which starts with them blocked, and calls the loader's `worker_init_fn`.

    torch's handler of SIGTERM, which ends the worker, is set already.
    """
    for number in signals:
        signal.signal(number, _ignore)  # not SIG_IGN, which programs that the dataset starts would inherit
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    if init is not None:
        init(worker)


def _ignore(*_: Any) -> None:
    """Does nothing: the rank saves its last step, and ends the worker then."""


def _end(popen: Any) -> None:
    """Ends a worker that ignores SIGTERM, and takes its status before DataLoader's handler calls it a failure."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGCHLD, _ignore) if is_main else None
    popen.kill()
    popen.wait(_END_S)
    if is_main:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)


def _shielded(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_iterator(loader: Any) -> Any:
        if not loader.num_workers or not _shields:
            return plain(loader)
        with _shields[-1].starting(loader):
            iterator = plain(loader)
        for worker in getattr(iterator, "_workers", ()):
            # Not the object itself: a cycle would keep its files open until the garbage collector runs.
            worker._popen.terminate = functools.partial(_end, weakref.proxy(worker._popen))
        return iterator

    return get_iterator


def _subclasses(kind: type) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)
