"""Reads and writes checkpoints below an fsspec URL, such as s3://bucket/run; fsspec is imported when used."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..._C import crc32c
from . import directory as disk
from .errors import CheckpointError
from .layout import CHUNK_BYTES, MANIFEST, STEP, is_known, temporary_name
from .manifest import Manifest, Record, hexadecimal, unseal

Attempt = Callable[[str, Callable[[], Any]], Any]


class RemoteDirectory:
    """A directory of checkpoints on a file system of fsspec.

    A checkpoint is complete once its manifest exists, which is uploaded last and deleted first.

    Args:
        url: Such as s3://bucket/run, gs://bucket/run, memory://run or file:///mnt/run.
        options: Passed to the file system's class.
        attempt: Called as attempt(what, call) for every remote call; it may repeat the call.

    Raises:
        ImportError: fsspec, or the package for this kind of URL, is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, Any], attempt: Attempt) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
            from fsspec.implementations.dirfs import DirFileSystem  # type: ignore[import-untyped]
            from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError(
                "remote tiers need the package fsspec: pip install 'drivetrain[remote]', and s3fs for s3:// or gcsfs "
                "for gs://"
            ) from error
        self.url = url
        self._attempt = attempt
        files, root = url_to_fs(url, **options)
        self._files = DirFileSystem(root, files)
        self._folder = Path(root) if isinstance(files, LocalFileSystem) else None  # which fsspec does not sync

    def manifests(self) -> dict[str, Manifest]:
        """Returns the manifests whose checksums hold, by the names of their folders, oldest first."""
        found = {}
        for name in self._names():
            with contextlib.suppress(FileNotFoundError, ValueError):  # in progress, being deleted, or damaged
                found[name] = unseal(self._read(f"{name}/{MANIFEST}"), Manifest)[0]
        return dict(sorted(found.items(), key=lambda item: item[1].serial))

    def upload(self, folder: Path, reads_back: bool) -> None:
        """Uploads a complete checkpoint, verifies every file, and completes it with the manifest.

        Args:
            folder: The local checkpoint, which must not change meanwhile.
            reads_back: Compares the checksums of what the remote returns, besides sizes.

        Raises:
            CheckpointError: A local file is damaged or belongs to another checkpoint.
        """
        name, data = folder.name, (folder / MANIFEST).read_bytes()
        manifest, _ = unseal(data, Manifest)
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
            record_data = (folder / part.record).read_bytes()
            if hexadecimal(crc32c(record_data)) != part.record_crc32c:
                raise CheckpointError(f"{folder / part.record} is not what the manifest means: it is not uploaded")
            record, _ = unseal(record_data, Record)
            self._put(folder, name, part.file, record.chunks, reads_back)
            self._put(folder, name, part.record, _checksums(record_data), reads_back)
        self._put(folder, name, MANIFEST, _checksums(data), reads_back)

    def download(self, name: str, directory: Path) -> Path:
        """Downloads a checkpoint, durably, into a temporary folder of a local directory, which it returns.

        Raises:
            OSError: The local disk fails. Errors of the remote are its file system's.
            CheckpointError: A remote file is missing, or has another size than in the manifest.
        """
        manifest = unseal(self._read(f"{name}/{MANIFEST}"), Manifest)[0]
        temporary = directory / temporary_name(manifest.step)
        temporary.mkdir()
        files = {part.file: part.file_bytes for part in manifest.parts}
        files |= {part.record: part.record_bytes for part in manifest.parts}
        for file, size in files.items():
            self._get(f"{name}/{file}", temporary / file)
            if (found := (temporary / file).stat().st_size) != size:
                raise CheckpointError(f"{self.url}/{name}/{file} has {found} bytes, expected {size}")
        self._get(f"{name}/{MANIFEST}", temporary / MANIFEST)
        disk.sync_folder(temporary)
        return temporary

    def remove_old(self, keep: int | None) -> None:
        """Removes all but the newest `keep` complete checkpoints, and uploads that older runs left."""
        complete = list(self.manifests())
        if not complete:
            return
        old = complete[:-keep] if keep is not None else []
        incomplete = [name for name in self._names() if name not in complete]
        for name in [*old, *incomplete]:
            self.remove(name)

    def remove(self, name: str) -> None:
        """Removes a checkpoint, its manifest first. Keeps files that no checkpoint has."""
        files = [file for file in self._list(name) if is_known(file)]
        for file in sorted(files, key=lambda file: file != MANIFEST):
            self._remove(f"{name}/{file}")
        with contextlib.suppress(OSError, NotImplementedError):  # object stores have no folders
            if not self._list(name):
                self._files.rmdir(name)

    def _names(self) -> list[str]:
        return sorted(name for name in self._list("") if STEP.fullmatch(name))

    def _list(self, folder: str) -> list[str]:
        def listed() -> list[str]:
            self._files.invalidate_cache()
            try:
                return [posixpath.basename(path.rstrip("/")) for path in self._files.ls(folder, detail=False)]
            except FileNotFoundError:
                return []

        names: list[str] = self._attempt(f"list {self.url}/{folder}", listed)
        return names

    def _put(self, folder: Path, name: str, file: str, checksums: list[str], reads_back: bool) -> None:
        remote, size = f"{name}/{file}", (folder / file).stat().st_size

        def put() -> None:
            if self._folder is None:
                self._files.makedirs(name, exist_ok=True)
            else:
                disk.make_folders(self._folder / name)
            self._files.put_file(os.fspath(folder / file), remote)
            if self._folder is not None:
                disk.sync_file(self._folder / remote)
                disk.sync_folder(self._folder / name)
            self._files.invalidate_cache()
            found = self._files.info(remote)["size"]
            if found != size:
                raise OSError(f"it has {found} bytes after the upload, expected {size}")
            for index, expected in enumerate(checksums if reads_back else ()):
                begin, end = index * CHUNK_BYTES, min(size, (index + 1) * CHUNK_BYTES)
                crc = hexadecimal(crc32c(self._files.cat_file(remote, start=begin, end=end)))
                if crc != expected:
                    raise OSError(f"chunk {index} has the CRC32C {crc} after the upload, expected {expected}")

        self._attempt(f"upload {self.url}/{name}/{file}", put)

    def _get(self, path: str, to: Path) -> None:
        def get() -> bool:
            to.unlink(missing_ok=True)
            try:
                self._files.get_file(path, os.fspath(to))
            except FileNotFoundError:
                return False
            disk.sync_file(to)
            return True

        if not self._attempt(f"download {self.url}/{path}", get):
            raise CheckpointError(f"{self.url}/{path} is missing")

    def _read(self, path: str) -> bytes:
        def read() -> bytes | None:
            self._files.invalidate_cache()
            try:
                data: bytes = self._files.cat_file(path)
            except FileNotFoundError:
                return None
            return data

        found: bytes | None = self._attempt(f"read {self.url}/{path}", read)
        if found is None:
            raise FileNotFoundError(f"{self.url}/{path}")
        return found

    def _remove(self, path: str) -> None:
        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(path)

        self._attempt(f"delete {self.url}/{path}", remove)


def _checksums(data: bytes) -> list[str]:
    return [hexadecimal(crc32c(data[at : at + CHUNK_BYTES])) for at in range(0, len(data), CHUNK_BYTES)]
