"""Tests that a rank that stands still reports its phase, file and line, and that a signal prints stacks."""

from __future__ import annotations

import ctypes
import faulthandler
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
from drivetrain.monitor import Monitor, hangs
from drivetrain.monitor.hangs import Hang, HangWatch
from drivetrain.phases import number_of
from polling import wait_until

WAIT_S = 60


# ---- Real ranks.


def stuck_loader_on_rank_1(flag: Path) -> tuple[Hang, list[dict[str, Any]]]:
    """Rank 1's loader stands still until both ranks have reported themselves: rank 0's backward pass waits."""
    model = drivetrain.DistributedDataParallel(make_model(), report_hang_after=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, rank = Kept(), dist.get_rank()
    monitor = Monitor(model, optimizer, to=[kept], progress=False, report_hang_after=1.0)

    def late_batches() -> Iterator[Any]:
        yield from make_batches(3)
        if rank == 1:
            told = lambda: flag.exists() and monitor.hang is not None  # noqa: E731
            wait_until(told, "reports", WAIT_S)  # the line that must be named
        yield from make_batches(3)

    def tell() -> None:
        wait_until(lambda: monitor.hang is not None, "report", WAIT_S)
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


def test_standing_ranks_report_their_phase_and_line(on_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (waits, events), (stuck, _) = on_ranks(stuck_loader_on_rank_1, tmp_path / "flag")
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "the line that must be named" in text and "wait_until" in text
    )
    assert waits.phase == "communication"
    assert "monitor/test_hangs.py" in waits.where
    assert re.match(r"rank 0 has stood still for \d+ s in step 4, in the phase 'exposed communication' at ", waits.text)
    # The helper has the innermost line, and the line that called it is in the stack.
    assert stuck.phase == "data"
    assert re.search(r"in the phase 'waiting for data' at \S*(polling|test_hangs)\.py:", stuck.text)
    assert "; rank 1 is in the phase 'waiting for data' at " in waits.text
    assert "; rank 0 is in the phase 'exposed communication' at " in stuck.text
    assert f"line {line}, in late_batches" in stuck.stack
    assert {"step", "rank", "phase", "where", "seconds", "text", "stack"} <= set(events[-1])


def ask_for_stacks(folder: Path) -> str:
    """Rank 1 holds Python's lock inside of a C function, and rank 0 asks for its stacks, which go to its stderr."""
    model, rank, flag, printed = make_model(), dist.get_rank(), folder / "held", folder / "stderr"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hold_the_lock() -> None:
        before = os.dup(2)
        with printed.open("w") as file:
            os.dup2(file.fileno(), 2)
        signal.alarm(WAIT_S)  # ends the process if no request comes
        (folder / "draft").write_text(str(os.getpid()))
        (folder / "draft").rename(flag)
        ctypes.PyDLL(None).pause()  # returns after the handler of a signal
        signal.alarm(0)
        os.dup2(before, 2)
        os.close(before)

    with Monitor(model, optimizer, progress=False) as monitor:
        for inputs, targets in monitor(make_batches(1)):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if rank == 1:
                hold_the_lock()
            else:
                wait_until(flag.exists, "held lock", WAIT_S)
                time.sleep(0.05)
                os.kill(int(flag.read_text()), hangs.STACKS_SIGNAL)
    return printed.read_text() if rank == 1 else ""


def test_a_signal_prints_the_stacks_also_while_a_call_holds_pythons_lock(
    on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    _, text = on_ranks(ask_for_stacks, tmp_path)
    assert "in hold_the_lock" in text
    assert "in ask_for_stacks" in text


def test_a_signal_in_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "STACKS_SIGNAL", signal.SIGUSR2)
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        hangs.print_stacks_on_request()
        assert not faulthandler.unregister(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


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


def watch(limit_s: float | None = 20.0, in_step: bool = True) -> HangWatch:
    return HangWatch(0, threading.get_ident(), limit_s, is_in_step=lambda: in_step)


def test_a_phase_is_reported_at_the_limit_and_then_when_the_wait_has_doubled(clock: Clock) -> None:
    one, begin = watch(), clock.now_s
    reported = []
    for second in range(1, 90):
        clock.now_s = begin + second
        if (hang := one.report(standing("forward", begin), 7)) is not None:
            reported.append(second)
            assert hang.phase == "forward"
            assert "in step 7, in the phase 'forward and loss' at monitor/test_hangs.py:" in hang.text
    assert reported == [20, 40, 80]


def test_a_phase_gets_longer_until_it_has_ended_once(clock: Clock) -> None:
    first, later, begin = watch(None), watch(None), clock.now_s
    clock.now_s = begin + 19
    assert first.report(standing("forward", begin), 1) is None
    assert later.report(standing("forward", begin, longest_s=0.1), 7) is not None
    clock.now_s = begin + 20
    assert first.report(standing("forward", begin), 1) is not None


def test_a_phase_that_was_long_before_gets_three_times_that(clock: Clock) -> None:
    one, begin = watch(), clock.now_s
    clock.now_s = begin + 29
    assert one.report(standing("checkpoint", begin, longest_s=10.0), 7) is None
    clock.now_s = begin + 31
    assert one.report(standing("checkpoint", begin, longest_s=10.0), 7) is not None


@pytest.mark.parametrize(("phase", "in_step"), [("host", False), ("forward", True)])
def test_nothing_is_reported_between_steps_and_before_the_first(clock: Clock, phase: str, in_step: bool) -> None:
    one, begin = watch(in_step=in_step), clock.now_s
    clock.now_s = begin + 1000
    assert one.report(standing(phase, begin if phase == "host" else 0.0), 7) is None


def test_a_limit_of_0_reports_nothing(clock: Clock) -> None:
    one, begin = watch(0.0), clock.now_s
    clock.now_s = begin + 1000
    assert one.report(standing("forward", begin), 7) is None


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
