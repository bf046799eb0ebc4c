"""Writes the event stream as lines of JSON, the ground truth of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..stream import Event, Sink


class JSONL(Sink):
    """Writes one event per line and leaves only whole lines in the file, also where a write fails half-way.

    Args:
        path: The file; an existing one is replaced. A pipe is allowed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = f"jsonl:{self.path}"
        self._encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
        self._file: int | None = None
        self._is_regular = True
        self._end = 0  # of the last whole line

    def open(self) -> None:
        """Creates the file and its folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._is_regular = self.path.is_file()

    def write(self, event: Event) -> None:
        """Writes one line.

        Raises:
            OSError: The line cannot be written; the file ends with the line before it.
        """
        assert self._file is not None
        line, done = self._encode(event).encode() + b"\n", 0
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        except OSError:
            if self._is_regular:
                os.ftruncate(self._file, self._end)
                os.lseek(self._file, self._end, os.SEEK_SET)
            raise
        self._end += done

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
