"""Serves the event stream to Prometheus."""

from __future__ import annotations

import hmac
import logging
import os
import ssl
from typing import TYPE_CHECKING, Any

from ..stream import Event, Sink
from .requirement import require

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = logging.getLogger("drivetrain")
TOKEN_VARIABLE = "DRIVETRAIN_METRICS_TOKEN"
_BUCKETS_S = tuple(round(base * 10.0**power, 6) for power in range(-3, 3) for base in (1, 1.8, 3.2, 5.6))


class Prometheus(Sink):
    """Serves metrics of this rank at http://host:port/metrics.

    Every rank listens on a port of its own: `port` plus its local rank. Label values are escaped by prometheus-client.

    Args:
        port: TCP port of local rank 0, 1 to 65535.
        host: Address to listen on. The default reaches this machine alone.
        certfile: File with the TLS certificate; None serves plain HTTP.
        keyfile: File with its key.
        token: A request must carry it as `Authorization: Bearer TOKEN`. None takes the environment variable
            DRIVETRAIN_METRICS_TOKEN, if it is set.

    Raises:
        ImportError: The package prometheus-client is missing.
        ValueError: The port is out of range, or only one of `certfile` and `keyfile` is given.
        OSError: The port is taken.
    """

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        *,
        certfile: str | None = None,
        keyfile: str | None = None,
        token: str | None = None,
    ) -> None:
        require("prometheus-client", "the sink prometheus", "prometheus_client")
        if not 1 <= port <= 65535:
            raise ValueError(f"port is {port}, expected 1 to 65535")
        if (certfile is None) != (keyfile is None):
            raise ValueError("certfile and keyfile belong together, and only one of them is given: pass both")
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

        self.name = f"prometheus:{port}"
        self._port, self._host = port + int(os.environ.get("LOCAL_RANK", "0")), host
        registry = CollectorRegistry()
        # A port that is taken is an error of the script, so that it is bound here and not in the sink's thread.
        try:
            self._server, self._thread = start_http_server(self._port, host, registry, certfile, keyfile)
        except OSError as error:
            if error.errno is None:  # the certificate cannot be read
                raise
            raise OSError(
                error.errno,
                f"{error.strerror}: the sink {self.name} cannot listen on {self._host}:{self._port} "
                f"(each local rank takes the next port); choose a free port",
            ) from error
        app: Any = self._server.get_app()
        self._server.set_app(_with_token(app, token or os.environ.get(TOKEN_VARIABLE)))
        # socketserver would write a traceback into the training's output, for example for each failed handshake.
        self._server.handle_error = _note_error  # type: ignore[method-assign, assignment]
        self._server.RequestHandlerClass.timeout = 10  # type: ignore[attr-defined]  # an idle connection holds no thread
        if isinstance(self._server.socket, ssl.SSLSocket):
            vars(self._server.socket)["do_handshake_on_connect"] = False  # nor the one that accepts connections

        # Names carry base units, as Prometheus recommends.
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return Gauge(f"drivetrain_{name}", text, ("rank", *labels), registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return Counter(f"drivetrain_{name}", text, ("rank", *labels), registry=registry)

        self._step_seconds = Histogram(
            "drivetrain_step_seconds", "Wall time of a step", ("rank",), buckets=_BUCKETS_S, registry=registry
        )
        self._phase_seconds = counter("phase_seconds", "Seconds in each phase", ("phase",))
        self._samples = counter("samples", "Samples that steps have consumed")
        self._last_step = gauge("last_step", "Number of the last step")
        self._values = {
            "samples_per_s": gauge("samples_per_second", "Samples per second of the last step"),
            "mfu": gauge("model_flops_utilization", "Share of the device's peak FLOP/s without recomputation"),
            "hfu": gauge("hardware_flops_utilization", "Share of the device's peak FLOP/s with recomputation"),
        }
        self._system = gauge("system", "Use of the host and the device", ("resource",))
        self._logged = gauge("metric", "Values that the script has logged", ("name",))
        self._statistic = gauge("parameter", "Figures of a parameter from its step", ("parameter", "quantity"))
        self._noise_scale = gauge("gradient_noise_scale", "Gradient noise scale in batches of one rank")
        self._excess = gauge("straggler_excess_ratio", "Excess of a straggler's step over the others'", ("phase",))
        self._dropped = gauge("dropped_events", "Events that a sink has not taken", ("sink",))

    @property
    def url(self) -> str:
        """The address that Prometheus scrapes."""
        scheme = "https" if isinstance(self._server.socket, ssl.SSLSocket) else "http"
        return f"{scheme}://{self._host}:{self._port}/metrics"

    def write(self, event: Event) -> None:
        """Updates the metrics."""
        rank = str(event["rank"])
        if event["type"] == "step":
            self._step_seconds.labels(rank).observe(event["wall_s"])
            self._last_step.labels(rank).set(event["step"])
            for phase, seconds in event["phases"].items():
                self._phase_seconds.labels(rank, phase).inc(seconds)
            self._samples.labels(rank).inc(event["samples"])
            for name, metric in self._values.items():
                if event.get(name) is not None:
                    metric.labels(rank).set(event[name])
        elif event["type"] == "metrics":
            for name, value in event["values"].items():
                self._logged.labels(rank, name).set(float(value))
        elif event["type"] == "statistics":
            for parameter, figures in event["parameters"].items():
                for quantity, value in figures.items():
                    self._statistic.labels(rank, parameter, quantity).set(float(value))
            if event["noise"] is not None:
                self._noise_scale.labels(rank).set(float(event["noise"]["scale"]))
        elif event["type"] == "system":
            for name, value in event["values"].items():
                self._system.labels(rank, name).set(value)
            for name, count in event["dropped"].items():
                self._dropped.labels(rank, name).set(count)
        elif event["type"] == "straggler":
            self._excess.labels(str(event["slow_rank"]), event["phase"]).set(event["excess"])

    def close(self) -> None:
        """Stops answering and frees the port."""
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()


def _note_error(request: Any, address: Any) -> None:
    _logger.debug("monitor: a request of %s to the exporter failed", address, exc_info=True)


def _with_token(app: Callable[..., Any], token: str | None) -> Callable[..., Any]:
    if token is None:
        return app
    expected = f"Bearer {token}".encode()

    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
        if hmac.compare_digest(given, expected):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"a bearer token is required\n"]

    return checked
