"""Finds complete checkpoints in a directory, and reads and verifies them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from .. import _C
from .errors import CheckpointError, Fault
from .layout import CHUNK_BYTES, MANIFEST, STEP, Entry, decode_header
from .manifest import JSON, Manifest, Record, hexadecimal, unseal

_logger = logging.getLogger("drivetrain")
_READ_THREADS = min(4, len(os.sched_getaffinity(0)))
_LONGEST_READ_S = 1800.0


class Checkpoint:
    """A complete checkpoint, whose manifest, records and headers have been verified.

    Args:
        path: The checkpoint's folder, such as `runs/gpt/step-0000000100`.

    Raises:
        CheckpointError: The metadata is damaged, or a file is missing or has another size. The message names it.

    Attributes:
        path: The folder.
        step: The step that `Store.save` was called with.
        world_size: Number of ranks that wrote it.
        created: Seconds since the epoch when it was completed.
        serial: Position among the directory's checkpoints. It grows with each save, also after a return to an
            earlier step.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._records, self._entries = [], []  # by rank
        manifest = _read_manifest(self.path)
        for part in manifest.parts:
            record = _read_record(self.path, part.record, part.record_bytes, part.record_crc32c)
            self._records.append(record)
            self._entries.append(_read_header(self.path, record))
        self.step = manifest.step
        self.world_size = manifest.world_size
        self.created = manifest.created
        self.serial = manifest.serial

    def __repr__(self) -> str:
        return f"Checkpoint({os.fspath(self.path)!r}, step={self.step}, world_size={self.world_size})"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensor files."""
        return sum(record.file_bytes for record in self._records)

    def state(self, rank: int) -> JSON:
        """Returns the state that this rank passed to `Store.save`."""
        return self._records[self._checked(rank)].state

    def names(self, rank: int | None = None) -> list[str]:
        """Returns the names of the tensors of a rank, in the order of their data; None: of all ranks, each once."""
        return list(dict.fromkeys(name for of in self._ranks(rank) for name in self._entries[of]))

    def shapes(self, rank: int | None = None) -> dict[str, torch.Size]:
        """Returns the shapes by name. A name that several ranks stored has the first rank's shape."""
        return {name: torch.Size(entry.shape) for name, entry in self._by_name(rank).items()}

    def dtypes(self, rank: int | None = None) -> dict[str, torch.dtype]:
        """Returns the dtypes by name. A name that several ranks stored has the first rank's dtype."""
        return {name: entry.dtype for name, entry in self._by_name(rank).items()}

    def load(
        self, names: Iterable[str] | None = None, *, rank: int | None = None, verify: bool = True
    ) -> dict[str, Tensor]:
        """Reads tensors into new memory.

        Args:
            names: Names of the tensors; None reads all.
            rank: The rank that stored them; None looks at all ranks.
            verify: Compares the checksum of every chunk that is read.

        Returns:
            The tensors by name, contiguous, on the CPU.

        Raises:
            CheckpointError: A checksum does not hold, or a file cannot be read. The message names the file, the
                tensors and the chunk.
            KeyError: No such tensor exists.
            ValueError: Several ranks stored a tensor of that name, and `rank` is None.
        """
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
            loaded.update(self._load_from(of, mine, verify))
        return loaded if wanted is None else {name: loaded[name] for name in wanted}

    def verify(self) -> list[Fault]:
        """Reads all files again and compares every checksum.

        Returns:
            One fault per damaged chunk or file; empty if all bytes are as they were written.
        """
        try:
            Checkpoint(self.path)
        except DamagedError as error:
            return [error.fault]
        faults: list[Fault] = []
        for rank, record in enumerate(self._records):
            try:
                faults += self._damage(rank, self._read(rank, range(len(record.chunks)), [], True))
            except OSError as error:
                faults.append(Fault(record.file, (), None, f"it cannot be read: {error}"))
        return faults

    def _load_from(self, rank: int, names: list[str], verify: bool) -> dict[str, Tensor]:
        entries = self._entries[rank]
        tensors = {name: torch.empty(entries[name].shape, dtype=entries[name].dtype) for name in names}
        chunks = sorted({chunk for name in names for chunk in _chunks_of(entries[name])})
        try:
            bad = self._read(rank, chunks, [(entries[name].begin, tensors[name]) for name in names], verify)
        except OSError as error:
            raise CheckpointError(f"{self.path / self._records[rank].file} cannot be read: {error}") from error
        faults = self._damage(rank, bad)
        if faults:
            raise CheckpointError(
                f"{self.path} is damaged: {'; '.join(map(str, faults[:8]))}. Load an older checkpoint; "
                "`drivetrain ckpt verify` checks them all."
            )
        return tensors

    def _read(
        self, rank: int, chunks: Iterable[int], targets: list[tuple[int, Tensor]], verify: bool
    ) -> list[tuple[int, int]]:
        record = self._records[rank]
        chunks = list(chunks)
        path = self.path / record.file
        bad = _C.read_chunks(
            path=os.fspath(path),
            file_bytes=record.file_bytes,
            chunks=chunks,
            expected=[int(record.chunks[chunk], 16) for chunk in chunks] if verify else [],
            begins=[begin for begin, _ in targets],
            tensors=[tensor for _, tensor in targets],
            num_threads=_READ_THREADS,
            timeout_s=_LONGEST_READ_S,
        )
        if bad is None:
            raise CheckpointError(
                f"{path} was not read within {_LONGEST_READ_S:g} s: the disk is slow or does not answer. Check it."
            )
        return bad

    def _damage(self, rank: int, bad: list[tuple[int, int]]) -> list[Fault]:
        record = self._records[rank]
        return [
            Fault(
                record.file,
                tuple(name for name, entry in self._entries[rank].items() if chunk in _chunks_of(entry)),
                chunk,
                f"its CRC32C is {hexadecimal(found)}, expected {record.chunks[chunk]}",
            )
            for chunk, found in bad
        ]

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


def find_checkpoints(directory: Path) -> Iterator[Checkpoint | CheckpointError]:
    """Yields each checkpoint of a directory, or why its metadata cannot be trusted, in the order of steps."""
    for entry in sorted(
        (entry for entry in directory.iterdir() if STEP.fullmatch(entry.name)), key=lambda e: int(e.name[5:])
    ):
        try:
            yield Checkpoint(entry)
        except CheckpointError as error:
            yield error


def complete_checkpoints(directory: Path) -> list[Checkpoint]:
    """Returns the checkpoints whose metadata holds, oldest first, and logs why it passes over others.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    complete = []
    try:
        for found in find_checkpoints(directory):
            if isinstance(found, Checkpoint):
                complete.append(found)
            else:
                _logger.warning("a checkpoint is passed over: %s", found)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read: {error}. Check the path and whether it is mounted."
        ) from error
    return sorted(complete, key=lambda checkpoint: checkpoint.serial)


def _chunks_of(entry: Entry) -> range:
    return range(entry.begin // CHUNK_BYTES, -(-entry.end // CHUNK_BYTES) if entry.end > entry.begin else 0)


def _read_bytes(folder: Path, file: str, size: int | None = None) -> bytes:
    try:
        with (folder / file).open("rb") as stream:
            return stream.read() if size is None else stream.read(size)
    except OSError as error:
        raise DamagedError(folder, file, f"it cannot be read: {error.strerror}") from error


def _read_manifest(folder: Path) -> Manifest:
    data = _read_bytes(folder, MANIFEST)
    try:
        manifest = unseal(data, Manifest)
    except ValueError as error:
        raise DamagedError(folder, MANIFEST, str(error)) from error
    if STEP.fullmatch(folder.name) and int(folder.name[5:]) != manifest.step:
        raise DamagedError(folder, MANIFEST, f"it is of step {manifest.step}: the folder was renamed")
    return manifest


def _read_record(folder: Path, file: str, size: int, checksum: str) -> Record:
    data = _read_bytes(folder, file)
    found = hexadecimal(_C.crc32c(data))
    if len(data) != size or found != checksum:
        raise DamagedError(
            folder, file, f"it has {len(data)} bytes and the CRC32C {found}, expected {size} bytes and {checksum}"
        )
    try:
        return unseal(data, Record)
    except ValueError as error:
        raise DamagedError(folder, file, str(error)) from error


def _read_header(folder: Path, record: Record) -> dict[str, Entry]:
    try:
        size = (folder / record.file).stat().st_size
    except OSError as error:
        raise DamagedError(folder, record.file, f"it cannot be read: {error.strerror}") from error
    if size != record.file_bytes:
        raise DamagedError(folder, record.file, f"it has {size} bytes, expected {record.file_bytes}")
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
