"""Stands in for the C++ writer until it is built: copies and writes on one Python thread."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .layout import CHUNK_BYTES


def crc32c(data: bytes) -> int:
    return zlib.crc32(data)


class Slab:
    nbytes = 0


class Snapshot:
    def __init__(self, slab: Slab, header: bytes, tensors: Sequence[Tensor], num_threads: int, nice: int) -> None:
        parts = [header]
        for tensor in tensors:
            parts.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
        self.image = b"".join(parts)
        self.nbytes = len(self.image)

    copy_seconds = 0.0

    def is_copied(self, index: int) -> bool:
        return True

    def wait_copied(self, indices: Sequence[int], timeout_s: float) -> bool:
        return True

    def write(self, path: str, num_threads: int, nice: int) -> None:
        def run() -> None:
            try:
                with Path(path).open("wb") as file:
                    file.write(self.image)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                self.error = error

        self.error: OSError | None = None
        self.thread = threading.Thread(target=run)
        self.thread.start()

    def wait_written(self, timeout_s: float) -> bool:
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            return False
        if self.error:
            raise self.error
        return True

    def checksums(self) -> list[int]:
        return [crc32c(self.image[i : i + CHUNK_BYTES]) for i in range(0, self.nbytes, CHUNK_BYTES)]


def read_chunks(
    path: str,
    file_bytes: int,
    chunks: Sequence[int],
    expected: Sequence[int],
    begins: Sequence[int],
    tensors: Sequence[Tensor],
    num_threads: int,
) -> list[tuple[int, int]]:
    """Returns (chunk, checksum found) of each bad chunk; fills the tensors, whose bytes begin at `begins`."""
    data = bytearray(Path(path).read_bytes())
    bad = []
    for chunk, want in zip(chunks, expected, strict=False):
        found = crc32c(bytes(data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]))
        if found != want:
            bad.append((chunk, found))
    for begin, tensor in zip(begins, tensors, strict=True):
        if tensor.numel():
            size = tensor.numel() * tensor.element_size()
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8, offset=begin, count=size))
    return bad


def exchange_paths(first: str, second: str) -> bool:
    return False
