"""Builds sinks from the strings of `Monitor(to=[...])`, and writes the event stream to files."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..stream import Event, Sink

_KINDS = "jsonl:FILE, tensorboard:FOLDER, prometheus:PORT, prometheus:HOST:PORT"


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


def make_sinks(to: Sequence[str | Sink], rank: int) -> list[Sink]:
    """Builds the sinks of this rank.

    Every rank writes its own JSONL, rank N > 0 to FILE with ".rankN" before its suffix, and serves its own metrics.
    TensorBoard gets rank 0's events alone. `Sink` objects are used as they are, by every rank.

    Raises:
        TypeError: `to` is no list, or an element is no string and no `Sink`.
        ValueError: A string names no known sink, or its argument is wrong.
        ImportError: A sink's package is missing.
        OSError: A port is taken.
    """
    if isinstance(to, str):
        raise TypeError(f"to is the string {to!r}, expected a list of strings: to=[{to!r}]")
    if not isinstance(to, Iterable):
        raise TypeError(f"to is {to!r}, expected a list of strings and sinks")
    return [sink for one in to if (sink := _make(one, rank)) is not None]


def _make(to: str | Sink, rank: int) -> Sink | None:
    if isinstance(to, Sink):
        return to
    if not isinstance(to, str):
        raise TypeError(f"to has a {type(to).__name__}, expected strings such as 'jsonl:run.jsonl', or sinks")
    kind, _, target = to.partition(":")
    if target and kind == "jsonl":
        path = Path(target)
        return JSONL(path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))
    if target and kind == "prometheus":
        from .prometheus import Prometheus

        host, _, port = target.rpartition(":")
        if not port.isdecimal():
            raise ValueError(f"to has {to!r}, expected prometheus:PORT or prometheus:HOST:PORT with a number as port")
        return Prometheus(int(port), host or "127.0.0.1")
    if target and kind == "tensorboard":
        from .tensorboard import TensorBoard

        return TensorBoard(target) if rank == 0 else None
    raise ValueError(f"to has {to!r}, expected one of {_KINDS}")


__all__ = ["JSONL", "make_sinks"]
