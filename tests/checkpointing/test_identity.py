"""Tests that a run has an identity: no other run continues it, and it does not begin anew in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from torch import nn

from drivetrain.checkpointing import Checkpointer, CheckpointError, Remote, Store
from resumed_training import trained


class Crash(Exception):
    pass


def identity_of(directory: Path) -> str:
    noted: dict[str, str] = json.loads((directory / "run.json").read_text())
    return noted["run"]


def test_one_url_for_two_runs_raises(tmp_path: Path) -> None:
    tiers = [Remote(f"file://{tmp_path}/remote")]
    trained(tmp_path / "a", 2, tiers=tiers)
    identity = identity_of(tmp_path / "a")
    with pytest.raises(CheckpointError, match=f"run '{identity}', which was started in .*/a'.* choose another URL"):
        trained(tmp_path / "b", 1, tiers=tiers)
    trained(tmp_path / "c", 1)
    with pytest.raises(CheckpointError, match="give each run places of its own"):
        trained(tmp_path / "c", 1, tiers=tiers)
    assert trained(tmp_path / "d", 1, tiers=tiers, run=identity).steps == 3
    shutil.rmtree(tmp_path / "a")  # as on a new host, where the directory has the same name
    assert trained(tmp_path / "a", 1, tiers=tiers).steps == 4


def test_two_runs_that_begin_together_do_not_share_a_url(tmp_path: Path) -> None:
    """Both find an empty remote. The second one's upload must neither mix with the first's nor delete it."""
    tiers = [Remote(f"file://{tmp_path}/remote", keep=1, attempts=1)]
    late = Checkpointer(tmp_path / "a", model=nn.Linear(8, 8), every=None, tiers=tiers)
    late.__enter__()
    trained(tmp_path / "b", 3, tiers=tiers)
    late.step()
    with pytest.raises(CheckpointError, match="give each run a URL of its own"):
        late.__exit__(None, None, None)
    assert [path.name for path in (tmp_path / "remote").iterdir()] == ["step-0000000003"]


def test_other_settings_raise_and_say_how_to_go_on(tmp_path: Path) -> None:
    trained(tmp_path, 1, config={"lr": 0.1, "depth": 2})
    identity = identity_of(tmp_path)
    with pytest.raises(ValueError, match=f"config.lr: 0.2, was 0.1. .*another directory. .*run='{identity}'"):
        trained(tmp_path, 1, config={"lr": 0.2, "depth": 2})
    with pytest.warns(UserWarning, match=r"config\.lr: 0\.2, was 0\.1"):
        assert trained(tmp_path, 1, config={"lr": 0.2, "depth": 2}, run=identity).steps == 2
    with pytest.raises(CheckpointError, match=f"run is 'mine', and .* belongs to the run '{identity}'"):
        trained(tmp_path, 1, config={"lr": 0.2, "depth": 2}, run="mine")


def test_another_model_raises_and_says_how_to_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    with pytest.raises(ValueError, match=r"model has 'weight' as .* choose another directory"):
        trained(tmp_path, 1, size=2)


def test_deleted_checkpoints_do_not_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    for path in tmp_path.glob("step-*"):
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match=r"all of its checkpoints were deleted. .* delete .*run\.json"):
        trained(tmp_path, 1)
    (tmp_path / "run.json").unlink()
    assert trained(tmp_path, 1).steps == 1


def test_a_run_that_has_not_saved_begins_again(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(Crash), Checkpointer(tmp_path, model=model, every=None):
        raise Crash
    first = identity_of(tmp_path)
    assert trained(tmp_path, 1).steps == 1
    assert identity_of(tmp_path) == first


def test_checkpoints_without_an_identity_are_continued(tmp_path: Path) -> None:
    """Older versions wrote none, neither into the manifest nor into the directory."""
    ckpt = Checkpointer(tmp_path / "new", model=nn.Linear(8, 8), every=None)
    with ckpt:
        state = ckpt._state.capture(ckpt._header())
        with Store(tmp_path / "old") as store:
            store.save(0, dict(state.tensors), state.state).result()
    assert '"run"' not in (tmp_path / "old" / "step-0000000000" / "manifest.json").read_text()
    with Checkpointer(tmp_path / "old", model=nn.Linear(8, 8), every=None) as ckpt:
        assert ckpt.restored is not None
        ckpt.step()
    with Store(tmp_path / "old") as store:
        assert [one.run for one in store.checkpoints()] == ["", identity_of(tmp_path / "old")]


def test_what_the_documentation_says_is_not_seen(tmp_path: Path) -> None:
    """The table of docs/checkpoints.md names these."""
    trained(tmp_path / "a", 1)

    class Other(nn.Linear):
        pass

    with Checkpointer(tmp_path / "a", model=Other(8, 8), every=None) as ckpt:
        assert ckpt.steps == 1
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert [trained(tmp_path / name, 1).steps for name in ("a", "b")] == [2, 2]
