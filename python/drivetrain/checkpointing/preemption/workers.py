"""Keeps workers of DataLoaders alive under the signals of a preemption, until the last step is saved."""

from __future__ import annotations

import functools
import multiprocessing as python_multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

_NOTICE_S = 0.5  # within which the rank is signaled as well, where one notice goes to a whole process group
_END_S = 5.0
_shields: list[Shield] = []  # that are open
_plain: dict[type, Any] = {}  # methods that make iterators, by class, while shields are open


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
            worker._popen.terminate = functools.partial(_end, worker._popen)
        return iterator

    return get_iterator


def _subclasses(kind: type) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)
