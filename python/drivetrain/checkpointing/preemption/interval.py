"""Decides when a checkpoint is due: after a number of steps or after a time."""

import datetime
import math
import re
from dataclasses import dataclass

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_STEPS = ("step", "steps")


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


@dataclass
class Interval:
    """The time or the number of steps between checkpoints.

    Attributes:
        steps: Number of steps, or None if time decides.
        seconds: Seconds, or None if steps decide.
    """

    steps: int | None
    seconds: float | None

    @staticmethod
    def of(every: str | int | datetime.timedelta | None) -> "Interval":
        """Reads the argument `every` of Checkpointer."""
        if every is None:
            return Interval(None, None)
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


def _number_and_unit(text: str, name: str) -> tuple[float, str]:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    if found is None:
        raise ValueError(f"{name} is {text!r}, expected for example '5min', '100 steps' or a number of steps")
    return float(found[1]), found[2]
