"""Tests `drivetrain ckpt` on directories that a store wrote."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.checkpointing import Checkpointer, Store
from drivetrain.cli import main

LIMIT_S = 60


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with Store(tmp_path / "runs", keep=None) as store:
        for step in (5, 10, 15):
            tensors = {"weight": torch.full((4, 3), float(step)), "half": torch.ones(2, dtype=torch.bfloat16)}
            store.save(step, tensors, {"epoch": step}).result(LIMIT_S)
    return tmp_path / "runs"


def ckpt(*arguments: object) -> int:
    return main(["ckpt", *map(str, arguments)])


def damage(directory: Path, step: int, name: str) -> None:
    path = directory / f"step-{step:010d}" / name
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)


def test_ls(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("ls", directory) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "intact" in line]
    assert [int(line.split()[0]) for line in lines] == [5, 10, 15]
    damage(directory, 10, "manifest.json")
    assert ckpt("ls", directory) == 1
    shown = capsys.readouterr()
    assert shown.out.count("intact") == 2
    assert "manifest.json" in shown.err


def test_verify(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("verify", directory) == 0
    assert capsys.readouterr().out.count("intact") == 3
    damage(directory, 10, "rank-00000-of-00001.safetensors")
    assert ckpt("verify", directory) == 1
    shown = capsys.readouterr().out
    assert "damaged: step-0000000010/rank-00000-of-00001.safetensors, chunk 0 (weight, half)" in shown
    assert ckpt("verify", directory, "--step", 15) == 0


def test_show(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("show", directory, "--step", 10) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("step 10", "weight", "float32", "[4, 3]", "bfloat16", '{"epoch": 10}'))


def test_export(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("export", directory, "--out", tmp_path / "model.pt") == 0
    found = torch.load(tmp_path / "model.pt")  # weights_only, torch's default
    assert found["step"] == 15
    assert found["states"] == [{"epoch": 15}]
    assert torch.equal(found["tensors"]["weight"], torch.full((4, 3), 15.0))
    assert ckpt("export", directory, "--step", 5, "--out", tmp_path / "model.safetensors") == 0
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], torch.full((4, 3), 5.0))
    assert ckpt("export", directory, "--out", tmp_path / "model.pt") == 2
    assert "which exists" in capsys.readouterr().err
    assert ckpt("export", directory, "--out", tmp_path / "model.txt") == 2
    assert ckpt("export", directory, "--out", tmp_path / "nowhere" / "model.pt") == 2
    assert ckpt("export", directory) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "model.safetensors", "runs"]


def test_export_of_a_model_with_small_parameters(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.register_parameter("logit_scale", torch.nn.Parameter(torch.ones(())))
    with Checkpointer(tmp_path / "runs", model=model, every=None) as checkpointer:
        checkpointer.step()
    assert ckpt("export", tmp_path / "runs", "--out", tmp_path / "model.safetensors") == 0
    found = load_file(tmp_path / "model.safetensors")
    assert {name.removeprefix("model/") for name in found} == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(found[f"model/{name}"], value)


def test_export_of_a_training_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(20, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(2, 20)).sum().backward()
    optimizer.step()
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with Checkpointer(tmp_path / "runs", every=None, **objects) as checkpointer:  # type: ignore[arg-type]
        checkpointer.step()
    assert ckpt("export", tmp_path / "runs", "--out", tmp_path / "state.pt") == 0
    found = torch.load(tmp_path / "state.pt")
    other = torch.nn.Linear(20, 30)
    other.load_state_dict(found["model"])
    assert torch.equal(other.weight, model.weight)
    its = torch.optim.AdamW(other.parameters())
    its.load_state_dict(found["optimizer"][0])
    assert torch.equal(its.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert found["scheduler"] == [scheduler.state_dict()]
    assert (found["step"], found["scaler"]) == (1, None)


def test_gc(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leftover = directory / ".tmp-step-0000000020-01234567"
    leftover.mkdir()
    assert ckpt("gc", directory) == 0
    assert not leftover.exists()
    assert "removed 1 folders" in capsys.readouterr().out
    damage(directory, 15, "rank-00000-of-00001.json")
    assert ckpt("gc", directory, "--keep", 1, "--damaged") == 0
    assert [entry.name for entry in directory.glob("step-*")] == ["step-0000000010"]
    with Store(directory):
        assert ckpt("gc", directory) == 2
        assert "in use by process" in capsys.readouterr().err
    assert ckpt("gc", directory, "--keep", 0) == 2


def test_gc_keeps_what_it_may_not_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be intact. A user of no group would see this, but tests run as root, who may read everything."""
    damage(directory, 5, "manifest.json")
    plain = Path.open

    def refusing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.parent.name == "step-0000000010":
            raise PermissionError(errno.EACCES, "Permission denied")
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    assert ckpt("gc", directory, "--damaged") == 0
    assert [entry.name for entry in sorted(directory.glob("step-*"))] == ["step-0000000010", "step-0000000015"]
    assert "kept what it may not read: " in capsys.readouterr().err


@pytest.mark.parametrize("action", ["ls", "verify", "show", "gc"])
def test_a_directory_that_does_not_exist(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt(action, tmp_path / "absent") == 2
    assert "absent" in capsys.readouterr().err
