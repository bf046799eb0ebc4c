"""One line of the doctor's: what was looked at, whether it is well, and the cure if not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["OK", "--", "WRONG"]


@dataclass(frozen=True)
class Finding:
    """`--` means that the check does not apply here; the text says why."""

    name: str
    status: Status
    text: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f"; cure: {self.cure}" if self.cure else ""
        return f"{self.status:<6}{self.name:<14}{self.text}{cure}"

    def as_dict(self) -> dict[str, str]:
        """The line for `--json`."""
        return asdict(self)


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name, "OK", text)


def not_applicable(name: str, why: str) -> Finding:
    """Nothing to check here."""
    return Finding(name, "--", why)


def wrong(name: str, text: str, cure: str) -> Finding:
    """Broken, and what to do about it."""
    return Finding(name, "WRONG", text, cure)
