"""Tests when checkpoints are due, and Young and Daly's formula against a search for the best interval."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest

from drivetrain.checkpointing.preemption.interval import Interval, daly_interval


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
