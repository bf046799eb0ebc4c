"""Tests the commands that measure all-reduces for the cost model, and print what it predicts."""

import json
from pathlib import Path

import pytest

from drivetrain.bench import comm
from suite import scaling


def test_measures_both_engines_by_ranks_and_bytes() -> None:
    points = comm.run_ranks([2], rounds=7, sizes=(1 << 10, 1 << 16))
    assert [(p["engine"], p["ranks"], p["bytes"]) for p in points] == [
        (engine, 2, size) for size in (1 << 10, 1 << 16) for engine in ("gloo", "drivetrain")
    ]
    assert all(p["seconds"] > 0 for p in points)
    assert comm.add_seconds(1 << 16, rounds=3) > 0


def test_command_prints_and_writes_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "WORLDS", (8, 64))
    monkeypatch.setattr(scaling, "SIMULATED_STEPS", 1)
    points = [
        {"engine": "gloo", "ranks": ranks, "bytes": size, "seconds": 1e-4 + ranks * size * 1e-9}
        for ranks in (2, 4, 8)
        for size in (1 << 10, 1 << 20, 1 << 26)
    ]
    measured = tmp_path / "ranks.json"
    measured.write_text(json.dumps({"cores": 2, "add_s": 1e-10, "comm_ranks": points}))
    assert scaling.run("a100-hdr", 2048, measured, tmp_path / "out.json") == 0
    printed = capsys.readouterr().out
    for words in (
        "efficiency",
        "one rank is 10 % slower",
        "linear to 1,024 nodes",
        "+40 % by topology",
        "gloo, fitted",
    ):
        assert words in printed
    found = json.loads((tmp_path / "out.json").read_text())
    assert [scale["ranks"] for scale in found["scales"]] == [8, 64]
    assert len(found["claims"]) == 3
    assert set(found["fits"]["gloo"]["left_out"]) == {"bytes", "ranks"}


def test_command_names_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.run("moon", 1, None, None) == 2
    assert "cluster is 'moon'" in capsys.readouterr().out
    assert scaling.run("h100-ib", 1, tmp_path / "absent.json", None) == 2
    assert "absent.json" in capsys.readouterr().out
