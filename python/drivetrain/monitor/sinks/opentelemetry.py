"""Sends the event stream to an OpenTelemetry collector."""

from __future__ import annotations

import importlib
from typing import Any

from ..stream import Event, Sink
from .requirement import require
from .scalars import scalars


class OpenTelemetry(Sink):
    """Sends the last scalars of this rank as gauges, and the times of steps as a histogram, by OTLP over HTTP.

    OpenTelemetry's environment variables apply, for example OTEL_METRIC_EXPORT_INTERVAL and
    OTEL_EXPORTER_OTLP_HEADERS.

    Args:
        endpoint: URL of the collector's metrics, such as "http://localhost:4318/v1/metrics".

    Raises:
        ImportError: A package of OpenTelemetry is missing.
    """

    def __init__(self, endpoint: str) -> None:
        require("opentelemetry-sdk", "the sink opentelemetry", "opentelemetry.sdk")
        require(
            "opentelemetry-exporter-otlp-proto-http",
            "the sink opentelemetry",
            "opentelemetry.exporter.otlp.proto.http",
        )
        self.name = f"opentelemetry:{endpoint}"
        self._endpoint = endpoint
        self._provider: Any = None
        self._meter: Any = None
        self._seconds: Any = None
        self._gauges: dict[str, Any] = {}

    def open(self) -> None:
        """Builds the meters."""
        exporter: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        metrics: Any = importlib.import_module("opentelemetry.sdk.metrics")
        export: Any = importlib.import_module("opentelemetry.sdk.metrics.export")
        reader = export.PeriodicExportingMetricReader(exporter.OTLPMetricExporter(self._endpoint))
        self._provider = metrics.MeterProvider([reader], shutdown_on_exit=False)
        self._meter = self._provider.get_meter("drivetrain")
        self._seconds = self._meter.create_histogram("drivetrain.step.duration", "s", "Wall time of a step")

    def write(self, event: Event) -> None:
        """Takes the numbers of an event, which the next export sends."""
        rank = {"rank": str(event["rank"])}
        if event["type"] == "step":
            self._seconds.record(event["wall_s"], rank)
        for name, value in scalars(event).items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"drivetrain.{name.replace('/', '.')}")
            self._gauges[name].set(value, rank)

    def close(self) -> None:
        """Sends the last values."""
        self._provider.shutdown()
