"""Tests that a training never starts from scratch over damaged checkpoints, and finds the newest intact copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_crashes.damage import DAMAGES, FILES, damage_rounds, flip, trained
from drivetrain.checkpointing import CheckpointError
from effort import rounds

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
    for _ in range(2):  # one run each, as a run leaves out an upload that a newer save overtakes
        trained(tmp_path / "b", 1, tmp_path / "remote")  # continues with step 1
    for step in (2, 3):
        flip(tmp_path / "remote" / f"step-{step:010d}" / FILES[0])
    with pytest.warns(UserWarning, match="with step 2"):
        assert trained(tmp_path / "a", 0, tmp_path / "remote").steps == 2


@pytest.mark.filterwarnings("ignore:the training continues with step")
def test_several_files_of_both_tiers_are_damaged(tmp_path: Path) -> None:
    outcomes = damage_rounds(tmp_path, range(rounds(15, 200)))
    assert [(seed, problems) for seed, _, problems in outcomes if problems] == []
