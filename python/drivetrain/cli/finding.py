"""Defines the result of one check of `drivetrain doctor`: its status, its text, and the remedy if it failed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

Status = Literal["PASS", "--", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """Holds the result of one check.

    Attributes:
        status: "PASS"; "FAIL" if training will not work; "WARN" if it may not, or not at full speed; "--" if the check
            does not apply here.
        name: The part of the installation that was checked.
        text: The observed facts, or the reason why the check does not apply.
        cure: The remedy after "FAIL" and "WARN"; otherwise empty.
    """

    status: Status
    name: str
    text: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f"; cure: {self.cure}" if self.cure else ""
        return f"{self.status:<6}{self.name:<14}{self.text}{cure}"


passed, not_applicable = partial(Finding, "PASS"), partial(Finding, "--")
warn, fail = partial(Finding, "WARN"), partial(Finding, "FAIL")
