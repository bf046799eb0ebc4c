"""Tests when checkpoints are due."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from drivetrain.checkpointing.preemption.interval import Interval


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
    assert Interval.of(every) == Interval(steps, seconds)


@pytest.mark.parametrize(
    "every", ["", "soon", "5", "0 steps", "1.5 steps", 0, -3, True, "0s", "5 parsecs", datetime.timedelta(0)]
)
def test_other_forms_are_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="every is"):
        Interval.of(every)


def test_due() -> None:
    by_steps, by_time, never = (Interval.of(every) for every in (3, "10s", None))
    assert [by_steps.is_due(steps, 1e9) for steps in (2, 3, 4)] == [False, True, True]
    assert [by_time.is_due(10**9, seconds) for seconds in (9.9, 10.0)] == [False, True]
    assert not never.is_due(10**9, 1e9)
