"""Finds complete checkpoints in a directory, and reads and verifies them."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _C
from ...threads import settle_on_device
from .audit import AuditLog
from .encryption import TAG_BYTES, Encryption, FileCipher
from .errors import CheckpointError, EncryptionError, Fault
from .layout import CHUNK_BYTES, MANIFEST, Entry, decode_header, step_of
from .manifest import JSON, Manifest, Protection, RankFiles, Record, hexadecimal, reveal, unseal

_logger = logging.getLogger("drivetrain")
_READ_THREADS = min(4, len(os.sched_getaffinity(0)))
_LONGEST_READ_S = 1800.0


class Checkpoint:
    """A complete checkpoint, whose manifest, records and headers have been verified.

    Args:
        path: The checkpoint's folder, such as `runs/gpt/step-0000000100`.
        encryption: Finds the keys of an encrypted checkpoint. Without it, sizes and checksums of one can be verified,
            but no name, state or tensor be read.
        audit: Gets a line for each load.

    Raises:
        CheckpointError: The metadata is damaged, or a file is missing or has another size. The message names it.
        EncryptionError: A key is missing, or the checkpoint is plain and `encryption` does not accept that.

    Attributes:
        path: The folder.
        step: The step that `Store.save` was called with.
        world_size: Number of ranks that wrote it.
        created: Seconds since the epoch when it was completed.
        serial: Position among the directory's checkpoints. It grows with each save, also after a return to an
            earlier step.
        run: The identity of the run that saved it; "" if a version saved it that knew none.
        key_id: Identifier of the key that encrypts the manifest; None if the checkpoint is plain.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        encryption: Encryption | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        self.path = Path(path)
        self._encryption, self._audit = encryption, audit
        manifest = _read_manifest(self.path, encryption)
        self._parts = [_Part(self.path, manifest, files, encryption) for files in manifest.parts]  # by rank
        self.key_id = manifest.protection.key_id if manifest.protection is not None else None
        self.step, self.world_size, self.created = manifest.step, manifest.world_size, manifest.created
        self.serial, self.run = manifest.serial, manifest.run

    def __repr__(self) -> str:
        return f"Checkpoint({os.fspath(self.path)!r}, step={self.step}, world_size={self.world_size})"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensor files."""
        return sum(part.record.file_bytes for part in self._parts)

    def state(self, rank: int) -> JSON:
        """Returns the state that this rank passed to `Store.save`."""
        return self._opened(rank)[0].record.state

    def names(self, rank: int | None = None) -> list[str]:
        """Returns the names of the tensors of a rank, in the order of their data; None: of all ranks, each once."""
        return list(self._entries(rank))

    def shapes(self, rank: int | None = None) -> dict[str, torch.Size]:
        """Returns the shapes by name. A name that several ranks stored has the first rank's shape."""
        return {name: torch.Size(entry.shape) for name, entry in self._entries(rank).items()}

    def dtypes(self, rank: int | None = None) -> dict[str, torch.dtype]:
        """Returns the dtypes by name. A name that several ranks stored has the first rank's dtype."""
        return {name: entry.dtype for name, entry in self._entries(rank).items()}

    def load(self, names: Iterable[str] | None = None, *, rank: int | None = None) -> dict[str, Tensor]:
        """Reads tensors into new memory.

        Args:
            names: Names of the tensors; None reads all.
            rank: The rank that stored them; None looks at all ranks.

        Returns:
            The tensors by name, contiguous, on the CPU.

        Raises:
            CheckpointError: A checksum does not hold, or a file cannot be read. The message names the file, the
                tensors and the chunk.
            KeyError: No such tensor exists.
            ValueError: Several ranks stored a tensor of that name, and `rank` is None.
        """
        try:
            loaded = self.read(names, rank=rank)
        except CheckpointError as error:
            self.record_load(0, str(error))
            raise
        self.record_load(sum(tensor.nbytes for tensor in loaded.values()))
        return loaded

    def record_load(self, nbytes: int, result: str = "ok") -> None:
        """Appends a load of some bytes to the audit log, if there is one."""
        if self._audit is not None:
            self._audit.append("load", self.path, self.step, nbytes, self.key_id, result)

    def read(self, names: Iterable[str] | None = None, *, rank: int | None = None) -> dict[str, Tensor]:
        """Reads tensors as `load` does, and leaves the line of the audit log to the caller: see `record_load`."""
        wanted = None if names is None else list(dict.fromkeys(names))
        owners: dict[str, _Part] = {}
        for part in self._opened(rank):
            for name in part.entries if wanted is None else (n for n in wanted if n in part.entries):
                if name in owners:
                    first, second = owners[name].record.rank, part.record.rank
                    raise ValueError(
                        f"names contains {name!r}, which ranks {first} and {second} both stored: pass `rank`"
                    )
                owners[name] = part
        if wanted is not None and (missing := [name for name in wanted if name not in owners]):
            raise KeyError(f"names contains {missing[0]!r}, which {self.path} does not: names() lists its tensors")
        loaded: dict[str, Tensor] = {}
        for part in dict.fromkeys(owners.values()):
            loaded |= part.load([name for name, owner in owners.items() if owner is part])
        return loaded if wanted is None else {name: loaded[name] for name in wanted}

    def verify(self) -> list[Fault]:
        """Reads all files again and compares every checksum, and with keys every authentication tag.

        Returns:
            One fault per damaged chunk or file; empty if all bytes are as they were written.
        """
        try:
            Checkpoint(self.path, self._encryption)
        except DamagedError as error:
            return [error.fault]
        return [fault for part in self._parts for fault in part.verify()]

    def _opened(self, rank: int | None) -> list[_Part]:
        """Returns the part of a rank; None: all parts."""
        if self.key_id is not None and self._encryption is None:
            raise EncryptionError(
                f"{self.path} is encrypted with the key {self.key_id}, and no key was given: pass `encryption`, or "
                "--key-file or --key-env on the command line"
            )
        if rank is not None and not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}, expected 0 to {self.world_size - 1}: {self.path} has {self.world_size}")
        return self._parts if rank is None else [self._parts[rank]]

    def _entries(self, rank: int | None) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for part in self._opened(rank):
            found |= {name: entry for name, entry in part.entries.items() if name not in found}
        return found


class _Part:
    """The record of one rank and the tensors of its file: `entries` by name, none if no key was given."""

    def __init__(self, folder: Path, manifest: Manifest, files: RankFiles, encryption: Encryption | None) -> None:
        data = _read_bytes(folder, files.record)
        found = hexadecimal(_C.crc32c(data))
        if len(data) != files.record_bytes or found != files.record_crc32c:
            raise DamagedError(
                folder,
                files.record,
                f"it has {len(data)} bytes and the CRC32C {found}, expected {files.record_bytes} bytes and "
                f"{files.record_crc32c}",
            )
        is_encrypted = manifest.protection is not None
        self._folder, self._cipher, header, blamed = folder, None, None, files.record
        try:
            record = unseal(data, Record)
            if (record.protection is not None) != is_encrypted or record.file != files.file:
                raise ValueError("it is not the record that the manifest means")
            if is_encrypted:  # A plain manifest has been accepted before.
                self._cipher = _cipher(folder, record.protection, record.file, encryption)
            hidden = json.loads(reveal(data, self._cipher)) if self._cipher is not None else None
            if record.checkpoint != (manifest.checkpoint if is_encrypted else "") or len(record.tags) != (
                len(record.chunks) if is_encrypted else 0
            ):
                raise ValueError("it belongs to another checkpoint")
            try:
                size = (folder / record.file).stat().st_size
            except OSError as error:
                raise DamagedError(folder, record.file, f"it cannot be read: {error.strerror}") from error
            if size != record.file_bytes:
                raise DamagedError(folder, record.file, f"it has {size} bytes, expected {record.file_bytes}")
            if hidden is not None:
                record, header = replace(record, state=hidden["state"]), base64.b64decode(hidden["header"])
            elif not is_encrypted:
                blamed, header = record.file, _read_bytes(folder, record.file, record.header_bytes)
                if (found := hexadecimal(_C.crc32c(header))) != record.header_crc32c:
                    problem = f"its header has the CRC32C {found}, expected {record.header_crc32c}"
                    raise DamagedError(folder, record.file, problem, chunk=0)
            self.record, self.entries = record, {} if header is None else decode_header(header)
        except ValueError as error:
            raise DamagedError(folder, blamed, str(error)) from error

    def load(self, names: list[str]) -> dict[str, Tensor]:
        """Reads tensors. Raises CheckpointError if a checksum does not hold, or the file cannot be read."""
        entries = {name: self.entries[name] for name in names}
        tensors = {name: torch.empty(one.shape, dtype=one.dtype, device="cpu") for name, one in entries.items()}
        chunks = sorted({chunk for entry in entries.values() for chunk in _chunks_of(entry)})
        try:
            faults = self._read(chunks, [(entries[name].begin, tensors[name]) for name in names])
        except OSError as error:
            raise CheckpointError(f"{self._folder / self.record.file} cannot be read: {error}") from error
        if faults:
            raise CheckpointError(
                f"{self._folder} is damaged: {'; '.join(map(str, faults[:8]))}. Load an older checkpoint; "
                "`drivetrain ckpt verify` checks them all."
            )
        return tensors

    def verify(self) -> list[Fault]:
        """Reads the whole tensor file, and returns a fault for each damaged chunk."""
        try:
            return self._read(range(len(self.record.chunks)), [])
        except OSError as error:
            return [Fault(self.record.file, (), None, f"it cannot be read: {error}")]

    def _read(self, chunks: Iterable[int], targets: list[tuple[int, Tensor]]) -> list[Fault]:
        """Reads chunks into targets, given by their first byte in the file. Returns the faults of chunks."""
        if self._cipher is None:
            bad = self._read_stored(list(chunks), targets, _READ_THREADS)
        else:
            with ThreadPoolExecutor(_READ_THREADS, "drivetrain-decrypt", settle_on_device) as threads:
                decrypted = threads.map(lambda chunk: self._decrypt(chunk, targets), chunks)
                bad = [problem for problems in decrypted for problem in problems]
        faults = []
        for chunk, problem in bad:
            names = tuple(name for name, entry in self.entries.items() if chunk in _chunks_of(entry))
            faults.append(Fault(self.record.file, names, chunk, problem))
        return faults

    def _decrypt(self, chunk: int, targets: list[tuple[int, Tensor]]) -> list[tuple[int, str]]:
        assert self._cipher is not None
        record, begin = self.record, chunk * CHUNK_BYTES
        size = min(CHUNK_BYTES, record.file_bytes - begin)
        sealed = torch.empty(size + TAG_BYTES, dtype=torch.uint8, device="cpu")
        if bad := self._read_stored([chunk], [(begin, sealed[:size])], 1):
            return bad
        try:
            opened = self._cipher.unseal_chunk(record.checkpoint, chunk, record.file_bytes, sealed, record.tags[chunk])
        except ValueError as error:
            return [(chunk, str(error))]
        for at, tensor in targets:
            first, last = max(begin, at), min(begin + size, at + tensor.nbytes)
            if first < last:
                ctypes.memmove(tensor.data_ptr() + first - at, opened.data_ptr() + first - begin, last - first)
        return []

    def _read_stored(
        self, chunks: list[int], targets: list[tuple[int, Tensor]], num_threads: int
    ) -> list[tuple[int, str]]:
        expected, path = self.record.chunks, self._folder / self.record.file
        bad = _C.read_chunks(
            path=os.fspath(path),
            file_bytes=self.record.file_bytes,
            chunks=chunks,
            expected=[int(expected[chunk], 16) for chunk in chunks],
            begins=[begin for begin, _ in targets],
            tensors=[tensor for _, tensor in targets],
            num_threads=num_threads,
            timeout_s=_LONGEST_READ_S,
        )
        if bad is None:
            raise CheckpointError(
                f"{path} was not read within {_LONGEST_READ_S:g} s: the disk is slow or does not answer. Check it."
            )
        return [(chunk, f"its CRC32C is {hexadecimal(found)}, expected {expected[chunk]}") for chunk, found in bad]


class DamagedError(CheckpointError):
    """A CheckpointError about the metadata of the checkpoint in `folder`, with its fault."""

    def __init__(self, folder: Path, file: str, problem: str, chunk: int | None = None) -> None:
        super().__init__(f"{folder / file}: {problem}")
        self.folder = folder
        self.fault = Fault(file, (), chunk, problem)


def find_checkpoints(
    directory: Path, encryption: Encryption | None = None, audit: AuditLog | None = None
) -> Iterator[Checkpoint | CheckpointError]:
    """Yields each checkpoint of a directory, or why its metadata cannot be trusted, in the order of steps."""
    for folder in sorted(_folders(directory), key=lambda folder: step_of(folder.name) or 0):
        try:
            yield Checkpoint(folder, encryption, audit)
        except CheckpointError as error:
            if not folder.exists():
                continue  # a training that keeps only the newest ones has deleted it meanwhile
            is_plain = not isinstance(error, DamagedError | EncryptionError)
            yield DamagedError(folder, MANIFEST, str(error)) if is_plain else error


class Survey(NamedTuple):
    """The checkpoints of a directory whose metadata holds, oldest first, and the errors of the others."""

    complete: list[Checkpoint]
    damaged: list[DamagedError]


def survey(directory: Path, encryption: Encryption | None = None, audit: AuditLog | None = None) -> Survey:
    """Examines the metadata of all checkpoints of a directory."""
    try:
        found = list(find_checkpoints(directory, None, audit))
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read: {error}. Check the path and whether it is mounted."
        ) from error
    complete = sorted((one for one in found if isinstance(one, Checkpoint)), key=lambda one: one.serial)
    damaged = [one for one in found if isinstance(one, DamagedError)]
    if encryption is None:
        return Survey(complete, damaged)
    opened: list[Checkpoint] = []
    for checkpoint in reversed(complete):
        try:
            opened.insert(0, Checkpoint(checkpoint.path, encryption, audit))
        except CheckpointError as error:
            if not opened and isinstance(error, EncryptionError):
                raise  # a missing key of the newest must not bring back an older state silently
            _logger.warning("a checkpoint is passed over: %s", error)
    return Survey(opened, damaged)


def complete_checkpoints(
    directory: Path, encryption: Encryption | None = None, audit: AuditLog | None = None
) -> list[Checkpoint]:
    """Returns the complete checkpoints that `survey` finds, and logs why it passes over others."""
    found = survey(directory, encryption, audit)
    for error in found.damaged:
        _logger.warning("a checkpoint is passed over: %s", error)
    return found.complete


def manifests(directory: Path) -> list[Manifest]:
    """Returns all manifests in a directory whose checksums hold."""
    found = []
    for folder in _folders(directory):
        with contextlib.suppress(CheckpointError):
            found.append(_read_manifest(folder, None))
    return found


def _folders(directory: Path) -> list[Path]:
    return [entry for entry in directory.iterdir() if step_of(entry.name) is not None]


def _chunks_of(entry: Entry) -> range:
    return range(entry.begin // CHUNK_BYTES, -(-entry.end // CHUNK_BYTES) if entry.end > entry.begin else 0)


def _read_bytes(folder: Path, file: str, size: int | None = None) -> bytes:
    try:
        with (folder / file).open("rb") as stream:
            return stream.read() if size is None else stream.read(size)
    except OSError as error:
        raise DamagedError(folder, file, f"it cannot be read: {error.strerror}") from error


def _read_manifest(folder: Path, encryption: Encryption | None) -> Manifest:
    data = _read_bytes(folder, MANIFEST)
    try:
        manifest = unseal(data, Manifest)
        if (cipher := _cipher(folder, manifest.protection, MANIFEST, encryption)) is not None:
            reveal(data, cipher)
        if step_of(folder.name) not in (None, manifest.step):
            raise ValueError(f"it is of step {manifest.step}: the folder was renamed")
    except ValueError as error:
        raise DamagedError(folder, MANIFEST, str(error)) from error
    return manifest


def _cipher(folder: Path, protection: Protection | None, file: str, encryption: Encryption | None) -> FileCipher | None:
    """Returns what decrypts a file; None if it is plain, or if only checksums can be compared."""
    if encryption is None:
        return None
    if protection is not None:
        return encryption.cipher_of(protection, file)
    if not encryption.accept_plain:
        raise EncryptionError(
            f"{folder} is not encrypted, and anyone could have written it: pass accept_plain=True to Encryption, or "
            "--accept-plain on the command line, to read it nevertheless"
        )
    return None
