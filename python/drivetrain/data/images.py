"""`CachedImages`: an image folder whose decoded and resized images are kept in a file that all processes share."""

import hashlib
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..memory import bytes_of
from .over_dataset import position_of

if TYPE_CHECKING:
    import numpy as np

_log = logging.getLogger(__name__)
_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff"))
_EMPTY = 0  # the checksum of a slot that holds no image; one of an image that happens to be 0 is stored as 1


class CachedImages(Dataset[tuple[Any, Any]]):
    """A map-style dataset of images. Each is decoded and resized once per machine, then read from a file in memory.

    Ranks and workers map the same file. Every process verifies the checksum of an image when it reads it for the first
    time. So a file that a crash cut off is repaired, not used. A change of the source files begins a new file.

    Sample i is `(image, label)`: a uint8 tensor of shape [3, height, width] in RGB, or what `transform` makes of it,
    and the label.

    Example:
        dataset = CachedImages("imagenet/train", size=224, limit="100GiB", transform=augment)

    Args:
        images: A folder with one folder per class, or pairs of a file and a label. The names of folders in order give
            the labels 0, 1, ..., as in torchvision's ImageFolder.
        size: Height and width of the kept images, or one number for both. The aspect ratio is not kept.
        limit: Bytes that the file may take: a number, a text such as "20GiB", or a share of what all images take, such
            as "50%". Images beyond it are decoded in every epoch.
        folder: The folder of the file; default: a folder of the user among the temporary files.
        transform: Called with the uint8 tensor, after the cache. Random augmentations belong here.

    Raises:
        ImportError: Pillow is not installed.
        FileNotFoundError: There are no images.
        ValueError: An argument is out of range.
        OSError: The disk has no room for `limit`.
    """

    def __init__(
        self,
        images: str | os.PathLike[str] | Sequence[tuple[str | os.PathLike[str], Any]],
        *,
        size: int | tuple[int, int],
        limit: int | str,
        folder: str | os.PathLike[str] | None = None,
        transform: Callable[[Tensor], Any] | None = None,
    ) -> None:
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            raise ImportError("CachedImages decodes with Pillow, which is not installed: pip install pillow") from error
        self.classes: list[str] = []
        if isinstance(images, str | os.PathLike):
            self.classes, self.samples = _samples_of(Path(images))
        else:
            self.samples = [(Path(file), label) for file, label in images]
        if not self.samples:
            raise FileNotFoundError(f"images is {images!r}, expected a folder of class folders, or pairs")
        height, width = (size, size) if isinstance(size, int) else size
        if height < 1 or width < 1:
            raise ValueError(f"size is {size!r}, expected height and width of 1 or more")
        self.height, self.width, self.transform = height, width, transform
        slot = height * width * 3 + 4  # bytes of an image with its checksum
        self.num_cached = min(len(self.samples), bytes_of(limit, len(self.samples) * slot, "limit") // slot)
        usual = f"{tempfile.gettempdir()}/drivetrain-images-{os.getuid()}"
        self.file = self._cache_file(Path(usual if folder is None else folder))
        self._open()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Returns the image and the label of sample `index`.

        Raises:
            IndexError: There is no such sample.
            OSError: The file is not an image that Pillow reads.
        """
        position = position_of(index, len(self))
        file, label = self.samples[position]
        image = torch.from_numpy(self._pixels(position, file)).permute(2, 0, 1)
        return image if self.transform is None else self.transform(image), label

    def _pixels(self, index: int, file: Path) -> "np.ndarray[Any, Any]":
        if index >= self.num_cached:
            return _decoded(file, self.height, self.width)
        slot, kept = self._slots[index], int(self._checksums[index])
        if kept != _EMPTY:
            # A copy, because transforms may write to it.
            pixels: np.ndarray[Any, Any] = slot.copy()
            if index in self._verified:
                return pixels
            if kept == _checksum(pixels):
                self._verified.add(index)
                return pixels
            _log.warning("%s: the kept image of %s is damaged and is decoded again", self.file, file)
        pixels = _decoded(file, self.height, self.width)
        slot[:] = pixels
        self._checksums[index] = _checksum(pixels)
        self._verified.add(index)
        return pixels

    def _cache_file(self, folder: Path) -> Path:
        """Names the file by its sources, so that another set of images or another size has another file."""
        key = hashlib.sha256(f"1 {self.height} {self.width} {self.num_cached}".encode())
        for file, _ in self.samples[: self.num_cached]:
            status = file.stat()
            key.update(f"\0{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}".encode())
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"images_{key.hexdigest()[:24]}.cache"

    def _open(self) -> None:
        import numpy as np

        self._verified: set[int] = set()
        if self.num_cached == 0:
            return
        num_bytes = (self.height * self.width * 3 + 4) * self.num_cached
        if not self.file.exists():
            _create(self.file, num_bytes)
        if self.file.stat().st_size != num_bytes:
            raise ValueError(f"{self.file} has {self.file.stat().st_size} bytes, expected {num_bytes}: delete it")
        whole = np.memmap(self.file, np.uint8, "r+", shape=(num_bytes,))
        # numpy.memmap of slices is slow; a plain array over the same memory is not.
        plain = np.asarray(whole)
        self._checksums = plain[: 4 * self.num_cached].view(np.uint32)
        self._slots = plain[4 * self.num_cached :].reshape(self.num_cached, self.height, self.width, 3)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_slots", "_checksums")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _create(file: Path, num_bytes: int) -> None:
    """Creates a file of zeros whose blocks exist, because a write to a mapped hole of a full disk kills the process."""
    descriptor, name = tempfile.mkstemp(prefix=file.name, dir=file.parent)
    unfinished = Path(name)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink()
        raise OSError(
            error.errno,
            f"the cache of images takes {num_bytes / 2**20:.0f} MiB, which {file.parent} cannot give "
            f"({error.strerror}): pass a lower limit, or another folder",
        ) from error
    finally:
        os.close(descriptor)


def _checksum(pixels: "np.ndarray[Any, Any]") -> int:
    return zlib.crc32(pixels.data) or 1


def _decoded(file: Path | BinaryIO, height: int, width: int) -> "np.ndarray[Any, Any]":
    import numpy as np
    from PIL import Image

    with Image.open(file) as image:
        image.draft("RGB", (width, height))  # lets the JPEG decoder skip what the resize drops
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.array(resized)


def _samples_of(root: Path) -> tuple[list[str], list[tuple[Path, Any]]]:
    if not root.is_dir():
        raise FileNotFoundError(f"images is {os.fspath(root)!r}, which is no folder")
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    samples: list[tuple[Path, Any]] = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((root / name).rglob("*"))
        if file.suffix.lower() in _SUFFIXES
    ]
    return classes, samples
