"""Tests the sinks: what they write, and that none can slow or stop the training."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Kept, make_batches, make_model, train

from drivetrain.monitor import JSONL, Monitor, Sink, read_events, stream, summarize
from drivetrain.monitor.sinks import make_sinks
from drivetrain.monitor.sinks.prometheus import Prometheus
from drivetrain.monitor.sinks.requirement import require
from drivetrain.monitor.stream import Event, Stream
from drivetrain.phases import PHASES
from ports import free_port


def run(to: list[Any], count: int = 8) -> Monitor:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, to=to, progress=False) as monitor:
        train(model, optimizer, monitor(make_batches(count)))
    return monitor


# ---- JSONL.


def test_jsonl_has_every_event(tmp_path: Path) -> None:
    path, kept = tmp_path / "runs" / "a.jsonl", Kept()
    run([f"jsonl:{path}", kept])
    events = read_events(path)
    assert events == json.loads(json.dumps(kept.events))
    assert [event["type"] for event in events if event["type"] != "step"] == ["run", "system", "end"]
    steps = [event for event in events if event["type"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, 9))
    assert all(set(step["phases"]) == set(PHASES) for step in steps)
    assert {(event["v"], event["rank"]) for event in events} == {(2, 0)}
    summary = summarize(events)
    assert summary.num_steps == 5  # three steps warm up
    assert sum(summary.phase_s.values()) == pytest.approx(summary.wall_s)


def test_every_rank_has_its_file(tmp_path: Path) -> None:
    (sink,) = make_sinks([f"jsonl:{tmp_path}/a.jsonl"], rank=3)
    assert isinstance(sink, JSONL)
    assert sink.path.name == "a.rank3.jsonl"
    assert make_sinks([f"tensorboard:{tmp_path}"], rank=1) == []


def test_a_line_under_way_is_left_out_and_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"v":1,"type":"run"}\n{"v":1,"ty')
    assert read_events(path) == [{"v": 1, "type": "run"}]
    path.write_text('{"v":1,"type":"run"}\nnonsense\n')
    with pytest.raises(ValueError, match="line 2: 'nonsense' is not an event"):
        read_events(path)
    path.write_text('{"v":3,"type":"run"}\n')
    with pytest.raises(ValueError, match="version 3 of the schema, and this drivetrain reads up to 2"):
        read_events(path)


# ---- Sinks that fail.


def test_a_full_disk_drops_events_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    monitor = run(["jsonl:/dev/full", kept := Kept()])
    assert len(kept.steps()) == 8
    assert any("jsonl:/dev/full dropped" in note for note in monitor.summary().notes)
    assert caplog.text.count("No space left on device") == 1


def test_a_line_that_did_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    sink = JSONL(path)
    sink.open()
    sink.write({"v": 1, "type": "count", "number": 1})
    plain = os.write

    def short(file: int, data: bytes) -> int:
        if len(data) < 10:  # the second call for this line
            raise OSError(28, "No space left on device")
        return plain(file, data[:-5])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(OSError, match="No space left"):
        sink.write({"v": 1, "type": "count", "number": 2})
    monkeypatch.undo()
    sink.write({"v": 1, "type": "count", "number": 3})
    sink.close()
    assert [event["number"] for event in read_events(path)] == [1, 3]


@pytest.mark.parametrize("is_opened", [False, True], ids=["unopened", "unread"])
def test_a_blocked_pipe_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_opened: bool) -> None:
    """A pipe without a reader blocks in open(), and one whose reader reads nothing blocks in write()."""
    monkeypatch.setattr(JSONL, "close_s", 0.2)
    monkeypatch.setattr(stream, "CAPACITY", 4)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if is_opened else -1
    try:
        monitor = run([f"jsonl:{path}", kept := Kept()], count=600)
        assert len(kept.steps()) > 0
        assert any("pipe dropped" in note for note in monitor.summary().notes)
    finally:
        if is_opened:
            os.close(reader)  # the blocked write fails, and the thread ends
        else:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


def test_a_raising_sink_stops_neither_training_nor_other_sinks(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Sink):
        name = "broken"

        def write(self, event: Event) -> None:
            raise ZeroDivisionError("oops")

        def close(self) -> None:
            raise ZeroDivisionError("oops again")

    monitor = run([Broken(), kept := Kept()])
    assert len(kept.steps()) == 8
    assert f"broken dropped {len(kept.events)} events" in monitor.summary().notes
    assert caplog.text.count("oops") == 1


def test_the_queue_is_bounded_and_counts_what_it_drops() -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Slow(Kept):
        def write(self, event: Event) -> None:
            begun.set()
            may_end.wait(30)
            super().write(event)

    slow, fast = Slow(), Kept()
    slow.name = "slow"
    lanes = Stream([slow, fast], capacity=10)
    lanes.send({"number": 0})
    assert begun.wait(30)
    for number in range(1, 101):
        lanes.send({"number": number})
        while len(fast.events) <= number and lanes.dropped()["kept"] == 0:
            pass
    assert lanes.dropped() == {"slow": 90, "kept": 0}
    may_end.set()
    lanes.close()
    assert [event["number"] for event in slow.events] == list(range(11))
    assert [event["number"] for event in fast.events] == list(range(101))


def test_events_that_a_sink_never_takes_count_as_dropped() -> None:
    begun, may_end, has_returned = threading.Event(), threading.Event(), threading.Event()

    class Stuck(Kept):
        close_s = 0.2

        def write(self, event: Event) -> None:
            begun.set()
            may_end.wait(30)
            raise OSError("no reader")

        def close(self) -> None:
            has_returned.set()

    lanes = Stream([Stuck()])
    lanes.send(*[{"number": number} for number in range(100)])
    assert begun.wait(30)
    lanes.close()
    assert lanes.dropped() == {"kept": 100}
    may_end.set()
    assert has_returned.wait(30)
    assert lanes.dropped() == {"kept": 100}  # and not a second time


def test_no_sink_wakes_up_without_an_event() -> None:
    lanes = Stream([sink := Kept()])
    lane = lanes._lanes[0]
    lanes.send()
    assert not lane._has_news.is_set()
    assert not lane._events
    lanes.send({"number": 0})
    lanes.close()
    assert len(sink.events) == 1


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ImportError, match=r"the sink x needs the package no-such, .*: pip install no-such"):
        require("no-such", "the sink x", "no_such_package")
    with pytest.raises(ImportError, match=r"the sink x needs the package no-such, .*: pip install no-such"):
        require("no-such", "the sink x", "no_such_package.inside")


# ---- TensorBoard.


# TensorBoard's own reader uses what its dependencies have deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    run([f"tensorboard:{tmp_path}/tb", kept := Kept()])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    assert {"step/milliseconds", "phase/data_ms", "phase/backward_ms"} <= set(found.Tags()["scalars"])
    shown = found.Scalars("step/milliseconds")
    assert [one.step for one in shown] == list(range(1, 9))
    assert [one.value for one in shown] == pytest.approx([1e3 * step["wall_s"] for step in kept.steps()], rel=1e-5)


# ---- Prometheus.


def fetch(url: str, token: str | None = None, certificate: Path | None = None) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    context = ssl.create_default_context(cafile=str(certificate)) if certificate else None
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        return str(answer.read().decode())


def values(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@pytest.fixture
def served() -> Any:
    sinks: list[Prometheus] = []

    def serve(**options: Any) -> Prometheus:
        sinks.append(Prometheus(free_port(), **options))
        sinks[-1].open()
        return sinks[-1]

    yield serve
    for sink in sinks:
        sink.close()


def step_of(rank: int, seconds: float) -> Event:
    phases = dict.fromkeys(PHASES, 0.0) | {"data": seconds}
    return {"type": "step", "rank": rank, "step": 7, "wall_s": seconds, "phases": phases, "samples": 4, "mfu": 0.5}


def test_prometheus_serves_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    port, model = free_port(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {}
    with Monitor(model, optimizer, to=[f"prometheus:{port}"], progress=False) as monitor:
        train(model, optimizer, monitor(make_batches(5)))
        monitor.summary()  # takes the steps from the trace
        while seen.get('drivetrain_last_step{rank="0"}') != 5:
            seen = values(fetch(f"http://127.0.0.1:{port}/metrics"))
    assert seen['drivetrain_step_seconds_count{rank="0"}'] == 5
    assert seen['drivetrain_samples_total{rank="0"}'] == 30
    total = sum(value for name, value in seen.items() if name.startswith("drivetrain_phase_seconds_total"))
    assert total == pytest.approx(seen['drivetrain_step_seconds_sum{rank="0"}'])
    with pytest.raises(OSError, match="refused"):
        fetch(f"http://127.0.0.1:{port}/metrics")


def test_prometheus_buckets_and_labels(served: Any) -> None:
    sink = served()
    sink.write(step_of(1, 0.02))
    sink.write({"type": "system", "rank": 1, "values": {}, "dropped": {'a"b\\c\nd': 3}})
    text = fetch(sink.url)
    found = values(text)
    assert found['drivetrain_step_seconds_bucket{le="0.018",rank="1"}'] == 0
    assert found['drivetrain_step_seconds_bucket{le="0.032",rank="1"}'] == 1
    assert found['drivetrain_model_flops_utilization{rank="1"}'] == 0.5
    assert r'drivetrain_dropped_events{rank="1",sink="a\"b\\c\nd"} 3.0' in text


def test_prometheus_listens_on_this_machine_alone(served: Any) -> None:
    assert served()._server.server_address[0] == "127.0.0.1"


def test_a_local_rank_has_its_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    port = free_port()  # of local rank 1; local rank 0's needs not be free
    sink = Prometheus(port - 1)
    try:
        assert sink.url == f"http://127.0.0.1:{port}/metrics"
    finally:
        sink.close()


def test_a_taken_port_is_an_error_of_the_script(served: Any) -> None:
    port = served()._port
    with pytest.raises(OSError, match=r"in use: the sink prometheus:\d+ cannot listen on 127.0.0.1:\d+ \(each local"):
        Monitor(make_model(), to=[f"prometheus:{port}"])


@pytest.mark.parametrize("given", [None, "wrong", "geheim", "gehe\u00efm"])
def test_a_token_is_required(served: Any, given: str | None) -> None:
    sink = served(token="geheim")
    if given == "geheim":
        assert "drivetrain_step_seconds" in fetch(sink.url, given)
        return
    with pytest.raises(urllib.error.HTTPError, match="401"):
        fetch(sink.url, given)


def test_tls(served: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    sink = served(certfile=str(certificate), keyfile=str(key))
    assert sink.url.startswith("https://")
    assert "drivetrain_step_seconds" in fetch(sink.url, certificate=certificate)
    with caplog.at_level("DEBUG"):
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            fetch(sink.url)
        deadline = time.monotonic() + 30
        while "to the exporter failed" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)  # the server's thread notes it
    assert "to the exporter failed" in caplog.text
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(ValueError, match="certfile and keyfile belong together"):
        Prometheus(9400, certfile="a")


def test_values_of_the_script_reach_every_sink(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, prometheus = make_model(), Prometheus(free_port())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sinks = [f"jsonl:{tmp_path / 'run.jsonl'}", f"tensorboard:{tmp_path / 'board'}", prometheus]
    with Monitor(model, optimizer, to=sinks, progress=False) as monitor:
        for step, (inputs, _) in enumerate(monitor(make_batches(3))):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss, lr=0.5, bad=float("nan"), count=torch.tensor([step]))
        wanted = 'drivetrain_metric{name="count",rank="0"} 2.0'
        deadline = time.monotonic() + 30
        while wanted not in (text := urllib.request.urlopen(prometheus.url, timeout=20).read().decode()):
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
    with pytest.raises(RuntimeError, match="not active"):
        monitor.log(loss=1.0)
    logged = [event for event in read_events(tmp_path / "run.jsonl") if event["type"] == "metrics"]
    assert [(event["step"], event["values"]["count"]) for event in logged] == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert logged[-1]["values"] | {"loss": 0} == {"loss": 0, "lr": 0.5, "bad": "nan", "count": 2.0}
    assert 'drivetrain_metric{name="lr",rank="0"} 0.5' in text
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [scalar.value for scalar in board.Scalars("lr")] == [0.5] * 3


def test_a_value_that_is_no_number_is_refused() -> None:
    with Monitor(progress=False) as monitor:
        for value, what in ((torch.ones(2), r"shape \(2,\)"), ("1", "type str")):
            with pytest.raises(TypeError, match=f"loss has {what}, expected a number or a tensor with one element"):
                monitor.log(loss=value)  # type: ignore[arg-type]
