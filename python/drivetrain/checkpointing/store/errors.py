"""Defines the exception of the checkpoint store and the description of a fault in a stored file."""

from __future__ import annotations

from typing import NamedTuple


class CheckpointError(RuntimeError):
    """Reports that a checkpoint was not written or cannot be read. The message says why and what to do.

    Where the operating system reported the failure, `__cause__` is that OSError.
    """


class EncryptionError(CheckpointError):
    """Reports that a checkpoint cannot be read or written for lack of a key, or is not encrypted although it must be.

    No older checkpoint is taken in its place: the message says which key is missing.
    """


class Fault(NamedTuple):
    """One fault in a stored checkpoint.

    Attributes:
        file: Name of the file inside the checkpoint's folder.
        tensors: Names of the tensors that have bytes in the faulty chunk; empty for metadata.
        chunk: Index of the faulty chunk of 4 MiB in the file; None if the fault concerns the whole file.
        problem: A description of the found and the expected values.
    """

    file: str
    tensors: tuple[str, ...]
    chunk: int | None
    problem: str

    def __str__(self) -> str:
        where = self.file if self.chunk is None else f"{self.file}, chunk {self.chunk}"
        what = f" ({', '.join(self.tensors)})" if self.tensors else ""
        return f"{where}{what}: {self.problem}"
