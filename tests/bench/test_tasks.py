"""Tests benchmarks/tasks: both engines train each of them to the same losses, and the comparison prints one table."""

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

import drivetrain

FOLDER = Path(__file__).parents[2] / "benchmarks" / "tasks"
sys.path.insert(0, str(FOLDER))

import compare_tasks  # noqa: E402
import time_to_quality  # noqa: E402

from warm_python import warm_environ, warm_python  # noqa: E402

STEPS = 3
NEEDS = {"fine_tuning": "transformers", "diffusion": "matplotlib"}


@pytest.fixture
def _names_restored() -> Iterator[None]:
    """Restores the names that fine_tuning replaces."""
    yield
    drivetrain.uninstall()


def train(task: ModuleType, engine: str, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """Trains in this process, as the only rank, and returns the metrics."""
    arguments = [f"--engine={engine}", f"--steps={STEPS}", "--batch-size=8", "--device=cpu", f"--json={out}", *more]
    monkeypatch.setattr(sys, "argv", [str(task.__file__), *arguments])
    task.main()
    metrics: dict[str, Any] = json.loads(out.read_text())
    return metrics


@pytest.mark.usefixtures("_names_restored")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own Adagrad
@pytest.mark.parametrize("name", compare_tasks.TASKS)
def test_both_engines_train_to_the_same_losses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    task = importlib.import_module(name)
    if name == "fine_tuning":
        monkeypatch.setattr(task, "PACKAGES", task.PACKAGES[:2])  # of which all held-out snippets are evaluated
    picture = tmp_path / "digits.png"
    more = [f"--picture={picture}"] if name == "diffusion" else []
    theirs = train(task, "torch", tmp_path / "torch.json", monkeypatch)
    ours = train(task, "drivetrain", tmp_path / "drivetrain.json", monkeypatch, *more)
    assert len(ours["losses"]) == STEPS
    assert min(ours["losses"]) > 0
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=compare_tasks.TOLERANCE)
    assert ours["results"] == pytest.approx(theirs["results"], abs=0.05)
    assert set(ours["results"]) == set(theirs["results"]) != set()
    if name == "diffusion":
        from matplotlib import image

        assert image.imread(picture).shape[:2] == (4 * task.SIZE, 8 * task.SIZE)


def test_the_table_of_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    command = [warm_python(), str(FOLDER / "compare_tasks.py"), "recommender", f"--steps={STEPS}", f"--json={out}"]
    done = subprocess.run(command, env=warm_environ(), capture_output=True, text=True, timeout=150)
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


@pytest.mark.usefixtures("_names_restored")
def test_a_task_stops_at_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = importlib.import_module("image_classification")
    for target, steps in ((1e-6, 1), (1.5, STEPS)):  # no accuracy is above 1
        options = (f"--target={target}", f"--evaluations={STEPS}")
        metrics = train(task, "drivetrain", tmp_path / "metrics.json", monkeypatch, *options)
        assert len(metrics["losses"]) == steps
        assert (metrics["seconds_to_target"] is not None) == (steps == 1)


def quality_run(engine: str, seed: int) -> dict[str, Any]:
    """Returns what a run of `seed` tells, which takes drivetrain 0.8 of torch's time."""
    seconds = (10.0 + seed) * (0.8 if engine == "drivetrain" else 1.0)
    return {"seconds_to_target": seconds, "step_ms": 1.0, "losses": [1.0] * 7}


def test_the_time_to_quality_is_paired_by_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time_to_quality, "train", lambda goal, engine, seed, args: quality_run(engine, seed))
    monkeypatch.setattr(sys, "argv", ["time_to_quality.py", f"--json={tmp_path / 'times.json'}"])
    time_to_quality.main()
    printed = capsys.readouterr().out
    assert printed.count("0.800 [0.800, 0.800]") == 2
    assert printed.count("12.00 ± 1.96") == 2  # of 10 to 14: t(4) x 1.5811 / sqrt(5)
    times = json.loads((tmp_path / "times.json").read_text())
    assert [run["seconds_to_target"] for run in times["gpt"]["torch"]] == [10, 11, 12, 13, 14]


def test_a_seed_that_misses_the_target_fails_the_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stand_in(goal: time_to_quality.Goal, engine: str, seed: int, args: object) -> dict[str, Any]:
        misses = engine == "drivetrain" and seed == 1
        return quality_run(engine, seed) | ({"seconds_to_target": None} if misses else {})

    monkeypatch.setattr(time_to_quality, "train", stand_in)
    monkeypatch.setattr(sys, "argv", ["time_to_quality.py", "gpt", "--seeds=3"])
    with pytest.raises(SystemExit, match="gpt: seed 1 with engine drivetrain did not reach the target"):
        time_to_quality.main()
    assert "2 of 3" in capsys.readouterr().out


def test_both_scripts_take_the_options_of_their_goals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real scripts run, on one rank and with targets that are reached at once."""
    monkeypatch.setattr(sys, "executable", warm_python())
    monkeypatch.setenv("PYTHON_EXEC", warm_python())
    found = {}
    arguments = ["time_to_quality.py", "gpt", "--seeds=2", "--ranks=1", "--target=6", "--preset=tiny"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--device=cpu", f"--json={tmp_path / 'times.json'}"])
    args = time_to_quality.parse_arguments()
    for name, goal in time_to_quality.GOALS.items():
        args.extra = ["--device=cpu"] + (["--preset=tiny"] if name == "gpt" else [])
        args.target = 6 if name == "gpt" else 1e-6
        found[name] = time_to_quality.train(goal, "drivetrain", 0, args)
    assert found["gpt"]["seconds_to_target"] == 0
    assert found["gpt"]["losses"] == []
    assert 0 < found["resnet"]["seconds_to_target"] < 60
    assert len(found["resnet"]["losses"]) == 5
