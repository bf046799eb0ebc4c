"""Defines the result of one check of `drivetrain doctor`: its status, its text, and the remedy if it failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["PASS", "--", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """Holds the result of one check.

    Attributes:
        name: The part of the installation that was checked.
        status: "PASS"; "FAIL" if training will not work; "WARN" if it may not, or not at full speed; "--" if the check
            does not apply here.
        text: The observed facts, or the reason why the check does not apply.
        cure: The remedy after "FAIL" and "WARN"; otherwise empty.
    """

    name: str
    status: Status
    text: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f"; cure: {self.cure}" if self.cure else ""
        return f"{self.status:<6}{self.name:<14}{self.text}{cure}"


def passed(name: str, text: str) -> Finding:
    """Returns a finding for a check that passed."""
    return Finding(name, "PASS", text)


def not_applicable(name: str, why: str) -> Finding:
    """Returns a finding for a check that does not apply here."""
    return Finding(name, "--", why)


def warn(name: str, text: str, cure: str) -> Finding:
    """Returns a finding for something that may fail later or that costs speed, with its remedy."""
    return Finding(name, "WARN", text, cure)


def fail(name: str, text: str, cure: str) -> Finding:
    """Returns a finding for a check that failed, with its remedy."""
    return Finding(name, "FAIL", text, cure)
