"""Loads the training text: Python sources that every machine has, split by file and cut into rows."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MINIMUM_BYTES = 20_000_000
HELD_OUT_PERCENT = 5
# Installed packages lie in the standard library's folder and differ from machine to machine.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, each a uint8 tensor of shape [bytes], and a line that describes them."""

    train: Tensor
    held_out: Tensor
    description: str

    def to(self, device: torch.device) -> Corpus:
        return Corpus(self.train.to(device), self.held_out.to(device), self.description)


def python_files(root: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    """Yield (`prefix`/relative path, path) of each `*.py` below `root`, in an order that all machines share."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - NOT_STDLIB)
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                yield f"{prefix}/{path.relative_to(root).as_posix()}", path


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def is_held_out(name: str) -> bool:
    """Return whether the file is for validation. Only its name decides, so the split never changes."""
    return _hash(name) % 100 < HELD_OUT_PERCENT


def load_corpus(stdlib: Path | None = None, minimum_bytes: int = MINIMUM_BYTES) -> Corpus:
    """Read the standard library, and add torch's sources if it has fewer than `minimum_bytes`."""
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    texts = {name: path.read_bytes() for name, path in python_files(stdlib, "stdlib")}
    total_bytes = sum(map(len, texts.values()))
    description = f"{len(texts)} files of the standard library"
    if total_bytes < minimum_bytes:
        num_stdlib_files = len(texts)
        # Alphabetical order would add only the first few folders, so files are added in hash order.
        for name, path in sorted(python_files(Path(torch.__file__).parent, "torch"), key=lambda item: _hash(item[0])):
            if total_bytes >= minimum_bytes:
                break
            texts[name] = path.read_bytes()
            total_bytes += len(texts[name])
        description += f" (here only a part of it) and {len(texts) - num_stdlib_files} of torch's own"
    held_out = [text for name, text in texts.items() if is_held_out(name)]
    train = [text for name, text in texts.items() if not is_held_out(name)]
    description = f"{total_bytes / 1e6:.1f} MB, {description}, {len(held_out)} held out"
    return Corpus(_as_tensor(train), _as_tensor(held_out), description)


def _as_tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray().join(texts), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    columns = torch.arange(block_size + 1, device=text.device)
    window = text[starts.to(text.device)[:, None] + columns].long()
    return window[:, :-1], window[:, 1:]


def train_batch(
    text: Tensor, batch_size: int, block_size: int, *, seed: int, step: int, rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's (inputs, targets) of a step, both int64 [batch_size, block_size].

    One generator draws the rows of all ranks from seed and step, and each rank takes its part. Two ranks with
    8 rows therefore see the rows of one rank with 16.
    """
    generator = torch.Generator().manual_seed(_hash(f"{seed}/{step}"))
    starts = torch.randint(len(text) - block_size, (world_size, batch_size), generator=generator)
    return _windows(text, starts[rank], block_size)


def held_out_batches(
    text: Tensor, batch_size: int, block_size: int, *, num_rows: int, rank: int, world_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of `num_rows` fixed windows that are spread evenly over the text."""
    starts = torch.linspace(0, len(text) - block_size - 1, num_rows, dtype=torch.float64).long()
    mine = starts[rank::world_size]
    for first in range(0, len(mine), batch_size):
        yield _windows(text, mine[first : first + batch_size], block_size)
