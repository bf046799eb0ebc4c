"""Tests the example tasks: both engines train each of them to the same losses, and the comparison prints one table."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import drivetrain

FOLDER = Path(__file__).parents[2] / "examples" / "tasks"
sys.path.insert(0, str(FOLDER))

import compare_tasks  # noqa: E402

STEPS = 3


@pytest.fixture
def state_of_the_process() -> Iterator[None]:
    """Restores what a task changes: torch's threads, and the names that fine_tuning replaces."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    drivetrain.uninstall()


def train(task: ModuleType, engine: str, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """Trains in this process, as the only rank, and returns the metrics."""
    arguments = [f"--engine={engine}", f"--steps={STEPS}", "--batch-size=8", "--device=cpu", f"--json={out}", *more]
    monkeypatch.setattr(sys, "argv", [str(task.__file__), *arguments])
    task.main()
    metrics: dict[str, Any] = json.loads(out.read_text())
    return metrics


@pytest.mark.usefixtures("state_of_the_process")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own Adagrad
@pytest.mark.parametrize("name", compare_tasks.TASKS)
def test_both_engines_train_to_the_same_losses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "fine_tuning":
        pytest.importorskip(
            "transformers", reason="transformers is not installed: pip install 'drivetrain[frameworks]'"
        )
    task = importlib.import_module(name)
    theirs = train(task, "torch", tmp_path / "torch.json", monkeypatch)
    ours = train(task, "drivetrain", tmp_path / "drivetrain.json", monkeypatch)
    assert len(ours["losses"]) == STEPS
    assert min(ours["losses"]) > 0
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=compare_tasks.TOLERANCE)
    assert ours["results"] == pytest.approx(theirs["results"], abs=0.05)
    assert set(ours["results"]) == set(theirs["results"]) != set()


def test_diffusion_draws_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'drivetrain[test]'")
    task = importlib.import_module("diffusion")
    picture = tmp_path / "digits.png"
    train(task, "drivetrain", tmp_path / "metrics.json", monkeypatch, f"--picture={picture}")
    from matplotlib import image

    assert image.imread(picture).shape[:2] == (4 * task.SIZE, 8 * task.SIZE)


def test_the_table_of_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    command = [sys.executable, str(FOLDER / "compare_tasks.py"), "recommender", f"--steps={STEPS}", f"--json={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("mean loss of the last", "held-out hit rate", "time per step", "peak memory per rank"):
        assert row in done.stdout
    runs = json.loads(out.read_text())["recommender"]
    assert all(len(runs[engine][0]["peak_memory_bytes"]) == 2 for engine in compare_tasks.ENGINES)


def test_the_comparison_fails_where_losses_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stand_in(task: str, engine: str, *_: object) -> dict[str, Any]:
        losses = [2.0, 1.0 if engine == "torch" else 1.01]
        return {"losses": losses, "results": {}, "step_ms": 1.0, "peak_memory_bytes": [2**20]}

    monkeypatch.setattr(compare_tasks, "train", stand_in)
    monkeypatch.setattr(sys, "argv", ["compare_tasks.py", "diffusion"])
    with pytest.raises(SystemExit, match=r"diffusion: the first 4 losses differ by 1\.0e-02, allowed 0\.001"):
        compare_tasks.main()
    assert "time per step" in capsys.readouterr().out
