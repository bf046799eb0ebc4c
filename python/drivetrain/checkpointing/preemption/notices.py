"""Notices that the machine will be taken away: by a signal, a file, or the cloud's metadata service."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from .cloud import Poller, Source, source_of
from .workers import Shield

_logger = logging.getLogger("drivetrain")
_SAME_NOTICE_SECONDS = 2.0  # launchers and schedulers both deliver one notice, so two signals may be one
_FILE_CHECK_SECONDS = 1.0
_handling: list["Notices"] = []  # signals, in the order of their handlers


class Preempted(SystemExit):
    """Leaves the loop after the last step was saved. Nothing should catch it but `with Checkpointer(...)`."""


class Notices:
    """Collects notices from all sources until it is closed.

    Attributes:
        reason: The notice, or None.
    """

    def __init__(self, signals: Iterable[int], file: str | os.PathLike[str] | None, cloud: str | Source | None) -> None:
        self.reason: str | None = None
        self._signals = [signal.Signals(number) for number in signals]
        self._file = None if file is None else Path(file)
        self._file_checked = -_FILE_CHECK_SECONDS
        self._source = None if cloud is None else source_of(cloud)
        self._poller: Poller | None = None
        self._originals: dict[int, Any] = {}
        self._pid = os.getpid()
        self._noticed_at: dict[int, float] = {}  # by signal
        self._shield = Shield(self._signals, lambda: self.reason is not None)

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
