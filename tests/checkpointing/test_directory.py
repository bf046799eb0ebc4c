"""Tests who may use a directory, and the audit log of those who do.

Checkpoints follow the umask and their folder, and colleagues continue a run or are refused. The log has a line for
each save, load and deletion, whole lines from several processes, and does no harm.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import stat
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.checkpointing import Checkpointer, CheckpointError, Remote, Store
from drivetrain.checkpointing.store.audit import AuditLog
from drivetrain.checkpointing.store.directory import Lock
from drivetrain.cli import main
from resumed_training import trained
from warm_python import warm_context, warm_python

LIMIT_S = 100


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_saves_loads_and_deletions_are_logged(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    runs = tmp_path / "runs"
    with Store(runs, keep=1, audit=log) as store:
        first = store.save(1, {"x": torch.ones(10)}, None).result(LIMIT_S)
        first.load()
        store.save(2, {"x": torch.ones(10)}, None).result(LIMIT_S)
    lines = lines_of(log)
    assert [(line["action"], line["step"], line["result"]) for line in lines] == [
        ("save", 1, "ok"),
        ("load", 1, "ok"),
        ("save", 2, "ok"),
        ("delete", 1, "ok"),
    ]
    assert lines[1]["bytes"] == 40
    assert lines[0]["bytes"] == lines[3]["bytes"] == first.nbytes
    assert all(line["checkpoint"].startswith(str(runs)) for line in lines)
    for name in ("time", "rank", "user", "host", "pid", "key_id"):
        assert name in lines[0]


def test_failures_are_logged(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with Store(tmp_path / "runs", audit=log) as store:
        checkpoint = store.save(1, {"x": torch.ones(10)}, None).result(LIMIT_S)
        file = next(checkpoint.path.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError):
            checkpoint.load()
        (tmp_path / "runs").rename(tmp_path / "hidden")
        with pytest.raises(CheckpointError):
            store.save(2, {}, None).result(LIMIT_S)
        (tmp_path / "hidden").rename(tmp_path / "runs")
    _, load, save = lines_of(log)
    assert (load["action"], save["action"]) == ("load", "save")
    assert "CRC32C" in load["result"]
    assert "ENOENT" in save["result"]


def test_processes_append_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    program = (
        "import sys; from drivetrain.checkpointing.store.audit import AuditLog\n"
        "log = AuditLog(sys.argv[1], int(sys.argv[2]))\n"
        "for step in range(50): log.append('save', 'x' * 5000, step, 0, None)\n"
    )
    ranks = [subprocess.Popen([warm_python(), "-c", program, str(log), str(rank)]) for rank in range(3)]
    assert [rank.wait(LIMIT_S) for rank in ranks] == [0, 0, 0]
    lines = lines_of(log)
    for rank in range(3):
        assert [line["step"] for line in lines if line["rank"] == rank] == list(range(50))


@pytest.mark.parametrize("closes", ["the log", "the directory"])
def test_a_child_forked_while_a_lock_is_held_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: str
) -> None:
    """As the workers of a DataLoader are, which live on while the parent saves again."""
    child = 0

    def fork(descriptor: int) -> None:
        nonlocal child
        monkeypatch.undo()
        child = os.fork()
        if not child:
            time.sleep(LIMIT_S)
            os._exit(0)

    if closes == "the log":
        monkeypatch.setattr(os, "fsync", fork)
        AuditLog(tmp_path / "audit.jsonl").append("save", "a", 1, 0, None)
        locked = tmp_path / "audit.jsonl"
    else:
        monkeypatch.setattr(os, "ftruncate", lambda descriptor, size: fork(descriptor))
        Lock(tmp_path).close()
        locked = tmp_path / ".lock"
    try:
        assert child
        with locked.open("a") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_log_that_stays_locked_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        AuditLog(path).append("save", "a", 1, 0, None)
    assert [line["step"] for line in lines_of(path)] == [1]


def test_a_log_that_cannot_be_written_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "drivetrain"), Store(tmp_path / "runs", audit=tmp_path) as store:
        assert store.save(1, {}, None).result(LIMIT_S).verify() == []
    assert "the audit log" in caplog.text
    assert "Is a directory" in caplog.text


@pytest.mark.parametrize("audit", [True, False, "elsewhere.jsonl"])
def test_the_checkpointer_and_the_command_line_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, audit: bool | str
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        model = nn.Linear(2, 2)
        with Checkpointer("runs", model=model, audit=audit, every=1, keep=1) as ckpt:
            ckpt.step()
    log = Path("runs/audit.jsonl") if audit is True else Path("elsewhere.jsonl")
    assert log.exists() == bool(audit)
    if audit:
        actions = [(line["action"], line["step"]) for line in lines_of(log)]
        assert [action for action in actions if action[0] != "delete"] == [("save", 1), ("load", 1), ("save", 2)]
        assert ("delete", 1) in actions
    main(["ckpt", "export", "runs", "--out", "model.pt"])
    assert (lines_of(log)[-1]["action"] == "load") if audit is True else not Path("runs/audit.jsonl").exists()


# ---- Access of colleagues.

OWNER, COLLEAGUE, GROUP = 4001, 4002, 4100
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
