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
from .audit import AuditLog
from .encryption import TAG_BYTES, Encryption, FileCipher
from .errors import CheckpointError, EncryptionError, Fault
from .layout import CHUNK_BYTES, MANIFEST, STEP, Entry, decode_header
from .manifest import JSON, Manifest, Protection, RankFiles, Record, hexadecimal, unseal

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
        self._records: list[Record] = []  # by rank
        self._entries: list[dict[str, Entry]] = []
        self._ciphers: list[FileCipher | None] = []
        manifest = _read_manifest(self.path, encryption)
        self.key_id = manifest.protection.key_id if manifest.protection is not None else None
        for part in manifest.parts:
            record, entries, cipher = _read_part(self.path, manifest, part, encryption)
            self._records.append(record)
            self._entries.append(entries)
            self._ciphers.append(cipher)
        self.step = manifest.step
        self.world_size = manifest.world_size
        self.created = manifest.created
        self.serial = manifest.serial
        self.run = manifest.run

    def __repr__(self) -> str:
        return f"Checkpoint({os.fspath(self.path)!r}, step={self.step}, world_size={self.world_size})"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensor files."""
        return sum(record.file_bytes for record in self._records)

    def state(self, rank: int) -> JSON:
        """Returns the state that this rank passed to `Store.save`."""
        self._unlocked()
        return self._records[self._checked(rank)].state

    def names(self, rank: int | None = None) -> list[str]:
        """Returns the names of the tensors of a rank, in the order of their data; None: of all ranks, each once."""
        self._unlocked()
        return list(dict.fromkeys(name for of in self._ranks(rank) for name in self._entries[of]))

    def shapes(self, rank: int | None = None) -> dict[str, torch.Size]:
        """Returns the shapes by name. A name that several ranks stored has the first rank's shape."""
        return {name: torch.Size(entry.shape) for name, entry in self._by_name(rank).items()}

    def dtypes(self, rank: int | None = None) -> dict[str, torch.dtype]:
        """Returns the dtypes by name. A name that several ranks stored has the first rank's dtype."""
        return {name: entry.dtype for name, entry in self._by_name(rank).items()}

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
        self._unlocked()
        wanted = None if names is None else list(dict.fromkeys(names))
        ranks = self._ranks(rank)
        owners: dict[str, int] = {}
        for of in ranks:
            for name in self._entries[of] if wanted is None else (n for n in wanted if n in self._entries[of]):
                if name in owners:
                    raise ValueError(
                        f"names contains {name!r}, which ranks {owners[name]} and {of} both stored: pass `rank`"
                    )
                owners[name] = of
        if wanted is not None and (missing := [name for name in wanted if name not in owners]):
            raise KeyError(f"names contains {missing[0]!r}, which {self.path} does not: names() lists its tensors")
        loaded: dict[str, Tensor] = {}
        for of in ranks:
            mine = [name for name, owner in owners.items() if owner == of]
            loaded.update(self._load_from(of, mine))
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
        faults: list[Fault] = []
        for rank, record in enumerate(self._records):
            try:
                faults += self._faults(rank, self._read(rank, range(len(record.chunks)), []))
            except OSError as error:
                faults.append(Fault(record.file, (), None, f"it cannot be read: {error}"))
        return faults

    def _load_from(self, rank: int, names: list[str]) -> dict[str, Tensor]:
        entries = self._entries[rank]
        tensors = {name: torch.empty(entries[name].shape, dtype=entries[name].dtype, device="cpu") for name in names}
        chunks = sorted({chunk for name in names for chunk in _chunks_of(entries[name])})
        try:
            bad = self._read(rank, chunks, [(entries[name].begin, tensors[name]) for name in names])
        except OSError as error:
            raise CheckpointError(f"{self.path / self._records[rank].file} cannot be read: {error}") from error
        faults = self._faults(rank, bad)
        if faults:
            raise CheckpointError(
                f"{self.path} is damaged: {'; '.join(map(str, faults[:8]))}. Load an older checkpoint; "
                "`drivetrain ckpt verify` checks them all."
            )
        return tensors

    def _read(self, rank: int, chunks: Iterable[int], targets: list[tuple[int, Tensor]]) -> list[tuple[int, str]]:
        """Reads chunks into targets, given by their first byte in the file. Returns the faulty chunks with problems."""
        cipher = self._ciphers[rank]
        if cipher is None:
            return self._read_stored(rank, list(chunks), targets, _READ_THREADS)

        def read_encrypted(chunk: int) -> list[tuple[int, str]]:
            record = self._records[rank]
            begin = chunk * CHUNK_BYTES
            size = min(CHUNK_BYTES, record.file_bytes - begin)
            sealed = torch.empty(size + TAG_BYTES, dtype=torch.uint8, device="cpu")
            if bad := self._read_stored(rank, [chunk], [(begin, sealed[:size])], 1):
                return bad
            place = cipher.place(record.checkpoint, chunk, record.file_bytes)
            try:
                opened = cipher.unseal_chunk(chunk, place, sealed, record.tags[chunk])
            except ValueError as error:
                return [(chunk, str(error))]
            for at, tensor in targets:
                first, last = max(begin, at), min(begin + size, at + tensor.nbytes)
                if first < last:
                    ctypes.memmove(tensor.data_ptr() + first - at, opened.data_ptr() + first - begin, last - first)
            return []

        with ThreadPoolExecutor(_READ_THREADS, "drivetrain-decrypt") as threads:
            return [problem for bad in threads.map(read_encrypted, chunks) for problem in bad]

    def _read_stored(
        self, rank: int, chunks: list[int], targets: list[tuple[int, Tensor]], num_threads: int
    ) -> list[tuple[int, str]]:
        record = self._records[rank]
        path = self.path / record.file
        bad = _C.read_chunks(
            path=os.fspath(path),
            file_bytes=record.file_bytes,
            chunks=chunks,
            expected=[int(record.chunks[chunk], 16) for chunk in chunks],
            begins=[begin for begin, _ in targets],
            tensors=[tensor for _, tensor in targets],
            num_threads=num_threads,
            timeout_s=_LONGEST_READ_S,
        )
        if bad is None:
            raise CheckpointError(
                f"{path} was not read within {_LONGEST_READ_S:g} s: the disk is slow or does not answer. Check it."
            )
        return [(chunk, f"its CRC32C is {hexadecimal(found)}, expected {record.chunks[chunk]}") for chunk, found in bad]

    def _faults(self, rank: int, bad: list[tuple[int, str]]) -> list[Fault]:
        record = self._records[rank]
        return [
            Fault(
                record.file,
                tuple(name for name, entry in self._entries[rank].items() if chunk in _chunks_of(entry)),
                chunk,
                problem,
            )
            for chunk, problem in bad
        ]

    def _unlocked(self) -> None:
        if self.key_id is not None and self._encryption is None:
            raise EncryptionError(
                f"{self.path} is encrypted with the key {self.key_id}, and no key was given: pass `encryption`, or "
                "--key-file or --key-env on the command line"
            )

    def _by_name(self, rank: int | None) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for of in self._ranks(rank):
            found = {**self._entries[of], **found}
        return {name: found[name] for name in self.names(rank)}

    def _ranks(self, rank: int | None) -> list[int]:
        return list(range(self.world_size)) if rank is None else [self._checked(rank)]

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}, expected 0 to {self.world_size - 1}: {self.path} has {self.world_size}")
        return rank


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
    for entry in sorted(
        (entry for entry in directory.iterdir() if STEP.fullmatch(entry.name)), key=lambda e: int(e.name[5:])
    ):
        try:
            yield Checkpoint(entry, encryption, audit)
        except CheckpointError as error:
            if not entry.exists():
                continue  # a training that keeps only the newest ones has deleted it meanwhile
            is_plain = not isinstance(error, DamagedError | EncryptionError)
            yield DamagedError(entry, MANIFEST, str(error)) if is_plain else error


class Survey(NamedTuple):
    """The checkpoints of a directory.

    Attributes:
        complete: The checkpoints whose metadata holds, oldest first.
        damaged: The errors of the others.
    """

    complete: list[Checkpoint]
    damaged: list[DamagedError]


def survey(directory: Path, encryption: Encryption | None = None, audit: AuditLog | None = None) -> Survey:
    """Examines the metadata of all checkpoints of a directory.

    Raises:
        CheckpointError: The directory cannot be read.
        EncryptionError: The key of the newest checkpoint is missing, or it is plain although it must not be.
    """
    found = Survey([], [])
    try:
        for one in find_checkpoints(directory, None, audit):
            if isinstance(one, Checkpoint):
                found.complete.append(one)
            elif isinstance(one, DamagedError):
                found.damaged.append(one)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read: {error}. Check the path and whether it is mounted."
        ) from error
    found.complete.sort(key=lambda checkpoint: checkpoint.serial)
    return found if encryption is None else Survey(_opened(found.complete, encryption, audit), found.damaged)


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
    for entry in directory.iterdir():
        if STEP.fullmatch(entry.name):
            with contextlib.suppress(CheckpointError):
                found.append(_read_manifest(entry, None))
    return found


def _opened(locked: list[Checkpoint], encryption: Encryption, audit: AuditLog | None) -> list[Checkpoint]:
    """Opens checkpoints with their keys. A missing key of the newest must not bring back an older state silently."""
    opened: list[Checkpoint] = []
    for checkpoint in reversed(locked):
        try:
            opened.append(Checkpoint(checkpoint.path, encryption, audit))
        except EncryptionError as error:
            if not opened:
                raise
            _logger.warning("a checkpoint is passed over: %s", error)
        except CheckpointError as error:
            _logger.warning("a checkpoint is passed over: %s", error)
    return opened[::-1]


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
        manifest, _ = unseal(data, Manifest, lambda found: _cipher(folder, found.protection, MANIFEST, encryption))
    except ValueError as error:
        raise DamagedError(folder, MANIFEST, str(error)) from error
    if STEP.fullmatch(folder.name) and int(folder.name[5:]) != manifest.step:
        raise DamagedError(folder, MANIFEST, f"it is of step {manifest.step}: the folder was renamed")
    return manifest


def _cipher(folder: Path, protection: Protection | None, file: str, encryption: Encryption | None) -> FileCipher | None:
    """Returns what decrypts a file; None if it is plain, or if only checksums can be compared."""
    if encryption is None:
        return None
    if protection is not None:
        return FileCipher.of(encryption, protection, file)
    if not encryption.accept_plain:
        raise EncryptionError(
            f"{folder} is not encrypted, and anyone could have written it: pass accept_plain=True to Encryption, or "
            "--accept-plain on the command line, to read it nevertheless"
        )
    return None


def _read_part(
    folder: Path, manifest: Manifest, part: RankFiles, encryption: Encryption | None
) -> tuple[Record, dict[str, Entry], FileCipher | None]:
    """Reads the record of a rank. Returns it, the tensors of its file, and what decrypts them."""
    data = _read_bytes(folder, part.record)
    found = hexadecimal(_C.crc32c(data))
    if len(data) != part.record_bytes or found != part.record_crc32c:
        raise DamagedError(
            folder,
            part.record,
            f"it has {len(data)} bytes and the CRC32C {found}, expected {part.record_bytes} bytes and "
            f"{part.record_crc32c}",
        )
    is_encrypted = manifest.protection is not None
    ciphers: list[FileCipher | None] = []

    def cipher_of(record: Record) -> FileCipher | None:
        if (record.protection is not None) != is_encrypted or record.file != part.file:
            raise ValueError("it is not the record that the manifest means")
        # A plain manifest has been accepted before.
        ciphers.append(_cipher(folder, record.protection, record.file, encryption) if is_encrypted else None)
        return ciphers[-1]

    try:
        record, secret = unseal(data, Record, cipher_of)
        if record.checkpoint != (manifest.checkpoint if is_encrypted else "") or len(record.tags) != (
            len(record.chunks) if is_encrypted else 0
        ):
            raise ValueError("it belongs to another checkpoint")
        if secret is not None:
            hidden = json.loads(secret)
            record = replace(record, state=hidden["state"])
            _check_size(folder, record)
            return record, decode_header(base64.b64decode(hidden["header"])), ciphers[-1]
    except ValueError as error:
        raise DamagedError(folder, part.record, str(error)) from error
    _check_size(folder, record)
    return record, {} if is_encrypted else _read_header(folder, record), None


def _check_size(folder: Path, record: Record) -> None:
    try:
        size = (folder / record.file).stat().st_size
    except OSError as error:
        raise DamagedError(folder, record.file, f"it cannot be read: {error.strerror}") from error
    if size != record.file_bytes:
        raise DamagedError(folder, record.file, f"it has {size} bytes, expected {record.file_bytes}")


def _read_header(folder: Path, record: Record) -> dict[str, Entry]:
    header = _read_bytes(folder, record.file, record.header_bytes)
    found = hexadecimal(_C.crc32c(header))
    if found != record.header_crc32c:
        raise DamagedError(
            folder, record.file, f"its header has the CRC32C {found}, expected {record.header_crc32c}", chunk=0
        )
    try:
        return decode_header(header)
    except ValueError as error:
        raise DamagedError(folder, record.file, str(error)) from error
