"""Reads and writes checkpoints below an fsspec URL, such as s3://bucket/run; fsspec is imported when used.

Complete checkpoints are uploaded in the background, and each upload says how far it is.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import posixpath
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..._C import crc32c
from ...threads import Thread
from ..preemption.interval import seconds_of
from . import directory as disk
from .errors import CheckpointError
from .layout import CHUNK_BYTES, MANIFEST, is_known, step_of, temporary_name
from .manifest import Manifest, Record, hexadecimal, unseal

_logger = logging.getLogger("drivetrain")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
_Result = TypeVar("_Result")


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


class RemoteDirectory:
    """The checkpoints of a tier. One is complete once its manifest exists, which is uploaded last and deleted first.

    Attributes:
        stop: Set it to repeat no failing call any more.
        error: The last call that failed, until the caller takes it away.
    """

    def __init__(self, tier: Remote) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
            from fsspec.implementations.dirfs import DirFileSystem  # type: ignore[import-untyped]
            from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError(
                "remote tiers need the package fsspec: pip install 'drivetrain[remote]', and s3fs for s3:// or gcsfs "
                "for gs://"
            ) from error
        self.url, self._tier = tier.url, tier
        files, root = url_to_fs(tier.url, **tier.options)
        self._files = DirFileSystem(root, files)
        self._folder = Path(root) if isinstance(files, LocalFileSystem) else None  # which fsspec does not sync
        self.stop = threading.Event()
        self.error: str | None = None

    def manifests(self) -> dict[str, Manifest]:
        """Returns the manifests whose checksums hold, by the names of their folders, oldest first."""
        found = {}
        for name in self._names():
            with contextlib.suppress(FileNotFoundError, ValueError):  # in progress, being deleted, or damaged
                found[name] = unseal(self._read(f"{name}/{MANIFEST}"), Manifest)
        return dict(sorted(found.items(), key=lambda item: item[1].serial))

    def upload(self, folder: Path) -> None:
        """Uploads a complete checkpoint, verifies every file, and completes it with the manifest."""
        name, data = folder.name, (folder / MANIFEST).read_bytes()
        manifest = unseal(data, Manifest)
        if others := {found.run for found in self.manifests().values()} - {"", manifest.run}:
            raise CheckpointError(
                f"{self.url} holds checkpoints of the run {others.pop()!r}, and {folder} is of the run "
                f"{manifest.run!r}: give each run a URL of its own."
            )
        with contextlib.suppress(FileNotFoundError):
            if self._read(f"{name}/{MANIFEST}") == data:
                return
            self._remove(f"{name}/{MANIFEST}")  # another checkpoint of this step must not get our files
        for part in manifest.parts:
            record = (folder / part.record).read_bytes()
            if hexadecimal(crc32c(record)) != part.record_crc32c:
                raise CheckpointError(f"{folder / part.record} is not what the manifest means: it is not uploaded")
            self._put(folder, part.file, unseal(record, Record).chunks)
            self._put(folder, part.record, _checksums(record))
        self._put(folder, MANIFEST, _checksums(data))

    def download(self, name: str, directory: Path) -> Path:
        """Downloads a checkpoint, durably, into a temporary folder of a local directory, which it returns.

        Raises:
            FileNotFoundError: A remote file is missing.
        """
        manifest = unseal(self._read(f"{name}/{MANIFEST}"), Manifest)
        temporary = directory / temporary_name(manifest.step)
        temporary.mkdir()
        for file in [name for part in manifest.parts for name in (part.file, part.record)] + [MANIFEST]:
            self._get(f"{name}/{file}", temporary / file)
        disk.sync(temporary)
        return temporary

    def remove_old(self) -> None:
        """Removes all but the newest complete checkpoints, and uploads that older runs left."""
        complete = list(self.manifests())
        kept = complete if self._tier.keep is None else complete[-self._tier.keep :]
        for name in self._names() if complete else ():
            if name in kept:
                continue
            for file in sorted(self._list(name), key=lambda file: file != MANIFEST):
                if is_known(file):
                    self._remove(f"{name}/{file}")
            with contextlib.suppress(OSError, NotImplementedError):  # object stores have no folders
                if not self._list(name):
                    self._files.rmdir(name)

    def _names(self) -> list[str]:
        return sorted(name for name in self._list("") if step_of(name) is not None)

    def _list(self, folder: str) -> list[str]:
        try:
            found = self._call("list", folder, lambda: self._files.ls(folder, detail=False))
        except FileNotFoundError:
            return []
        return [posixpath.basename(path.rstrip("/")) for path in found]

    def _put(self, folder: Path, file: str, checksums: list[str]) -> None:
        """Uploads a file of a checkpoint, and compares what the remote has with the checksums of its chunks."""
        remote, size = f"{folder.name}/{file}", (folder / file).stat().st_size

        def put() -> None:
            if self._folder is None:
                self._files.makedirs(folder.name, exist_ok=True)
            else:
                disk.make_folders(self._folder / folder.name)
            self._files.put_file(os.fspath(folder / file), remote)
            if self._folder is not None:
                disk.sync(self._folder / remote)
                disk.sync(self._folder / folder.name)
            self._files.invalidate_cache()
            try:
                found = self._files.info(remote)["size"]
            except FileNotFoundError:
                found = 0
            if found != size:
                raise OSError(f"it has {found} bytes after the upload, expected {size}")
            for index, expected in enumerate(checksums if self._tier.reads_back else ()):
                begin, end = index * CHUNK_BYTES, min(size, (index + 1) * CHUNK_BYTES)
                crc = hexadecimal(crc32c(self._files.cat_file(remote, start=begin, end=end)))
                if crc != expected:
                    raise OSError(f"chunk {index} has the CRC32C {crc} after the upload, expected {expected}")

        self._call("upload", remote, put)

    def _get(self, path: str, to: Path) -> None:
        def get() -> None:
            to.unlink(missing_ok=True)
            self._files.get_file(path, os.fspath(to))
            disk.sync(to)

        self._call("download", path, get)

    def _read(self, path: str) -> bytes:
        data: bytes = self._call("read", path, lambda: self._files.cat_file(path))
        return data

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call("delete", path, lambda: self._files.rm_file(path))

    def _call(self, verb: str, path: str, call: Callable[[], _Result]) -> _Result:
        """Calls again after errors, with pauses that double and vary, so that many runs do not come at once.

        Raises:
            CheckpointError: Each attempt has failed.
            FileNotFoundError: The file does not exist, which no repetition changes.
        """
        pause = _FIRST_PAUSE_S
        for number in range(1, self._tier.attempts + 1):
            try:
                self._files.invalidate_cache()
                return call()
            except FileNotFoundError:
                raise
            except Exception as error:  # each file system raises errors of its own
                last, text = error, f"attempt {number} of {self._tier.attempts} to {verb} {self.url}/{path} failed: "
                text += f"{type(error).__name__}: {error}"
            self.error = text
            if number < self._tier.attempts:
                _logger.warning("%s; the next one follows in %.1f s", text, pause)
                if self.stop.wait(pause * random.uniform(0.5, 1.0)):
                    text += "; the training has ended meanwhile"
                    break
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise CheckpointError(text) from last


def _checksums(data: bytes) -> list[str]:
    return [hexadecimal(crc32c(data[at : at + CHUNK_BYTES])) for at in range(0, len(data), CHUNK_BYTES)]


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
