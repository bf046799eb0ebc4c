"""Tests the audit log: a line for each save, load and deletion, whole lines from several processes, and no harm."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.checkpointing import Checkpointer, CheckpointError, Store
from drivetrain.checkpointing.store.audit import AuditLog
from drivetrain.checkpointing.store.directory import Lock
from drivetrain.cli import main
from warm_python import warm_python

LIMIT_S = 60


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
