"""Writes the event stream for MLflow."""

from __future__ import annotations

import importlib
import time
from typing import Any

from ..stream import Event, Sink
from .requirement import require
from .scalars import scalars

_PERIOD_S = 1.0  # a request per second, and not per step
_MOST = 900  # MLflow takes 1,000 metrics in a request


class MLflow(Sink):
    """Logs scalars as metrics of an MLflow run of its own.

    MLFLOW_TRACKING_URI names the server or the folder, as for all of MLflow.

    Args:
        experiment: The experiment, which is created if it does not exist.

    Raises:
        ImportError: The package mlflow-skinny (or mlflow) is missing.
    """

    close_s = 30.0

    def __init__(self, experiment: str) -> None:
        require("mlflow-skinny", "the sink mlflow", "mlflow")
        self.name = f"mlflow:{experiment}"
        self._experiment = experiment
        self._client: Any = None
        self._metric: Any = None
        self._run = ""
        self._waiting: list[Any] = []
        self._sent_at = 0.0

    def open(self) -> None:
        """Begins a run."""
        mlflow: Any = importlib.import_module("mlflow")
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment).info.run_id

    def write(self, event: Event) -> None:
        """Logs the scalars of a step within a second, and other messages as tags."""
        for name, value in scalars(event).items():
            self._waiting.append(self._metric(name, value, int(1e3 * event["time"]), event["step"]))
        if event["type"] in ("advice", "straggler", "hang"):
            self._client.set_tag(self._run, f"{event['type']}.{event['phase']}", event["text"])
        if len(self._waiting) >= _MOST - 100 or time.monotonic() - self._sent_at >= _PERIOD_S:
            self._send()

    def close(self) -> None:
        """Sends what waits, and ends the run."""
        self._send()
        self._client.set_terminated(self._run)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._sent_at = time.monotonic()
        for begin in range(0, len(waiting), _MOST):
            self._client.log_batch(self._run, metrics=waiting[begin : begin + _MOST])
