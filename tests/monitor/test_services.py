"""Tests that W&B, offline, reads what TensorBoard's sink writes, and that MLflow needs a sink of three lines."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loops import Kept, make_batches, make_model, train

from drivetrain.monitor import Monitor, Sink
from drivetrain.monitor.stream import Event

# The packages' own warnings cannot be fixed here.
pytestmark = pytest.mark.filterwarnings("default")
STEPS = 8
BLOCK, HEADER = 32768, 7  # bytes of a .wandb file's blocks and headers


def run(to: str | Sink) -> Kept:
    """Trains a few steps, and returns the events that the sink has got, too."""
    model, kept = make_model(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[to, kept], progress=False) as monitor:
        train(model, optimizer, monitor(make_batches(STEPS)))
    assert monitor.summary().notes == []  # no sink has dropped an event
    return kept


def records(path: Path) -> Iterator[bytes]:
    """Reads the records of W&B's file, which has the format of LevelDB's log."""
    data, at, parts = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # a whole record, or the end of one
            yield parts
            parts = b""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with wandb.init(project="tests", sync_tensorboard=True):
        kept = run(f"tensorboard:{tmp_path}/tb")
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")

    def logged_steps() -> list[dict[str, str]]:
        rows = []
        for data in records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                rows.append({".".join(item.nested_key) or item.key: item.value_json for item in record.history.item})
        return [row for row in rows if "step/milliseconds" in row]

    deadline = time.monotonic() + 60
    while len(steps := logged_steps()) < STEPS and time.monotonic() < deadline:
        time.sleep(0.1)  # a process of W&B writes the file
    assert [int(row["global_step"]) for row in steps] == list(range(1, STEPS + 1))
    for row, event in zip(steps, kept.steps(), strict=True):
        assert float(row["phase/backward_ms"]) == pytest.approx(1e3 * event["phases"]["backward"], rel=1e-5)


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
