"""Writes the event stream as lines of JSON, the ground truth of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ..stream import Event, Sink


class JSONL(Sink):
    """Writes one event per line and leaves only whole lines in the file, also where a write fails half-way.

    Args:
        path: The file; an existing one is replaced. A pipe is allowed.
    """

    batch_size = 64

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
        for error in self.write_all([event]):
            raise error

    def write_all(self, events: Sequence[Event]) -> list[Exception]:
        """Writes a line per event, by one call of the system where it takes them all.

        Returns:
            An error per line that could not be written; the file ends with the last whole line.
        """
        assert self._file is not None
        lines = [self._encode(event).encode() + b"\n" for event in events]
        text, done = b"".join(lines), 0
        try:
            while done < len(text):
                done += os.write(self._file, text[done:])
        except OSError as error:
            num_whole = text.count(b"\n", 0, done)
            self._end += sum(map(len, lines[:num_whole]))
            if self._is_regular:
                os.ftruncate(self._file, self._end)
                os.lseek(self._file, self._end, os.SEEK_SET)
            return [error] * (len(lines) - num_whole)
        self._end += done
        return []

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
