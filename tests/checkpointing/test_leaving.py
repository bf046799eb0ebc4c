"""Tests that all Checkpointers of a process leave after one pass of the loop, and what stderr says then."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain.checkpointing import Checkpointer
from drivetrain.checkpointing.preemption import agreement
from drivetrain.checkpointing.preemption.agreement import named_wait
from polling import wait_until
from resumed_training import newest


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
