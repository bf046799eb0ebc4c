"""Defines the result of one check of `drivetrain doctor`: its status, its text, and the cure if it failed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["OK", "--", "WRONG"]


@dataclass(frozen=True)
class Finding:
    """Holds the result of one check.

    Attributes:
        name: The part of the installation that was checked.
        status: "OK", "WRONG", or "--" if the check does not apply here.
        text: The observed facts, or the reason why the check does not apply.
        cure: The remedy of a failed check; otherwise empty.
    """

    name: str
    status: Status
    text: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f"; cure: {self.cure}" if self.cure else ""
        return f"{self.status:<6}{self.name:<14}{self.text}{cure}"

    def as_dict(self) -> dict[str, str]:
        """Returns the finding as an object for `--json`."""
        return asdict(self)


def ok(name: str, text: str) -> Finding:
    """Returns a finding for a check that passed."""
    return Finding(name, "OK", text)


def not_applicable(name: str, why: str) -> Finding:
    """Returns a finding for a check that does not apply here."""
    return Finding(name, "--", why)


def wrong(name: str, text: str, cure: str) -> Finding:
    """Returns a finding for a check that failed, with its remedy."""
    return Finding(name, "WRONG", text, cure)
