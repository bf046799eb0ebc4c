"""Tests that a training never starts from scratch over damaged checkpoints, and finds the newest intact copy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.checkpointing import Checkpointer, CheckpointError, Remote


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100 % len(data)] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": _flip,
    "cut off by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,  # type: ignore[func-returns-value]
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
}
FILES = ("rank-00000-of-00001.safetensors", "rank-00000-of-00001.json", "manifest.json")
every_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
every_file = pytest.mark.parametrize("file", FILES)


def trained(directory: Path, steps: int, url: Path | None = None, keep: int = 3) -> Checkpointer:
    """Makes some steps, each with a save, that add 1 to the weights; checks that they continue from the last step."""
    model = nn.Linear(8, 8)
    nn.init.zeros_(model.weight)
    tiers = [] if url is None else [Remote(f"file://{url}", keep=None)]
    with Checkpointer(directory, model=model, every=None, keep=keep, tiers=tiers, run="tested") as ckpt:
        torch.testing.assert_close(model.weight.detach(), torch.full((8, 8), float(ckpt.steps)), rtol=0, atol=0)
        for _ in range(steps):
            with torch.no_grad():
                model.weight.add_(1)
            ckpt.step()
            ckpt.save()
    return ckpt


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


@every_file
@every_damage
def test_a_remote_copy_is_intact(tmp_path: Path, file: str, damage: Callable[[Path], None]) -> None:
    """An intact remote copy of the damaged step wins over an older step of this host, without a warning."""
    trained(tmp_path / "run", 3, tmp_path / "remote")
    damage(tmp_path / "run" / "step-0000000003" / file)
    assert trained(tmp_path / "run", 1, tmp_path / "remote").steps == 4
    assert trained(tmp_path / "run", 0).steps == 4


@every_file
@every_damage
def test_both_copies_are_damaged(tmp_path: Path, file: str, damage: Callable[[Path], None]) -> None:
    trained(tmp_path / "run", 3, tmp_path / "remote")
    for folder in ("run", "remote"):
        damage(tmp_path / folder / "step-0000000003" / file)
    with pytest.warns(UserWarning, match="with step 2, because newer checkpoints are damaged: .*step-0000000003"):
        assert trained(tmp_path / "run", 0, tmp_path / "remote").steps == 2


def test_a_damaged_remote_copy_leaves_a_local_one_of_that_step(tmp_path: Path) -> None:
    """A run that went back to an earlier step on another host writes the same step again, with a later serial."""
    trained(tmp_path / "a", 1, tmp_path / "remote")
    trained(tmp_path / "a", 1)
    trained(tmp_path / "b", 2, tmp_path / "remote")  # continues with step 1
    for step in (2, 3):
        _flip(tmp_path / "remote" / f"step-{step:010d}" / FILES[0])
    with pytest.warns(UserWarning, match="with step 2"):
        assert trained(tmp_path / "a", 0, tmp_path / "remote").steps == 2
