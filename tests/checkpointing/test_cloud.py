"""Tests the metadata services' formats against a local server that is as strict as the documented ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from drivetrain.checkpointing.preemption import cloud
from polling import wait_until


class Service:
    """The state of the three services."""

    def __init__(self) -> None:
        self.aws_action: dict[str, str] | None = None
        self.aws_token = "first"
        self.gcp_preempted = "FALSE"
        self.azure_events: list[dict[str, Any]] = []
        self.requests: list[str] = []


@pytest.fixture
def service() -> Iterator[tuple[Service, str]]:
    state = Service()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, code: int, text: str = "") -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            state.requests.append(f"PUT {self.path}")
            lifetime = int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0"))
            is_right = self.path == "/latest/api/token" and 1 <= lifetime <= 21600
            self.answer(200, state.aws_token) if is_right else self.answer(400)

        def do_GET(self) -> None:
            state.requests.append(f"GET {self.path}")
            if self.path == "/latest/meta-data/spot/instance-action":
                if self.headers.get("X-aws-ec2-metadata-token") != state.aws_token:
                    return self.answer(401)
                return self.answer(404) if state.aws_action is None else self.answer(200, json.dumps(state.aws_action))
            if self.path == "/computeMetadata/v1/instance/preempted":
                is_right = self.headers.get("Metadata-Flavor") == "Google"
                return self.answer(200, state.gcp_preempted) if is_right else self.answer(403)
            if self.headers.get("Metadata") != "true":
                return self.answer(400)
            if self.path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
                return self.answer(200, "node_3")
            if self.path == "/metadata/scheduledevents?api-version=2020-07-01":
                return self.answer(200, json.dumps({"DocumentIncarnation": 1, "Events": state.azure_events}))
            return self.answer(404)

        def log_message(self, *_: Any) -> None:
            """Keeps the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_aws(service: tuple[Service, str]) -> None:
    state, base = service
    source = cloud.Aws(base)
    assert source.notice() is None
    state.aws_token = "second"  # the first has expired
    assert source.notice() is None
    state.aws_action = {"action": "terminate", "time": "2026-09-18T08:22:00Z"}
    assert source.notice() == "AWS will terminate this instance at 2026-09-18T08:22:00Z"
    assert state.requests.count("PUT /latest/api/token") == 2


def test_gcp(service: tuple[Service, str]) -> None:
    state, base = service
    source = cloud.Gcp(base)
    assert source.notice() is None
    state.gcp_preempted = "TRUE\n"
    assert source.notice() == "Google Cloud preempts this instance"
    state.gcp_preempted = "<html>"
    with pytest.raises(ValueError, match="expected TRUE or FALSE"):
        source.notice()


def event(kind: str, *resources: str) -> dict[str, Any]:
    return {
        "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456",
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources),
        "NotBefore": "Mon, 11 Apr 2026 22:26:58 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


def test_azure(service: tuple[Service, str]) -> None:
    state, base = service
    source = cloud.Azure(base)
    assert source.notice() is None
    state.azure_events = [event("Preempt", "node_1", "node_2"), event("Freeze", "node_3")]
    assert source.notice() is None
    state.azure_events.append(event("Preempt", "node_2", "node_3"))
    assert source.notice() == "Azure announces Preempt not before Mon, 11 Apr 2026 22:26:58 GMT"
    state.azure_events = [event("Terminate", "node_3") | {"NotBefore": ""}]
    assert source.notice() == "Azure announces Terminate not before now"


def test_proxies_are_not_asked(service: tuple[Service, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert cloud.Gcp(service[1]).notice() is None


def test_a_poller_keeps_asking_until_there_is_a_notice(service: tuple[Service, str]) -> None:
    state, base = service
    poller = cloud.Poller(cloud.Gcp(base), seconds=0.01)
    wait_until(lambda: len(state.requests) >= 3, "three polls")
    assert poller.reason is None
    state.gcp_preempted = "TRUE"
    wait_until(lambda: poller.reason is not None, "the notice")
    poller.close()


def test_a_service_that_does_not_answer_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        calls = 0

        def notice(self) -> str | None:
            self.calls += 1
            raise OSError("no route to host")

    source = Broken()
    poller = cloud.Poller(source, seconds=0.001)
    wait_until(lambda: source.calls >= 10, "ten polls")
    poller.close()
    assert [record.message for record in caplog.records].count(
        "Broken does not answer, so preemptions that it announces go unseen: OSError: no route to host"
    ) == 1


def test_names_of_clouds() -> None:
    assert isinstance(cloud.source_of("azure"), cloud.Azure)
    with pytest.raises(ValueError, match="cloud is 'ibm', expected one of 'aws', 'gcp', 'azure'"):
        cloud.source_of("ibm")
