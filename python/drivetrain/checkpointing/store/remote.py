"""Reads and writes checkpoints below an fsspec URL, such as s3://bucket/run; fsspec is imported when used."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import posixpath
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..._C import crc32c
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
