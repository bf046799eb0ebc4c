"""Builds sinks from the strings of `Monitor(to=[...])`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..stream import Sink
from .jsonl import JSONL

_KINDS = "jsonl:FILE, tensorboard:FOLDER, prometheus:PORT, prometheus:HOST:PORT"


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
