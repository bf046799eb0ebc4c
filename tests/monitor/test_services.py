"""Tests that MLflow needs a sink of three lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loops import Kept, make_batches, make_model, train

from drivetrain.monitor import Monitor, Sink
from drivetrain.monitor.stream import Event

# The packages' own warnings cannot be fixed here.
pytestmark = pytest.mark.filterwarnings("default")
STEPS = 8


def run(to: str | Sink) -> Kept:
    """Trains a few steps, and returns the events that the sink has got, too."""
    model, kept = make_model(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[to, kept], progress=False) as monitor:
        train(model, optimizer, monitor(make_batches(STEPS)))
    assert monitor.summary().notes == []  # no sink has dropped an event
    return kept


def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    class MLflow(Sink):
        def write(self, event: Event) -> None:
            if event["type"] == "step":
                metrics = {f"{phase}_ms": 1e3 * seconds for phase, seconds in event["phases"].items()}
                mlflow.log_metrics(metrics, event["step"], run_id=active.info.run_id)

    mlflow.set_experiment("tests")
    with mlflow.start_run() as active:
        kept = run(MLflow())
    history = mlflow.MlflowClient().get_metric_history(active.info.run_id, "backward_ms")
    shown = [(one.step, one.value) for one in sorted(history, key=lambda one: one.step)]
    assert shown == [(event["step"], pytest.approx(1e3 * event["phases"]["backward"])) for event in kept.steps()]
