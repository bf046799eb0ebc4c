"""Tests that a training never starts from scratch over damaged checkpoints, and finds the newest intact copy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.checkpointing import Checkpointer, CheckpointError

FILES = ("rank-00000-of-00001.safetensors", "rank-00000-of-00001.json", "manifest.json")


def flip(path: Path) -> None:
    """Flips a bit of a file."""
    data = bytearray(path.read_bytes())
    data[-100 % len(data)] ^= 1
    path.write_bytes(data)


def _fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": flip,
    "cut off by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "zeros": _fill_with_zeros,
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
}


def trained(directory: Path, steps: int, keep: int = 3) -> Checkpointer:
    """Makes some steps, each with a save, that add 1 to the weights; checks that they continue from the last step."""
    model = nn.Linear(8, 8)
    nn.init.zeros_(model.weight)
    with Checkpointer(directory, model=model, every=None, keep=keep) as ckpt:
        torch.testing.assert_close(model.weight.detach(), torch.full((8, 8), float(ckpt.steps)), rtol=0, atol=0)
        for _ in range(steps):
            with torch.no_grad():
                model.weight.add_(1)
            ckpt.step()
            ckpt.save()
    return ckpt


every_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
every_file = pytest.mark.parametrize("file", FILES)


@every_file
@every_damage
def test_the_only_checkpoint_is_damaged(tmp_path: Path, file: str, damage: Callable[[Path], None]) -> None:
    trained(tmp_path, 2, keep=1)
    (path,) = tmp_path.glob(f"step-*/{file}")
    damage(path)
    with pytest.raises(
        CheckpointError, match=f"none is intact: .*{file}.* To start from scratch on purpose, move"
    ) as error:
        trained(tmp_path, 0)
    assert "step-0000000002" in str(error.value)
    if file in FILES[:1] and path.exists():
        assert path.parent.is_dir()  # nothing was deleted


@every_file
@every_damage
def test_an_older_one_is_intact(tmp_path: Path, file: str, damage: Callable[[Path], None]) -> None:
    trained(tmp_path, 3)
    damage(tmp_path / "step-0000000003" / file)
    with pytest.warns(
        UserWarning, match=f"with step 2, because newer checkpoints are damaged: .*step-0000000003.*{file}"
    ):
        assert trained(tmp_path, 0).steps == 2
