"""Decides when a checkpoint is due: after a number of steps, after a time, or as Young and Daly's formula says."""

import datetime
import math
import re
from dataclasses import dataclass

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_STEPS = ("step", "steps")
_FIRST_AUTO_SECONDS = 60.0  # The first save under "auto" measures the cost.


def seconds_of(text: str | float | datetime.timedelta, name: str) -> float:
    """Returns the seconds of "5min", "30 s", "2h", "1d", a timedelta or a number. Errors name the argument `name`."""
    if isinstance(text, datetime.timedelta):
        seconds = text.total_seconds()
    elif isinstance(text, str):
        number, unit = _number_and_unit(text, name)
        if unit not in _UNITS:
            raise ValueError(f"{name} is {text!r}, expected a duration such as '30s', '5min', '2h' or '1d'")
        seconds = number * _UNITS[unit]
    else:
        seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name} is {text!r}, expected a finite duration above 0")
    return seconds


def daly_interval(cost: float, mtbf: float) -> float:
    """Returns the time between checkpoints, in seconds, that loses the least time in expectation.

    The formula is equation 37 of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps" (Future Generation Computer Systems 22, 2006). With cost C and mean time between failures M it is
    sqrt(2CM) * (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C for C < 2M, else M. Its first factor is J. W. Young's formula
    (Communications of the ACM 17, 1974).

    Args:
        cost: Seconds that a save takes away from training, 0 or more.
        mtbf: Mean seconds between failures, above 0.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


@dataclass
class Interval:
    """The time or the number of steps between checkpoints.

    Attributes:
        steps: Number of steps, or None if time decides.
        seconds: Seconds, or None if steps decide.
        mtbf: Mean seconds between failures if the interval follows the measured cost, else None.
    """

    steps: int | None
    seconds: float | None
    mtbf: float | None = None

    @staticmethod
    def of(every: str | int | datetime.timedelta | None, mtbf: str | float | datetime.timedelta) -> "Interval":
        """Reads the arguments `every` and `mtbf` of Checkpointer."""
        failures = seconds_of(mtbf, "mtbf")
        if every is None:
            return Interval(None, None)
        if every == "auto":
            return Interval(None, _FIRST_AUTO_SECONDS, failures)
        steps: float | None = every if isinstance(every, int) else None
        if isinstance(every, str):
            number, unit = _number_and_unit(every, "every")
            steps = number if unit in _STEPS else None
        if steps is None:
            return Interval(None, seconds_of(every, "every"))
        if isinstance(every, bool) or steps < 1 or steps != int(steps):
            raise ValueError(f"every is {every!r}, expected a whole number of steps, 1 or more")
        return Interval(int(steps), None)

    def is_due(self, steps: int, seconds: float) -> bool:
        """Returns whether a save is due, `steps` steps and `seconds` seconds after the last one began."""
        if self.steps is not None:
            return steps >= self.steps
        return self.seconds is not None and seconds >= self.seconds

    def is_near(self, steps: int, seconds: float) -> bool:
        """Returns whether a save is due soon: after 0.9 of the interval, and in the step before it."""
        return self.is_due(math.ceil((steps + 1) / 0.9), seconds / 0.9)

    def measured(self, stall: float, duration: float) -> None:
        """Adapts an automatic interval to a save that held up training and took so many seconds in all.

        Saves do not overlap, so the interval is never below the duration.
        """
        if self.mtbf is not None:
            self.seconds = max(daly_interval(stall, self.mtbf), duration, 1.0)


def _number_and_unit(text: str, name: str) -> tuple[float, str]:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    if found is None:
        raise ValueError(f"{name} is {text!r}, expected for example '5min', '100 steps', 'auto' or a number of steps")
    return float(found[1]), found[2]
