"""Tests that checkpoints follow the umask and their folder, and that colleagues continue a run or are refused."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpointing import CheckpointError, Remote
from resumed_training import trained
from warm_python import warm_context

OWNER, COLLEAGUE, GROUP = 4001, 4002, 4100
LIMIT_S = 100
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for two other users")


def train(folder: Path, steps: int, **options: Any) -> int:
    """Trains some steps more than before, and returns the steps of the checkpoint that it began with."""
    return trained(folder, steps, keep=2, **options).steps - steps


def train_as(user: int, umask: int, folder: Path, steps: int) -> str:
    """Trains in a process of a user of the group. Returns what `train` returns, or its error, as text."""
    context = warm_context()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_train_as, args=(user, umask, there, folder, steps), daemon=True)
    process.start()
    there.close()
    assert here.poll(LIMIT_S), "the process does not end"
    text: str = here.recv()
    process.join(LIMIT_S)
    return text


def _train_as(user: int, umask: int, answer: Connection, folder: Path, steps: int) -> None:
    try:
        os.setgroups([GROUP])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        os.umask(umask)
        answer.send(str(train(folder, steps)))
    except BaseException:
        answer.send(traceback.format_exc())


@pytest.fixture
def shared() -> Iterator[Path]:
    """Yields a folder of the group, whose entries belong to the group as well."""
    with tempfile.TemporaryDirectory() as name:  # those of pytest are closed to other users
        Path(name).chmod(0o755)
        folder = Path(name) / "shared"
        folder.mkdir()
        os.chown(folder, OWNER, GROUP)
        folder.chmod(0o2775)
        yield folder


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o027, 0o077])
def test_files_and_folders_have_the_modes_of_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        train(tmp_path / "run", 3, tiers=[Remote(f"file://{tmp_path}/remote")])
    finally:
        os.umask(before)
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert {path.name for path in paths} >= {".lock", "audit.jsonl", "run.json", "tiers.json", "manifest.json"}
    for path in paths:
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == expected, f"{path}: {oct(path.stat().st_mode)}"


@needs_root
def test_a_colleague_continues_a_run_of_the_group(shared: Path) -> None:
    assert train_as(OWNER, 0o002, shared / "run", 3) == "0"
    assert train_as(COLLEAGUE, 0o002, shared / "run", 3) == "3"
    assert train_as(OWNER, 0o002, shared / "run", 3) == "6"
    for path in (shared / "run").rglob("*"):
        assert path.stat().st_gid == GROUP, path
    kept = sorted(path.name for path in (shared / "run").glob("step-*"))
    assert len(kept) == 2
    assert kept[-1] == "step-0000000009"


@needs_root
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_colleague_who_may_not_write_is_refused_before_the_training(umask: int, shared: Path) -> None:
    run = shared / "run"
    assert train_as(OWNER, umask, run, 3) == "0"
    before = sorted(run.rglob("*"))
    text = train_as(COLLEAGUE, 0o002, run, 3)
    assert f"{run} cannot be continued by user {COLLEAGUE}, who may not write to {run}, which belongs to user" in text
    assert f"its owner runs `chmod -R g+rwX {run}`, and from then on all start it under `umask 002`" in text
    assert sorted(run.rglob("*")) == before
    # One file or folder is enough, also if the directory is open to the group.
    run.chmod(0o2775)
    assert "who may not write to" in train_as(COLLEAGUE, 0o002, run, 3)
    subprocess.run(["chmod", "-R", "g+rwX", os.fspath(run)], check=True)
    assert train_as(COLLEAGUE, 0o002, run, 3) == "3"


@needs_root
def test_a_directory_that_cannot_be_made_is_refused(shared: Path) -> None:
    shared.chmod(0o2755)
    text = train_as(COLLEAGUE, 0o002, shared / "new" / "run", 1)
    assert f"who may not write to {shared}, which belongs to user {OWNER}" in text
    assert CheckpointError.__name__ in text
