"""Measures loops that wait for their loader: decoded images from a cache, and slow reads behind prefetch."""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.bench.measure import Row, median_interval
from drivetrain.data import CachedImages, prefetch
from drivetrain.data.images import _decoded

_IMAGES, _PIXELS, _SIZE = 192, (1280, 960), 64  # JPEG files of such pictures, resized to _SIZE x _SIZE
_BATCH = 32
_READ_S, _READS = 0.0015, 40  # a slow disk: seconds per sample and batches per epoch
_SHARE_WAITING = 0.35  # of the plain loop's time, as in a team's loop that ran at 65 % utilization


class _Decoded(Dataset[tuple[Tensor, int]]):
    """Decodes and resizes in every epoch, as torchvision's ImageFolder with a Resize does."""

    def __init__(self, samples: list[tuple[Path, int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self.samples[index]
        return torch.from_numpy(_decoded(file, _SIZE, _SIZE)).permute(2, 0, 1), label


def _tar_files(samples: list[tuple[Path, int]], folder: Path, count: int) -> list[str]:
    """Writes the samples to that many tar files, as webdataset reads them."""
    import webdataset

    files = [str(folder / f"{number}.tar") for number in range(count)]
    for number, name in enumerate(files):
        with webdataset.TarWriter(name) as writer:
            for index in range(number, len(samples), count):
                file, label = samples[index]
                writer.write({"__key__": f"{index:06d}", "jpg": file.read_bytes(), "cls": label})
    return files


def _from_tar(sample: dict[str, bytes]) -> tuple[Tensor, int]:
    image = _decoded(io.BytesIO(sample["jpg"]), _SIZE, _SIZE)
    return torch.from_numpy(image).permute(2, 0, 1), int(sample["cls"])


def _webdataset(samples: list[tuple[Path, int]], folder: Path) -> IterableDataset[tuple[Tensor, int]] | None:
    """Returns the samples as a stream of tar files, one for each of two workers; None: webdataset is not installed."""
    try:
        import webdataset
    except ImportError:
        print(
            "run.py data: webdataset is not installed, so its row is omitted (pip install webdataset)", file=sys.stderr
        )
        return None
    stream = webdataset.WebDataset(_tar_files(samples, folder, 2), shardshuffle=False)
    dataset: IterableDataset[tuple[Tensor, int]] = stream.shuffle(_BATCH).map(_from_tar)
    return dataset


class _SlowReads(Dataset[Tensor]):
    """Waits for each sample as for a disk or a network, which needs no processor."""

    def __len__(self) -> int:
        return _READS * _BATCH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(_READ_S)
        return torch.full((8,), float(index))


def run(threads: int, rounds: int) -> list[Row]:
    """Returns the rows. The first column of figures is the plain DataLoader's, or webdataset's where the row says so.

    Args:
        threads: CPU threads of the training.
        rounds: Epochs per row, of which 9 are used at most.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [*_measure_images(min(rounds, 9)), *_measure_prefetch(min(rounds, 9))]
    finally:
        torch.set_num_threads(before)


def _measure_images(rounds: int) -> list[Row]:
    try:
        import numpy as np
        from PIL import Image
    except ImportError:
        print(
            "run.py data: Pillow is not installed, so the rows of images are omitted (pip install pillow)",
            file=sys.stderr,
        )
        return []
    with tempfile.TemporaryDirectory() as name:
        folder, draw = Path(name), np.random.default_rng(0)
        samples: list[tuple[Path, int]] = []
        for i in range(_IMAGES):  # smooth pictures with some noise, whose files are as large as photographs
            coarse = Image.fromarray(draw.integers(0, 255, (24, 32, 3), dtype=np.uint8)).resize(_PIXELS)
            noisy = np.clip(np.asarray(coarse, dtype=np.int16) + draw.integers(-9, 9, (*_PIXELS[::-1], 3)), 0, 255)
            samples.append((folder / f"{i}.jpg", i % 10))
            Image.fromarray(noisy.astype(np.uint8)).save(samples[-1][0], quality=90)
        plain = DataLoader(_Decoded(samples), batch_size=_BATCH, num_workers=2, persistent_workers=True)
        cached = prefetch(DataLoader(CachedImages(samples, size=_SIZE, limit="100%", folder=folder / "cache"), _BATCH))
        model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
        model(torch.zeros(1, 3, _SIZE, _SIZE))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(batch: tuple[Tensor, Tensor]) -> None:
            nn.functional.cross_entropy(model(batch[0].float() / 255), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

        loaders: list[Iterable[Any]] = [plain, cached]
        if (streamed := _webdataset(samples, folder)) is not None:
            loaders.append(DataLoader(streamed, batch_size=_BATCH, num_workers=2, persistent_workers=True))
        theirs, ours, *others = _epochs(loaders, step, rounds)
    rows = [
        _row("images per second: 2 workers that decode, against a cache and prefetch", "/s", _rates(theirs, _IMAGES),
             _rates(ours, _IMAGES), 4.0),
        _row("  share of the time that steps run", "%", _shares(theirs), _shares(ours)),
    ]  # fmt: skip
    what = "images per second: webdataset with 2 workers that decode, against a cache and prefetch"
    return rows + [_row(what, "/s", _rates(other, _IMAGES), _rates(ours, _IMAGES)) for other in others]


def _measure_prefetch(rounds: int) -> list[Row]:
    loader = DataLoader(_SlowReads(), batch_size=_BATCH)
    busy_s = _READ_S * _BATCH * (1 - _SHARE_WAITING) / _SHARE_WAITING
    left, right = torch.randn(256, 256), torch.randn(256, 256)

    def step(batch: Tensor) -> None:
        end = time.perf_counter() + busy_s
        while time.perf_counter() < end:
            torch.mm(left, right)

    theirs, ours = _epochs([loader, prefetch(loader)], step, rounds)
    return [
        _row(
            "slow reads, utilization: the plain loader, against prefetch",
            "%",
            _shares(theirs),
            _shares(ours),
            None,
            92.0,
        ),
        _row("  samples per second", "/s", _rates(theirs, _READS * _BATCH), _rates(ours, _READS * _BATCH)),
    ]


def _epochs(
    loaders: Sequence[Iterable[Any]], step: Callable[[Any], None], rounds: int
) -> list[list[tuple[float, float]]]:
    """Runs epochs in turn after one of each that is not timed.

    Returns:
        (seconds, seconds of steps) of each epoch, by loader.
    """
    found: list[list[tuple[float, float]]] = [[] for _ in loaders]
    in_order = range(len(loaders))
    for index in track(range(-1, rounds), description="epochs", transient=True):
        for which in in_order if index % 2 else reversed(in_order):
            begin, in_steps = time.perf_counter(), 0.0
            for batch in loaders[which]:
                now = time.perf_counter()
                step(batch)
                in_steps += time.perf_counter() - now
            if index >= 0:
                found[which].append((time.perf_counter() - begin, in_steps))
    return found


def _rates(epochs: list[tuple[float, float]], samples: int) -> list[float]:
    return [samples / seconds for seconds, _ in epochs]


def _shares(epochs: list[tuple[float, float]]) -> list[float]:
    return [100 * in_steps / seconds for seconds, in_steps in epochs]


def _row(
    what: str,
    unit: str,
    theirs: list[float],
    ours: list[float],
    target_ratio: float | None = None,
    target_value: float | None = None,
) -> Row:
    ratio, low, high = median_interval([b / a for a, b in zip(theirs, ours, strict=True)])
    our_median = statistics.median(ours)
    row = Row(what, unit, statistics.median(theirs), our_median, ratio, low, high)
    if target_ratio is not None:
        row.target, row.met = f">= {target_ratio:g}", ratio >= target_ratio
    if target_value is not None:
        row.target, row.met = f">= {target_value:g} {unit}", our_median >= target_value
    return row
