"""Finds complete checkpoints in a directory, and reads and verifies them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _C
from .errors import CheckpointError, Fault
from .layout import CHUNK_BYTES, MANIFEST, Entry, decode_header, step_of
from .manifest import JSON, Manifest, RankFiles, Record, hexadecimal, unseal

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
        manifest = _read_manifest(self.path)
        self._parts = [_Part(self.path, files) for files in manifest.parts]  # by rank
        self.step, self.world_size, self.created = manifest.step, manifest.world_size, manifest.created
        self.serial = manifest.serial

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
        """Reads all files again and compares every checksum.

        Returns:
            One fault per damaged chunk or file; empty if all bytes are as they were written.
        """
        try:
            Checkpoint(self.path)
        except DamagedError as error:
            return [error.fault]
        return [fault for part in self._parts for fault in part.verify()]

    def _opened(self, rank: int | None) -> list[_Part]:
        """Returns the part of a rank; None: all parts."""
        if rank is not None and not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}, expected 0 to {self.world_size - 1}: {self.path} has {self.world_size}")
        return self._parts if rank is None else [self._parts[rank]]

    def _entries(self, rank: int | None) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for part in self._opened(rank):
            found |= {name: entry for name, entry in part.entries.items() if name not in found}
        return found


class _Part:
    """The record of one rank and the tensors of its file: `entries` by name."""

    def __init__(self, folder: Path, files: RankFiles) -> None:
        data = _read_bytes(folder, files.record)
        found = hexadecimal(_C.crc32c(data))
        if len(data) != files.record_bytes or found != files.record_crc32c:
            raise DamagedError(
                folder,
                files.record,
                f"it has {len(data)} bytes and the CRC32C {found}, expected {files.record_bytes} bytes and "
                f"{files.record_crc32c}",
            )
        self._folder, blamed = folder, files.record
        try:
            self.record = record = unseal(data, Record)
            if record.file != files.file:
                raise ValueError("it is not the record that the manifest means")
            blamed = record.file
            try:
                size = (folder / record.file).stat().st_size
            except OSError as error:
                raise DamagedError(folder, record.file, f"it cannot be read: {error.strerror}") from error
            if size != record.file_bytes:
                raise DamagedError(folder, record.file, f"it has {size} bytes, expected {record.file_bytes}")
            header = _read_bytes(folder, record.file, record.header_bytes)
            if (found := hexadecimal(_C.crc32c(header))) != record.header_crc32c:
                problem = f"its header has the CRC32C {found}, expected {record.header_crc32c}"
                raise DamagedError(folder, record.file, problem, chunk=0)
            self.entries = decode_header(header)
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
        expected, path = self.record.chunks, self._folder / self.record.file
        wanted = list(chunks)
        bad = _C.read_chunks(
            path=os.fspath(path),
            file_bytes=self.record.file_bytes,
            chunks=wanted,
            expected=[int(expected[chunk], 16) for chunk in wanted],
            begins=[begin for begin, _ in targets],
            tensors=[tensor for _, tensor in targets],
            num_threads=_READ_THREADS,
            timeout_s=_LONGEST_READ_S,
        )
        if bad is None:
            raise CheckpointError(
                f"{path} was not read within {_LONGEST_READ_S:g} s: the disk is slow or does not answer. Check it."
            )

        def fault(chunk: int, checksum: int) -> Fault:
            names = tuple(name for name, entry in self.entries.items() if chunk in _chunks_of(entry))
            problem = f"its CRC32C is {hexadecimal(checksum)}, expected {expected[chunk]}"
            return Fault(self.record.file, names, chunk, problem)

        return [fault(*one) for one in bad]


class DamagedError(CheckpointError):
    """A CheckpointError about the metadata of the checkpoint in `folder`, with its fault."""

    def __init__(self, folder: Path, file: str, problem: str, chunk: int | None = None) -> None:
        super().__init__(f"{folder / file}: {problem}")
        self.folder = folder
        self.fault = Fault(file, (), chunk, problem)


def find_checkpoints(directory: Path) -> Iterator[Checkpoint | CheckpointError]:
    """Yields each checkpoint of a directory, or why its metadata cannot be trusted, in the order of steps."""
    for folder in sorted(_folders(directory), key=lambda folder: step_of(folder.name) or 0):
        try:
            yield Checkpoint(folder)
        except CheckpointError as error:
            if not folder.exists():
                continue  # a training that keeps only the newest ones has deleted it meanwhile
            yield error if isinstance(error, DamagedError) else DamagedError(folder, MANIFEST, str(error))


class Survey(NamedTuple):
    """The checkpoints of a directory whose metadata holds, oldest first, and the errors of the others."""

    complete: list[Checkpoint]
    damaged: list[DamagedError]


def survey(directory: Path) -> Survey:
    """Examines the metadata of all checkpoints of a directory."""
    try:
        found = list(find_checkpoints(directory))
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read: {error}. Check the path and whether it is mounted."
        ) from error
    complete = sorted((one for one in found if isinstance(one, Checkpoint)), key=lambda one: one.serial)
    return Survey(complete, [one for one in found if isinstance(one, DamagedError)])


def complete_checkpoints(directory: Path) -> list[Checkpoint]:
    """Returns the complete checkpoints that `survey` finds, and logs why it passes over others."""
    found = survey(directory)
    for error in found.damaged:
        _logger.warning("a checkpoint is passed over: %s", error)
    return found.complete


def manifests(directory: Path) -> list[Manifest]:
    """Returns all manifests in a directory whose checksums hold."""
    found = []
    for folder in _folders(directory):
        with contextlib.suppress(CheckpointError):
            found.append(_read_manifest(folder))
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


def _read_manifest(folder: Path) -> Manifest:
    data = _read_bytes(folder, MANIFEST)
    try:
        manifest = unseal(data, Manifest)
        if step_of(folder.name) not in (None, manifest.step):
            raise ValueError(f"it is of step {manifest.step}: the folder was renamed")
    except ValueError as error:
        raise DamagedError(folder, MANIFEST, str(error)) from error
    return manifest
