"""Tests the sinks for W&B, offline, for MLflow, in a folder, and for OpenTelemetry, against a collector of the test."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Kept, make_batches, make_model, train

from drivetrain.monitor import Monitor
from drivetrain.monitor.sinks import make_sinks

# The packages' own warnings cannot be fixed here.
pytestmark = pytest.mark.filterwarnings("default")
STEPS = 8
BLOCK, HEADER = 32768, 7  # bytes of a .wandb file's blocks and headers


def run(to: list[Any]) -> Kept:
    """Trains a few steps, and returns the events that the sinks of `to` have got, too."""
    model, kept = make_model(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=[*to, kept], progress=False) as monitor:
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
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    kept = run(["wandb:tests"])
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")

    def logged_steps() -> list[dict[str, str]]:
        rows = []
        for data in records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                rows.append({".".join(item.nested_key) or item.key: item.value_json for item in record.history.item})
        return [row for row in rows if "drivetrain/step/milliseconds" in row]

    deadline = time.monotonic() + 60
    while len(steps := logged_steps()) < STEPS and time.monotonic() < deadline:
        time.sleep(0.1)  # a process of W&B writes the file
    assert [int(row["drivetrain/step"]) for row in steps] == list(range(1, STEPS + 1))
    for row, event in zip(steps, kept.steps(), strict=True):
        assert float(row["drivetrain/phase/backward_ms"]) == pytest.approx(1e3 * event["phases"]["backward"])


def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    kept = run(["mlflow:tests"])
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "step/milliseconds")
    shown = [(one.step, one.value) for one in sorted(history, key=lambda one: one.step)]
    assert shown == [(event["step"], pytest.approx(1e3 * event["wall_s"])) for event in kept.steps()]


def test_opentelemetry_sends_to_a_collector() -> None:
    pytest.importorskip("opentelemetry.sdk.metrics", reason="opentelemetry-sdk is not installed")
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="opentelemetry-exporter-otlp-proto-http is not installed"
    )
    import gzip

    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        kept = run([f"opentelemetry:http://127.0.0.1:{server.server_port}/v1/metrics"])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    metrics = {
        metric.name: metric
        for resource in ExportMetricsServiceRequest.FromString(bodies[-1]).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    (seconds,) = metrics["drivetrain.step.duration"].histogram.data_points
    assert seconds.count == STEPS
    assert seconds.sum == pytest.approx(sum(event["wall_s"] for event in kept.steps()))
    assert [(one.key, one.value.string_value) for one in seconds.attributes] == [("rank", "0")]
    (last,) = metrics["drivetrain.phase.backward_ms"].gauge.data_points
    assert last.as_double == pytest.approx(1e3 * kept.steps()[-1]["phases"]["backward"])


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_only_rank_0_reports_to_services(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    assert len(make_sinks([f"{package}:tests"], rank=0)) == 1
    assert make_sinks([f"{package}:tests"], rank=1) == []
