"""`TokenShards`: windows of token ids from memory-mapped `.npy` files, and `write_token_shards`, which writes them."""

import bisect
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .over_dataset import position_of

if TYPE_CHECKING:
    import numpy as np

_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


def write_token_shards(
    tokens: Iterable[Any], folder: str | os.PathLike[str], *, dtype: str = "uint16", shard_tokens: int = 100_000_000
) -> list[Path]:
    """Writes token ids into `folder` as `tokens_00000.npy`, `tokens_00001.npy` and so on.

    Each file is a NumPy array of one dimension. It gets its name when it is complete and on the disk, so an interrupted
    run leaves no file that is cut off.

    Args:
        tokens: Sequences of ids (lists, arrays or tensors), such as one per document. They are written one after
            another; add the ids that separate documents yourself.
        folder: The folder to make. It must not have token files yet.
        dtype: "uint8", "uint16", "uint32", "int32" or "int64".
        shard_tokens: Tokens per file, 1 or more; the last file may have fewer.

    Returns:
        The files, in order.

    Raises:
        ValueError: An argument is out of range, or an id does not fit the dtype.
        FileExistsError: The folder has token files.
    """
    import numpy as np

    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(map(repr, _DTYPES))}")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens is {shard_tokens}, expected 1 or more")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(folder.glob("tokens_*.npy")):
        raise FileExistsError(f"{found[0]} exists: write to an empty folder, or delete its token files first")
    limits = np.iinfo(dtype)
    files: list[Path] = []
    parts: list[np.ndarray[Any, Any]] = []
    num_held = 0

    def write(count: int) -> None:
        nonlocal parts, num_held
        held = np.concatenate(parts)
        path = folder / f"tokens_{len(files):05}.npy"
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            np.save(file, held[:count])
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        files.append(path)
        parts, num_held = [held[count:]], num_held - count

    for sequence in tokens:
        ids = np.asarray(sequence)
        if ids.size == 0:
            continue
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"tokens has a sequence of {ids.dtype} of shape {ids.shape}, expected integers in one row")
        if ids.min() < limits.min or ids.max() > limits.max:
            raise ValueError(f"tokens has ids {ids.min()} to {ids.max()}, which do not fit {dtype}: pass a wider dtype")
        parts.append(ids.astype(dtype))
        num_held += ids.size
        while num_held >= shard_tokens:
            write(shard_tokens)
    if num_held:
        write(num_held)
    return files


class TokenShards(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset of windows of token ids. The files are mapped into memory, so ranks and workers share them.

    Sample i is `(inputs, targets)`, both int64 of shape [block_size]. The targets are the inputs one token later.
    Windows follow one another without overlap, and none crosses a file.

    Example:
        dataset = TokenShards("data/tokens", block_size=1024)
        loader = DataLoader(dataset, batch_size=8, sampler=ResumableSampler(dataset))

    Args:
        files: A folder with `*.npy` files, taken in the order of their names, or the files in order. Each is an array
            of integers of one dimension.
        block_size: Tokens per sample, 1 or more.

    Raises:
        FileNotFoundError: There are no such files.
        ValueError: A file is not an array of integers of one dimension, or no file has a whole window.
    """

    def __init__(self, files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, block_size: int) -> None:
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size is {block_size!r}, expected a number of tokens, 1 or more")
        if isinstance(files, str | os.PathLike):
            self.files = sorted(Path(files).glob("*.npy"))
            if not self.files:
                raise FileNotFoundError(f"files is {os.fspath(files)!r}, which is no folder with *.npy files")
        else:
            self.files = [Path(file) for file in files]
        self.block_size = block_size
        self._arrays = [_mapped(file) for file in self.files]
        self._ends = list(accumulate(max(0, len(array) - 1) // block_size for array in self._arrays))
        if not self._ends or self._ends[-1] == 0:
            raise ValueError(f"no file has {block_size + 1} tokens, which one sample of block_size={block_size} takes")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of window `index`, which may be negative.

        Raises:
            IndexError: There is no such window.
        """
        position = position_of(index, len(self))
        which = bisect.bisect_right(self._ends, position)
        first = (position - (self._ends[which - 1] if which else 0)) * self.block_size
        window = torch.from_numpy(self._arrays[which][first : first + self.block_size + 1].astype("int64"))
        return window[:-1], window[1:]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": None}  # An array would be copied; the receiver maps the file again.

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._arrays = [_mapped(file) for file in self.files]


def _mapped(file: Path) -> "np.ndarray[Any, Any]":
    import numpy as np

    try:
        array: np.ndarray[Any, Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file} is not a complete .npy file: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{file} has {array.dtype} of shape {array.shape}, expected integers of one dimension")
    return array
