"""Uploads complete checkpoints in the background, and says how far each upload is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...threads import Thread
from ..preemption.interval import seconds_of
from .errors import CheckpointError
from .layout import step_of
from .remote import Remote, RemoteDirectory

_logger = logging.getLogger("drivetrain")


class TierStatus(NamedTuple):
    """The state of one tier.

    Attributes:
        tier: Path or URL.
        newest: Step of the newest complete checkpoint that this run put there; None before.
        pending: Steps that are being uploaded or wait for it.
        error: The error for which the last upload failed or is repeated; None after a success.
        failed: Steps whose uploads were given up.
    """

    tier: str
    newest: int | None
    pending: tuple[int, ...]
    error: str | None
    failed: tuple[int, ...]


class Uploader:
    """Uploads checkpoints to one remote directory, one at a time. A newer one takes the place of one that waits.

    Its thread ends with the process, as a remote may never answer. `changed` is called after each change of `status`.

    Attributes:
        remote: The remote directory.
        newest_found: The newest serial that the remote had at the start; None if it could not be read.
    """

    def __init__(self, tier: Remote, changed: Callable[[], None]) -> None:
        self.remote = RemoteDirectory(tier)
        self.newest_found: int | None = None
        self._every = 0.0 if tier.every is None else seconds_of(tier.every, "every")
        self._changed = changed
        self._submitted_at = float("-inf")
        self._state = threading.Condition()
        self._last: Path | None = None  # the last complete checkpoint of this run
        self._current: Path | None = None
        self._waiting: Path | None = None
        self._newest: int | None = None
        self._failed: list[int] = []
        self._thread: threading.Thread | None = None

    def completed(self, folder: Path) -> None:
        """Uploads a complete checkpoint if the last upload is long enough ago."""
        if self.remote.stop.is_set():  # the script's own store has saved after the block
            return
        self._last = folder
        if time.monotonic() - self._submitted_at >= self._every:
            self.submit(folder)

    def submit(self, folder: Path) -> None:
        """Uploads a complete checkpoint as soon as the one in progress has ended."""
        self._submitted_at = time.monotonic()
        with self._state:
            if self._waiting not in (None, folder):
                _logger.info("%s is not uploaded to %s: a newer one is", self._waiting, self.remote.url)
            self._waiting = folder
            if self._thread is None:
                self._thread = Thread(self._run, "drivetrain-upload")
                self._thread.start()
            self._state.notify_all()
        self._changed()

    def holds(self, folder: Path) -> bool:
        """Returns whether the local files are still needed."""
        with self._state:
            return folder in (self._current, self._waiting)

    def status(self) -> TierStatus:
        """Returns what is complete, pending and failed."""
        with self._state:
            pending = (step_of(folder.name) for folder in (self._current, self._waiting) if folder is not None)
            steps = tuple(step for step in pending if step is not None)
            return TierStatus(self.remote.url, self._newest, steps, self.remote.error, tuple(self._failed))

    def finish(self, timeout_s: float) -> str | None:
        """Uploads the last checkpoint, and waits until nothing is pending. Returns what failed or takes longer."""
        if self._last is not None and self._newest != step_of(self._last.name):
            self.submit(self._last)
        with self._state:
            if not self._state.wait_for(lambda: self._current is None and self._waiting is None, timeout_s):
                return f"the upload to {self.remote.url} did not end within {timeout_s:g} s"
            return self.remote.error

    def close(self) -> None:
        """Ends the thread after the current call, and forgets what is pending."""
        self.remote.stop.set()
        with self._state:
            self._waiting = None
            self._state.notify_all()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._waiting is not None or self.remote.stop.is_set())
                if self.remote.stop.is_set():
                    return
                folder, self._waiting = self._waiting, None
                self._current = folder
            assert folder is not None
            error, began = None, time.monotonic()
            try:
                self.remote.upload(folder)
                _logger.info("uploaded %s to %s in %.1f s", folder.name, self.remote.url, time.monotonic() - began)
                try:
                    self.remote.remove_old()
                except Exception as caught:
                    _logger.warning("old checkpoints were not deleted from %s: %s", self.remote.url, caught)
            except Exception as caught:
                error = str(caught) if isinstance(caught, CheckpointError) else f"{type(caught).__name__}: {caught}"
                _logger.error("%s was not uploaded to %s: %s", folder.name, self.remote.url, error)
            with self._state:
                self._current, self.remote.error, step = None, error, step_of(folder.name)
                assert step is not None
                if error is None:
                    self._newest = step
                else:
                    self._failed.append(step)
                self._state.notify_all()
            self._changed()
