"""Collects the findings of a check and writes them as JSON after each item."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """One item of a check.

    Attributes:
        what: The property that was checked.
        holds: True or False; None if this machine cannot check it.
        seen: The observed values.
    """

    what: str
    holds: bool | None
    seen: str = ""


class Findings:
    """Holds the findings of one check. `file` contains valid JSON at any time after the first finding."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.all: list[Finding] = []

    def add(self, finding: Finding) -> None:
        self.all.append(finding)
        word = {True: "holds", False: "FAILS", None: "not possible here"}[finding.holds]
        print(f"{word}: {finding.what}{': ' if finding.seen else ''}{finding.seen}", flush=True)
        if self._file is not None:
            part = self._file.with_name(self._file.name + ".part")
            part.write_text(json.dumps([asdict(each) for each in self.all]))
            part.replace(self._file)

    @property
    def exit_code(self) -> int:
        return int(any(finding.holds is False for finding in self.all))
