"""Uploads complete checkpoints in the background, with retries, and says how far each upload is."""

from __future__ import annotations

import datetime
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..preemption.interval import seconds_of
from .errors import CheckpointError
from .layout import STEP
from .remote import RemoteDirectory

_logger = logging.getLogger("drivetrain")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0


@dataclass(frozen=True)
class Remote:
    """Uploads complete checkpoints to a file system of fsspec in the background.

    Attributes:
        url: Such as s3://bucket/run, gs://bucket/run or file:///mnt/run.
        every: Shortest time between uploads, such as "1h"; None uploads each checkpoint. During an upload
            only the newest of the next ones waits. The last one of a run is uploaded always.
        keep: Number of checkpoints to keep there; None keeps all.
        attempts: Number of calls that fail before the upload is given up. Pauses grow from 0.5 s to 60 s.
        reads_back: Reads each uploaded file back to compare its checksums. Without it, only sizes are compared.
        options: Arguments of the file system's class, such as {"profile": "training"} for s3fs.
    """

    url: str
    every: str | float | datetime.timedelta | None = None
    keep: int | None = 3
    attempts: int = 8
    reads_back: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.every is not None:
            seconds_of(self.every, "every")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}, expected at least 1, or None to keep all")
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}, expected at least 1")


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

    Its thread ends with the process, as a remote may never answer.

    Args:
        tier: Where and how often to upload.
        changed: Called after each change of `status`, in the uploader's thread.

    Attributes:
        remote: The remote directory.
        last: The last complete checkpoint of this run.
        newest_found: The newest serial that the remote had at the start; None if it could not be read.
    """

    def __init__(self, tier: Remote, changed: Callable[[], None]) -> None:
        self._tier, self._changed_call = tier, changed
        self._submitted_at = float("-inf")
        self.last: Path | None = None
        self.newest_found: int | None = None
        self._stop = threading.Event()
        self._state = threading.Condition()
        self._current: Path | None = None
        self._waiting: Path | None = None
        self._newest: int | None = None
        self._error: str | None = None
        self._failed: list[int] = []
        self._thread: threading.Thread | None = None
        self.remote = RemoteDirectory(tier.url, tier.options, self._attempt)

    def completed(self, folder: Path) -> None:
        """Uploads a complete checkpoint if the last upload is long enough ago."""
        if self._stop.is_set():  # the script's own store has saved after the block
            return
        self.last, every = folder, self._tier.every
        if every is None or time.monotonic() - self._submitted_at >= seconds_of(every, "every"):
            self.submit(folder)

    def submit(self, folder: Path) -> None:
        """Uploads a complete checkpoint as soon as the one in progress has ended."""
        self._submitted_at = time.monotonic()
        with self._state:
            if self._waiting is not None and self._waiting != folder:
                _logger.info("%s is not uploaded to %s: a newer one is", self._waiting.name, self._tier.url)
            self._waiting = folder
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="drivetrain-upload", daemon=True)
                self._thread.start()
            self._state.notify_all()
        self._changed_call()

    def holds(self, folder: Path) -> bool:
        """Returns whether the local files are still needed."""
        with self._state:
            return folder in (self._current, self._waiting)

    def status(self) -> TierStatus:
        """Returns what is complete, pending and failed."""
        with self._state:
            pending = tuple(_step(folder) for folder in (self._current, self._waiting) if folder is not None)
            return TierStatus(self._tier.url, self._newest, pending, self._error, tuple(self._failed))

    def finish(self, timeout_s: float) -> str | None:
        """Uploads the last checkpoint, and waits until nothing is pending. Returns what failed or takes longer."""
        if self.last is not None and self._newest != _step(self.last):
            self.submit(self.last)
        with self._state:
            if not self._state.wait_for(lambda: self._current is None and self._waiting is None, timeout_s):
                return f"the upload to {self._tier.url} did not end within {timeout_s:g} s"
            return self._error

    def close(self) -> None:
        """Ends the thread after the current call, and forgets what is pending."""
        self._stop.set()
        with self._state:
            self._waiting = None
            self._state.notify_all()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._waiting is not None or self._stop.is_set())
                if self._stop.is_set():
                    return
                folder, self._waiting = self._waiting, None
                self._current = folder
            assert folder is not None
            error: str | None = None
            began = time.monotonic()
            try:
                self.remote.upload(folder, self._tier.reads_back)
                _logger.info("uploaded %s to %s in %.1f s", folder.name, self._tier.url, time.monotonic() - began)
                try:
                    self.remote.remove_old(self._tier.keep)
                except Exception as caught:
                    _logger.warning("old checkpoints were not deleted from %s: %s", self._tier.url, caught)
            except Exception as caught:  # each remote file system raises errors of its own
                error = f"{type(caught).__name__}: {caught}" if not isinstance(caught, CheckpointError) else str(caught)
                _logger.error("%s was not uploaded to %s: %s", folder.name, self._tier.url, error)
            with self._state:
                self._current, self._error = None, error
                if error is None:
                    self._newest = _step(folder)
                else:
                    self._failed.append(_step(folder))
                self._state.notify_all()
            self._changed_call()

    def _attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """Calls again after errors, with pauses that double and vary, so that many runs do not come at once."""
        pause = _FIRST_PAUSE_S
        for number in range(1, self._tier.attempts + 1):
            try:
                return call()
            except Exception as error:
                text = f"attempt {number} of {self._tier.attempts} to {what} failed: {type(error).__name__}: {error}"
                if number == self._tier.attempts:
                    raise CheckpointError(text) from error
                with self._state:
                    self._error = text
                _logger.warning("%s; the next one follows in %.1f s", text, pause)
                if self._stop.wait(pause * random.uniform(0.5, 1.0)):
                    raise CheckpointError(f"{text}; the training has ended meanwhile") from error
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise AssertionError("unreachable")


def _step(folder: Path) -> int:
    found = STEP.fullmatch(folder.name)
    assert found is not None
    return int(found[1])
