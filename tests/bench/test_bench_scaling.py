"""Tests the command that prints what the cost model of all-reduces predicts."""

import json
from pathlib import Path

import pytest

from suite import scaling


def test_command_prints_and_writes_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "WORLDS", (8, 64))
    assert scaling.run("a100-hdr", 2048, scaling.PUBLISHED, tmp_path / "out.json") == 0
    printed = capsys.readouterr().out
    for words in ("efficiency", "nccl-tests#319", "left out of the fit"):
        assert words in printed
    found = json.loads((tmp_path / "out.json").read_text())
    assert [scale["ranks"] for scale in found["scales"]] == [8, 64]
    assert len(found["fits"]) == 2


def test_command_names_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.run("moon", 1, scaling.PUBLISHED, None) == 2
    assert "cluster is 'moon'" in capsys.readouterr().out
    assert scaling.run("h100-ib", 1, tmp_path / "absent.json", None) == 2
    assert "absent.json" in capsys.readouterr().out
