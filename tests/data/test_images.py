"""Tests CachedImages: the decoded images, the byte limit, sharing between processes, damage and changed sources."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import drivetrain.data.images as images_module
from drivetrain.data import CachedImages

Image = pytest.importorskip("PIL.Image", reason="Pillow decodes images")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds 10 pictures of two classes, in formats and modes that differ."""
    draw = np.random.default_rng(0)
    for i in range(10):
        target = tmp_path / "pictures" / ("cat", "dog")[i % 2]
        target.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(draw.integers(0, 255, (40 + i, 60, 3), dtype=np.uint8))
        if i == 4:
            picture = picture.convert("L")
        if i == 5:
            picture = picture.convert("RGBA")
        picture.save(target / f"{i}.{'png' if i > 3 else 'jpg'}")
    (tmp_path / "pictures" / "cat" / "notes.txt").write_text("no picture")
    return tmp_path / "pictures"


def decoded(folder: Path, size: tuple[int, int]) -> list[tuple[torch.Tensor, int]]:
    """Decodes with Pillow alone."""
    found = []
    for label, name in enumerate(("cat", "dog")):
        for file in sorted((folder / name).glob("*.[jp][pn]g")):
            with Image.open(file) as picture:
                picture.draft("RGB", (size[1], size[0]))
                small = picture.convert("RGB").resize((size[1], size[0]), Image.Resampling.BILINEAR, reducing_gap=2.0)
            found.append((torch.from_numpy(np.array(small)).permute(2, 0, 1), label))
    return found


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Lists the files that are decoded."""
    calls: list[Path] = []
    decode = images_module._decoded

    def counted(file: Path, height: int, width: int) -> Any:
        calls.append(file)
        return decode(file, height, width)

    monkeypatch.setattr(images_module, "_decoded", counted)
    return calls


def assert_same(found: Any, expected: list[tuple[torch.Tensor, int]]) -> None:
    assert len(found) == len(expected)
    for i, (image, label) in enumerate(expected):
        found_image, found_label = found[i]
        assert torch.equal(found_image, image)
        assert found_label == label


def test_images_are_decoded_once_and_those_beyond_the_limit_always(
    folder: Path, tmp_path: Path, decodes: list[Path]
) -> None:
    expected = decoded(folder, (16, 24))
    dataset = CachedImages(folder, size=(16, 24), limit="60%", folder=tmp_path / "cache")
    assert dataset.classes == ["cat", "dog"]
    assert dataset.num_cached == 6
    for epoch in range(3):
        assert_same(dataset, expected)
        assert len(decodes) == 10 + 4 * epoch
    assert dataset.file.stat().st_blocks * 512 >= 6 * 16 * 24 * 3  # the disk has room for all of it
    other = CachedImages(folder, size=(16, 24), limit="60%", folder=tmp_path / "cache")
    decodes.clear()
    assert_same(other, expected)
    assert len(decodes) == 4
    assert_same(CachedImages(folder, size=(16, 24), limit=1, folder=tmp_path / "cache"), expected)


def test_workers_share_the_file(folder: Path, tmp_path: Path, decodes: list[Path]) -> None:
    expected = decoded(folder, (8, 8))
    dataset = CachedImages(folder, size=8, limit="1MiB", folder=tmp_path / "cache")
    loader = DataLoader(dataset, batch_size=5, num_workers=2)
    images = torch.cat([images for images, _ in loader])
    assert torch.equal(images, torch.stack([image for image, _ in expected]))
    assert_same(pickle.loads(pickle.dumps(dataset)), expected)
    assert decodes == []  # The workers have decoded all.


def test_writes_of_a_transform_do_not_reach_the_cache(folder: Path, tmp_path: Path) -> None:
    dataset = CachedImages(
        folder, size=8, limit="1MiB", folder=tmp_path / "cache", transform=lambda image: image.zero_().float()
    )
    assert all(dataset[i][0].dtype == torch.float32 for i in range(10))
    dataset.transform = None
    assert_same(dataset, decoded(folder, (8, 8)))


def test_a_damaged_image_is_decoded_again(folder: Path, tmp_path: Path, decodes: list[Path]) -> None:
    dataset = CachedImages(folder, size=8, limit="1MiB", folder=tmp_path / "cache")
    assert_same(dataset, decoded(folder, (8, 8)))
    content = bytearray(dataset.file.read_bytes())
    content[-1] ^= 1  # in the last image
    dataset.file.write_bytes(content)
    decodes.clear()
    again = CachedImages(folder, size=8, limit="1MiB", folder=tmp_path / "cache")
    assert_same(again, decoded(folder, (8, 8)))
    assert decodes == [again.samples[-1][0]]


def test_a_changed_source_begins_a_new_file(folder: Path, tmp_path: Path) -> None:
    first = CachedImages(folder, size=8, limit="1MiB", folder=tmp_path / "cache")
    assert_same(first, decoded(folder, (8, 8)))
    Image.new("RGB", (30, 30), (1, 2, 3)).save(folder / "cat" / "0.jpg")
    second = CachedImages(folder, size=8, limit="1MiB", folder=tmp_path / "cache")
    assert second.file != first.file
    assert_same(second, decoded(folder, (8, 8)))


def test_bad_input_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"images": tmp_path / "none"}, FileNotFoundError, "which is no folder"),
        ({"images": []}, FileNotFoundError, "expected a folder of class folders, or pairs"),
        ({"size": 0}, ValueError, "size is 0"),
        ({"limit": "5 bananas"}, ValueError, "limit is '5 bananas'"),
        ({"limit": 0}, ValueError, "limit is 0"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            CachedImages(**{"images": folder, "size": 8, "limit": "1MiB", "folder": tmp_path / "cache"} | arguments)
    monkeypatch.chdir(tmp_path)
    assert CachedImages(folder, size=8, limit="1MiB", folder="").file.parent == Path()
    with pytest.raises(IndexError, match="index is 10"):
        CachedImages(folder, size=8, limit="1MiB", folder=tmp_path / "cache")[10]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(images_module.os, "posix_fallocate", full)
    before = sorted((tmp_path / "cache").iterdir())
    with pytest.raises(OSError, match=r"takes 0 MiB, which .* cannot give .*pass a lower limit"):
        CachedImages(folder, size=9, limit="1MiB", folder=tmp_path / "cache")
    assert sorted((tmp_path / "cache").iterdir()) == before
