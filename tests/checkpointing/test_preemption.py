"""Tests that a training which is told to end saves its last step on every rank, and ends with the chosen code.

All Checkpointers of a process leave after one pass of the loop, and stderr says why.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checkpoint_crashes.signals import Step, signal_round, signaled
from drivetrain.checkpointing import Checkpointer
from drivetrain.checkpointing.preemption import agreement, cloud
from drivetrain.checkpointing.preemption.agreement import Ranks, named_wait
from drivetrain.checkpointing.preemption.interval import Interval, daly_interval
from drivetrain.checkpointing.preemption.notices import Notices
from drivetrain.checkpointing.store.reading import complete_checkpoints
from effort import rounds
from polling import wait_until
from resumed_training import Case, errors_of, newest, run, started, steps_of
from warm_python import warm_python

MOMENTS = rounds(8, whole=20)  # at which a signal is sent, over all cases
WAIT_S = 60


def last_saved_in(folder: Path) -> int:
    return complete_checkpoints(folder)[-1].step


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_signal_at_any_moment_leaves_with_the_last_step_saved(moment: int, tmp_path: Path) -> None:
    assert signal_round(tmp_path / "run", moment) == []


@pytest.mark.parametrize("signaled", [[0], [1], [0, 1]], ids=str)
def test_ranks_leave_at_the_same_step(signaled: list[int], tmp_path: Path) -> None:
    case = Case("ours", wrapper="ours", every=5)
    with started(case, tmp_path, 10**6, world_size=2, on_step=Step(tmp_path)) as processes:
        log = tmp_path / "log-0"
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 7, "7 steps")
        for rank in signaled:
            os.kill(processes[rank].pid, signal.SIGTERM)
        for process in processes:
            process.join(WAIT_S)
        assert [process.exitcode for process in processes] == [75, 75], errors_of(tmp_path)
    last = [steps_of(tmp_path, rank)[-1]["step"] for rank in range(2)]
    assert last == [last_saved_in(tmp_path / "checkpoints") - 1] * 2
    total = last[0] + 30
    run(case, tmp_path, total, world_size=2)
    run(case, tmp_path / "reference", total, world_size=2)
    for rank in range(2):
        expected = [line for line in steps_of(tmp_path / "reference", rank) if line["step"] != last[0] + 1]
        assert steps_of(tmp_path, rank) == expected


@pytest.mark.parametrize(
    ("method", "number", "route", "is_persistent"),
    [("fork", signal.SIGTERM, "group", False), ("forkserver", signal.SIGUSR1, "group", True)],
    ids=["fork", "forkserver"],
)
def test_a_signal_to_a_job_with_workers_saves_the_last_step(
    method: str, number: signal.Signals, route: str, is_persistent: bool, tmp_path: Path
) -> None:
    """`make crashes` draws all start methods, both signals, and torchrun."""
    assert signaled(tmp_path / "run", method, number, route, is_persistent, python=warm_python()) == []


# ---- In this process.


@contextlib.contextmanager
def opened(*signals: int) -> Iterator[Notices]:
    notices = Notices(signals, None, None)
    notices.open()
    try:
        yield notices
    finally:
        notices.close()


def test_a_forked_process_has_the_handlers_of_before() -> None:
    """A script that ends its own process with terminate() and joins it must not wait forever."""
    before = signal.getsignal(signal.SIGTERM)
    with opened(signal.SIGTERM), opened(signal.SIGTERM) as inner:
        context = multiprocessing.get_context("fork")
        found = context.Queue()
        process = context.Process(target=lambda: (found.put(signal.getsignal(signal.SIGTERM)), time.sleep(WAIT_S)))
        process.start()
        assert found.get(timeout=WAIT_S) == before == signal.SIG_DFL
        process.terminate()
        process.join(WAIT_S / 2)
        assert process.exitcode == -signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == inner._on_signal
    assert signal.getsignal(signal.SIGTERM) == before


class Stuck(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            time.sleep(10 * WAIT_S)
        return index


def begun() -> tuple[Any, Any]:
    """Returns an iterator over a loader with one worker, and the worker. Other tests' processes may run as well."""
    others = multiprocessing.active_children()
    batches = iter(torch.utils.data.DataLoader(Stuck(), num_workers=1, multiprocessing_context="fork"))
    (worker,) = (child for child in multiprocessing.active_children() if child not in others)
    return batches, worker


def test_workers_ignore_a_notice_and_end_when_the_loader_ends_them() -> None:
    with opened(signal.SIGTERM, signal.SIGUSR1):
        batches, worker = begun()
        next(batches)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            os.kill(worker.pid, number)
        next(batches)
        assert worker.is_alive()
        worker.terminate()
        assert worker.exitcode is not None
    del batches


def test_without_a_notice_a_lost_worker_is_an_error() -> None:
    with opened(signal.SIGUSR1):
        batches, worker = begun()

        def lose_worker() -> None:
            worker.kill()
            worker.join(WAIT_S)
            list(batches)

        with pytest.raises(RuntimeError, match="DataLoader worker"):
            lose_worker()


def make(folder: Path, **options: Any) -> tuple[torch.nn.Linear, torch.optim.Optimizer, Checkpointer]:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, Checkpointer(folder, model=model, optimizer=optimizer, every=None, **options)


def loop(ckpt: Checkpointer, at: int, what: Any, limit: int = 20) -> None:
    for step in range(limit):
        if step == at:
            what()
        ckpt.step()


def test_without_an_exit_code_the_program_continues_after_the_block(tmp_path: Path) -> None:
    _, _, ckpt = make(tmp_path, exit_code=None, signals=[signal.SIGUSR1, signal.SIGTERM])
    with ckpt:
        loop(ckpt, 4, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        pytest.fail("the loop was not left")
    assert (ckpt.steps, ckpt.preempted) == (5, "SIGUSR1")
    assert last_saved_in(tmp_path) == 5


def test_an_exit_code_passes_handlers_of_exceptions(tmp_path: Path) -> None:
    _, _, ckpt = make(tmp_path, exit_code=3)

    def train() -> None:
        with ckpt:
            for _ in range(20):
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                    ckpt.step()
                except Exception:
                    pytest.fail("a handler in the loop caught it")

    with pytest.raises(SystemExit) as raised:
        train()
    assert raised.value.code == 3


class Source:
    def notice(self) -> str | None:
        return "the queue is full"


@pytest.mark.parametrize("kind", ["a file", "a source of the user"])
def test_other_notices_end_the_training(tmp_path: Path, kind: str) -> None:
    stop = tmp_path / "stop"
    options: dict[str, Any] = {"preemption_file": stop} if kind == "a file" else {"cloud": Source()}
    _, _, ckpt = make(tmp_path / "run", exit_code=None, **options)
    with ckpt:
        stop.touch()
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            ckpt.step()
            time.sleep(0.001)
    assert ckpt.preempted == (f"the file {stop} exists" if kind == "a file" else "the queue is full")
    assert last_saved_in(tmp_path / "run") == ckpt.steps


def test_a_signal_before_the_block_leaves_at_its_begin(tmp_path: Path) -> None:
    _, _, ckpt = make(tmp_path)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as raised, ckpt:
        pytest.fail("the block has begun")
    assert raised.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_while_ranks_connect_ends_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has connected goes on to the block, and waits there for the one that was signaled."""
    monkeypatch.setattr(Ranks, "connect", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the signal has its former effect"))
    try:
        _, _, ckpt = make(tmp_path)
        with pytest.raises(SystemExit) as raised, ckpt:
            pytest.fail("the block has begun")
        assert raised.value.code == 75
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ranks_that_cannot_connect_get_their_handlers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("refused")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", fail)
    with pytest.raises(ConnectionError, match="refused"):
        make(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before


def test_original_handlers_come_back_and_the_second_signal_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    monkeypatch.setattr("drivetrain.checkpointing.preemption.notices._SAME_NOTICE_SECONDS", 3600.0)
    with opened(signal.SIGUSR1) as notices:
        for _ in range(2):  # A launcher and a scheduler deliver one notice.
            signal.raise_signal(signal.SIGUSR1)
        assert (notices.check(), seen) == ("SIGUSR1", [])
        monkeypatch.setattr("drivetrain.checkpointing.preemption.notices._SAME_NOTICE_SECONDS", 0.0)
        signal.raise_signal(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    signal.raise_signal(signal.SIGUSR1)
    assert seen == [signal.SIGUSR1] * 2
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_the_script_sets_later_stays() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with opened(signal.SIGUSR2):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    signal.signal(signal.SIGUSR2, before)


# ---- Several Checkpointers, several ranks, and what stderr says.


def two(folder: Path, **options: Any) -> list[Checkpointer]:
    return [Checkpointer(folder / name, model=nn.Linear(1, 1), every=None, **options) for name in "ab"]


def saved_in(folder: Path) -> list[int]:
    found = [newest(folder / name) for name in "ab"]
    return [-1 if one is None else one.step for one in found]


@pytest.mark.parametrize("place", ["before the first", "between", "after the second"])
def test_two_checkpointers_stop_at_one_step(place: str, tmp_path: Path) -> None:
    first, second = two(tmp_path)

    def train() -> None:
        with first, second:
            for number in range(10):
                if number == 4 and place == "before the first":
                    os.kill(os.getpid(), signal.SIGTERM)
                first.step()
                if number == 4 and place == "between":
                    os.kill(os.getpid(), signal.SIGTERM)
                second.step()
                if number == 4 and place == "after the second":
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        train()
    assert first.steps == second.steps == (6 if place == "after the second" else 5)
    assert saved_in(tmp_path) == [first.steps] * 2


def test_one_that_steps_more_rarely_is_not_awaited_for_long(tmp_path: Path) -> None:
    first, second = two(tmp_path)

    def train() -> None:
        with first, second:
            for number in range(100):
                if number == 21:
                    os.kill(os.getpid(), signal.SIGTERM)
                first.step()
                if number % 10 == 9:
                    second.step()

    with pytest.raises(SystemExit):
        train()
    assert (first.steps, second.steps) == (23, 2)
    assert saved_in(tmp_path) == [23, 2]


def _leave_on_ranks(folder: str) -> tuple[int, int]:
    torch.manual_seed(0)
    first, second = two(Path(folder), exit_code=None)
    with first, second:
        for number in range(50):
            first.step()
            if number == 4 and dist.get_rank() == 0:
                first._notices.reason = second._notices.reason = "a notice"
            second.step()
    return first.steps, second.steps


def test_two_checkpointers_stop_at_one_step_on_all_ranks(on_ranks: Any, tmp_path: Path) -> None:
    (steps, *others) = {step for pair in on_ranks(_leave_on_ranks, str(tmp_path)) for step in pair}
    assert others == []
    assert 5 <= steps <= 8
    assert saved_in(tmp_path) == [steps] * 2


def test_stderr_says_why_and_how_to_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt = Checkpointer(tmp_path / "run", model=nn.Linear(1, 1), every=None)

    def train() -> None:
        with ckpt:
            ckpt.step()
            os.kill(os.getpid(), signal.SIGTERM)
            ckpt.step()

    with pytest.raises(SystemExit):
        train()
    expected = f"on a notice: SIGTERM. Step 2 is saved in {tmp_path / 'run'}. Start the script again to continue.\n"
    assert capsys.readouterr().err == f"drivetrain ends this process {expected}"


def test_a_leftover_stop_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stop").touch()
    ckpt = Checkpointer(tmp_path / "run", model=nn.Linear(1, 1), every=None, preemption_file=tmp_path / "stop")
    with pytest.raises(SystemExit), ckpt:
        pytest.fail("the block has begun")
    assert f"Delete {tmp_path / 'stop'}, then start the script again to continue." in capsys.readouterr().err


def test_without_an_exit_code_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt = Checkpointer(tmp_path, model=nn.Linear(1, 1), every=None, exit_code=None)
    with ckpt:
        os.kill(os.getpid(), signal.SIGTERM)
        ckpt.step()
    assert capsys.readouterr().err == ""


def _call_on_one_rank(folder: str, call: str) -> list[str]:
    """Returns what rank 0 logs while the other rank does not make the call, which it makes once rank 0 has."""
    records: list[str] = []
    told, is_first = Path(folder) / "told", dist.get_rank() == 0

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())
            if is_first:
                told.touch()

    handler, usual = Recorder(), agreement._NAMED_AFTER_S
    logging.getLogger("drivetrain").addHandler(handler)
    agreement._NAMED_AFTER_S = 0.2
    try:
        with Checkpointer(Path(folder) / "run", model=nn.Linear(1, 1), every=None) as ckpt:
            if not is_first:
                wait_until(told.exists, "warning of rank 0")
            if call == "step":
                ckpt.step()
                ckpt.step()  # waits for the exchange of the last one
            else:
                ckpt.save()
    finally:
        agreement._NAMED_AFTER_S = usual
        logging.getLogger("drivetrain").removeHandler(handler)
    return records


@pytest.mark.parametrize("call", ["save", "step"])
def test_a_call_on_one_rank_alone_is_named(call: str, on_ranks: Any, tmp_path: Path) -> None:
    records, *_ = on_ranks(_call_on_one_rank, str(tmp_path), call)
    assert any(f"rank 0 waits in Checkpointer.{call}() for" in text and "if rank == 0" in text for text in records)


def test_waits_are_named_within_half_a_minute() -> None:
    assert agreement._NAMED_AFTER_S <= 25
    with named_wait(lambda: pytest.fail("a short wait was named"), print, 60.0):
        pass


# ---- The metadata services of clouds: a local server is as strict as the documented ones.


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


# ---- When checkpoints are due, and Young and Daly's formula against a search for the best interval.


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [
        (7, 7, None),
        ("1 step", 1, None),
        ("100 steps", 100, None),
        ("30s", None, 30.0),
        ("5min", None, 300.0),
        ("1.5 h", None, 5400.0),
        ("2D", None, 172800.0),
        (datetime.timedelta(minutes=2), None, 120.0),
        (None, None, None),
    ],
)
def test_forms_of_every(every: Any, steps: int | None, seconds: float | None) -> None:
    interval = Interval.of(every, "4h")
    assert (interval.steps, interval.seconds, interval.mtbf) == (steps, seconds, None)


@pytest.mark.parametrize(
    "every", ["", "soon", "5", "0 steps", "1.5 steps", 0, -3, True, "0s", "5 parsecs", datetime.timedelta(0)]
)
def test_other_forms_are_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="every is"):
        Interval.of(every, "4h")


def test_a_wrong_mtbf_is_refused() -> None:
    with pytest.raises(ValueError, match="mtbf is 'often'"):
        Interval.of("auto", "often")


def test_due() -> None:
    by_steps, by_time, never = (Interval.of(every, "4h") for every in (3, "10s", None))
    assert [by_steps.is_due(steps, 1e9) for steps in (2, 3, 4)] == [False, True, True]
    assert [by_time.is_due(10**9, seconds) for seconds in (9.9, 10.0)] == [False, True]
    assert not never.is_due(10**9, 1e9)


def lost_share(interval: float, cost: float, mtbf: float) -> float:
    """Returns the expected time per second of work, with exponential failures and no restarts."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


@pytest.mark.parametrize(("cost", "mtbf"), [(0.01, 3600.0), (1.0, 3600.0), (27.0, 7200.0), (60.0, 600.0)])
def test_daly_is_within_a_thousandth_of_the_best_interval(cost: float, mtbf: float) -> None:
    searched = [cost * 1.01**power for power in range(-200, 3000)]
    best = min(lost_share(interval, cost, mtbf) for interval in searched if (interval + cost) / mtbf < 500)
    assert lost_share(daly_interval(cost, mtbf), cost, mtbf) <= best * 1.001


def test_daly_for_a_cost_beyond_its_range() -> None:
    assert daly_interval(100.0, 50.0) == 50.0


def test_auto_follows_the_measured_cost() -> None:
    interval = Interval.of("auto", "2h")
    interval.measured(stall=27.0, duration=27.0)
    assert interval.seconds == pytest.approx(604, abs=5)  # 10.4 min by Young's formula alone is 623 s
    interval.measured(stall=0.15, duration=0.2)
    assert interval.seconds == pytest.approx(46, abs=1)
    interval.measured(stall=0.15, duration=90.0)
    assert interval.seconds == 90.0
