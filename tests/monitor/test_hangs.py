"""Tests that a rank that stands still is named with its phase, file and line, and that stacks come on request."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import Kept, make_batches, make_model
from torch import nn

import drivetrain
from drivetrain import _C
from drivetrain.cli import main
from drivetrain.monitor import Monitor, hangs, stacks
from drivetrain.monitor.hangs import Hang, HangWatch, RankProgress
from drivetrain.phases import number_of

WAIT_S = 60


def wait_until(is_true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not come within {WAIT_S} s"
        time.sleep(0.01)


# ---- Real ranks.


def stuck_loader_on_rank_1(flag: Path) -> tuple[Hang, list[dict[str, Any]]]:
    """Rank 1's loader stands still until rank 0, whose backward pass waits, has reported it."""
    model = drivetrain.DistributedDataParallel(make_model(), report_hang_after=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, rank = Kept(), dist.get_rank()
    monitor = Monitor(model, optimizer, to=[kept], progress=False, report_hang_after=1.0)

    def late_batches() -> Iterator[Any]:
        yield from make_batches(3)
        if rank == 1:
            # It reports itself, too, which may come after rank 0's report.
            wait_until(lambda: flag.exists() and monitor.hang, "the reports")  # the line that must be named
        yield from make_batches(3)

    def tell() -> None:
        wait_until(lambda: monitor.hang is not None and monitor.hang.rank == 1, "the report")
        flag.touch()

    with monitor:
        if rank == 0:
            teller = threading.Thread(target=tell)
            teller.start()
        for inputs, targets in monitor(late_batches()):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            teller.join()
    assert monitor.hang is not None
    return monitor.hang, [event for event in kept.events if event["type"] == "hang"]


def test_a_stuck_loader_is_named_by_the_rank_that_waits(on_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (waits, events), (stuck, _) = on_ranks(stuck_loader_on_rank_1, tmp_path / "flag")
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "the line that must be named" in text and "wait_until" in text
    )
    assert (waits.rank, waits.phase) == (1, "data")
    # Its own helper is the innermost line, and the line that called it is in the stack.
    assert "monitor/test_hangs.py" in waits.where
    assert re.match(r"rank 0 has stood still for \d+ s in step 4, in the phase 'exposed communication' at ", waits.text)
    assert "it waits for rank 1, in step 4, in the phase 'waiting for data' at monitor/test_hangs.py:" in waits.text
    assert (stuck.rank, stuck.phase) == (1, "data")
    assert f"line {line}, in late_batches" in stuck.stack
    assert events[-1]["slow_rank"] == 1
    assert {"step", "rank", "phase", "where", "seconds", "text", "stack"} <= set(events[-1])


def ask_for_stacks(folder: Path) -> str:
    """Rank 1 holds Python's lock inside of a C function, and rank 0 asks for the stacks of both ranks."""
    model, rank, flag = make_model(), dist.get_rank(), folder / "held"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    file = folder / ("run.jsonl" if rank == 0 else "run.rank1.jsonl")
    printed = io.StringIO()

    def hold_the_lock() -> None:
        signal.alarm(WAIT_S)  # ends the process if no request comes
        flag.touch()
        ctypes.PyDLL(None).pause()  # returns after the handler of a signal
        signal.alarm(0)

    with Monitor(model, optimizer, to=[f"jsonl:{folder}/run.jsonl"], progress=False) as monitor:
        for inputs, targets in monitor(make_batches(1)):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            wait_until(lambda: file.exists() and file.read_text().endswith("\n"), "the run event")
            if rank == 1:
                hold_the_lock()
            else:
                wait_until(flag.exists, "the held lock")
                time.sleep(0.05)
                with contextlib.redirect_stdout(printed):
                    assert main(["monitor", "--stacks", str(file)]) == 0
    return printed.getvalue()


def test_stacks_of_all_ranks_also_while_one_holds_pythons_lock(
    on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    text, _ = on_ranks(ask_for_stacks, tmp_path)
    first, second = text.split("\n\nrank 1 ")
    assert re.match(r"rank 0 \(process \d+ on .*\), after step 0:", first)
    assert "in ask_for_stacks" in first
    assert "in hold_the_lock" in second
    assert "in ask_for_stacks" in second


# ---- The command.


@pytest.mark.parametrize(
    ("process", "address", "expected"),
    [
        ('{"host":"elsewhere","pid":1,"started":1}', '{"signal":63,"fd":3}', "runs on another host"),
        ("OWN_HOST", '{"signal":63,"fd":3}', "has ended"),
        ('{"host":"","pid":1,"started":1}', "null", "answers no requests for stacks"),
    ],
)
def test_ranks_that_cannot_answer_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], process: str, address: str, expected: str
) -> None:
    if process == "OWN_HOST":
        host = stacks.this_process()["host"]
        process = f'{{"host":"{host}","pid":{os.getpid()},"started":1}}'
    event = '{"v":1,"type":"run","rank":0,"step":0,"pid":1,"host":"a"'
    file = tmp_path / "run.jsonl"
    file.write_text(f'{event},"process":{process},"stacks":{address}}}\n')
    assert main(["monitor", "--stacks", str(file)]) == 1
    assert expected in capsys.readouterr().out


def test_a_file_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text("")
    assert main(["monitor", "--stacks", str(tmp_path / "run.jsonl")]) == 2
    assert "has no run event yet" in capsys.readouterr().err
    assert main(["monitor", "--stacks", "a", "b"]) == 2
    assert "--stacks takes one file" in capsys.readouterr().err


def test_files_of_ranks(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.rank10.jsonl", "a.rank2.jsonl", "a.rankx.jsonl", "ab.rank1.jsonl"):
        (tmp_path / name).touch()
    names = [one.name for one in stacks.files_of_ranks(tmp_path / "a.jsonl")]
    assert names == ["a.jsonl", "a.rank2.jsonl", "a.rank10.jsonl"]


def test_a_signal_in_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_SIGNAL", signal.SIGUSR2)
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        assert stacks._register(-1) is None
    finally:
        signal.signal(signal.SIGUSR2, before)
        stacks._register.cache_clear()


# ---- The rule, by a clock of the test.


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hangs, "time", clock)
    return clock


def standing(phase: str, since_s: float, longest_s: float = 0.0) -> Any:
    return SimpleNamespace(phase=number_of(phase), since_ns=int(since_s * 1e9), longest_ns=int(longest_s * 1e9))


def watch(limit_s: float = hangs.LIMIT_S, in_step: bool = True) -> HangWatch:
    return HangWatch(0, threading.get_ident(), limit_s, is_in_step=lambda: in_step)


def place(step: int, phase: str, quiet_s: float, beat: int = 1) -> RankProgress:
    return {"beat": beat, "step": step, "phase": phase, "where": f"a.py:{step} in f", "quiet_s": quiet_s}


def test_a_phase_is_reported_at_the_limit_and_then_when_the_wait_has_doubled(clock: Clock) -> None:
    one, begin = watch(), clock.now_s
    reported = []
    for second in range(1, 90):
        clock.now_s = begin + second
        one.look(standing("forward", begin), 7)
        if (hang := one.report({})) is not None:
            reported.append(second)
            assert (hang.rank, hang.phase) == (0, "forward")
            assert "in step 7, in the phase 'forward and loss' at monitor/test_hangs.py:" in hang.text
    assert reported == [20, 40, 80]


def test_a_phase_that_was_long_before_gets_three_times_that(clock: Clock) -> None:
    one, begin = watch(), clock.now_s
    clock.now_s = begin + 29
    one.look(standing("checkpoint", begin, longest_s=10.0), 7)
    assert one.report({}) is None
    clock.now_s = begin + 31
    one.look(standing("checkpoint", begin, longest_s=10.0), 7)
    assert one.report({}) is not None


@pytest.mark.parametrize(("phase", "in_step"), [("host", False), ("forward", True)])
def test_nothing_is_reported_between_steps_and_before_the_first(clock: Clock, phase: str, in_step: bool) -> None:
    one, begin = watch(in_step=in_step), clock.now_s
    clock.now_s = begin + 1000
    one.look(standing(phase, begin if phase == "host" else 0.0), 7)
    assert one.report({}) is None


def test_a_limit_of_0_reports_nothing(clock: Clock) -> None:
    one, begin = watch(0.0), clock.now_s
    clock.now_s = begin + 1000
    one.look(standing("forward", begin), 7)
    assert not one.wants_others
    assert one.report({}) is None


@pytest.mark.parametrize(
    ("others", "culprit"),
    [
        ({1: place(12, "communication", 21.0), 2: place(12, "data", 20.0)}, 2),
        ({1: place(12, "host", 0.0), 2: place(11, "optimizer", 21.0)}, 2),  # the one that is behind
        ({1: place(12, "communication", 21.0), 2: place(12, "communication", 21.0)}, 0),  # no rank is to blame
        ({}, 0),
    ],
)
def test_who_is_waited_for(clock: Clock, others: dict[int, RankProgress], culprit: int) -> None:
    one, begin = watch(), clock.now_s
    clock.now_s = begin + 21
    one.look(standing("communication", begin), 12)
    one.hear(others)
    hang = one.report(others)
    assert hang is not None
    assert hang.rank == culprit
    assert (f"it waits for rank {culprit}" in hang.text) == (culprit != 0)


def test_a_rank_that_says_nothing_is_named(clock: Clock) -> None:
    """A stopped process publishes no place, and its last one says that it waited, too."""
    one, begin = watch(), clock.now_s
    for second in range(10, 21):
        clock.now_s = begin + second
        one.look(standing("communication", begin), 12)
        assert one.wants_others
        others = {1: place(12, "communication", 0.1), 2: place(12, "communication", second, beat=second)}
        one.hear(others)
        hang = one.report(others)
    assert hang is not None
    assert hang.rank == 1
    assert "it waits for rank 1, not heard of for 10 s, last seen in step 12" in hang.text


def test_the_trace_tells_the_innermost_phase() -> None:
    reader = _C.TraceReader(sees_forwards=True)
    try:
        assert reader.standing().since_ns == 0
        _C.trace_step(0)
        _C.trace_begin(number_of("backward"))
        _C.trace_begin(number_of("communication"))
        time.sleep(0.01)
        _C.trace_end(number_of("communication"))
        _C.trace_begin(number_of("communication"))
        reader.read()
        found = reader.standing()
        assert found.phase == number_of("communication")
        assert found.longest_ns >= 10_000_000
        assert 0 < found.since_ns <= time.monotonic_ns()
        _C.trace_end(number_of("communication"))
        _C.trace_end(number_of("backward"))
        reader.read()
        assert reader.standing().phase == number_of("host")
    finally:
        reader.stop()


def test_the_limit_is_checked() -> None:
    with pytest.raises(ValueError, match=r"report_hang_after is -1, expected seconds >= 0"):
        Monitor(report_hang_after=-1)
