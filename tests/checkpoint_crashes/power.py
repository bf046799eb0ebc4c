"""Simulates the worst file system that POSIX allows: after a power cut, only what was synced is certain.

A trace of system calls (disk_shim.c) is replayed in memory up to a random call. Then each change that was not synced
survives or not, independently of the others. A change is a block of a file, its size, or a change of a folder. Blocks
that are lost read as zeros or as old bytes of another file.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

BLOCK = 4096


class Call(NamedTuple):
    """One recorded system call, or a mark of the program."""

    kind: str
    path: str = ""
    to: str = ""
    number: int = 0  # offset, size or the mark's value
    data: bytes = b""


def read_trace(path: Path) -> list[Call]:
    """Parses the file that the shim wrote."""
    calls, trace, at = [], path.read_bytes(), 0

    def line() -> str:
        nonlocal at
        end = trace.index(b"\n", at)
        text, at = trace[at:end].decode(), end + 1
        return text

    while at < len(trace):
        kind, _, rest = line().partition(" ")
        if kind == "write":
            offset, size, name = rest.split(" ", 2)
            calls.append(Call(kind, name, number=int(offset), data=trace[at : at + int(size)]))
            at += int(size)
        elif kind == "truncate":
            size, name = rest.split(" ", 1)
            calls.append(Call(kind, name, number=int(size)))
        elif kind in ("rename", "exchange"):
            calls.append(Call(kind, rest, to=line()))
        elif kind == "mark":
            calls.append(Call(kind, number=int(rest)))
        else:
            assert kind in ("create", "fsync", "mkdir", "unlink", "rmdir"), kind
            calls.append(Call(kind, rest))
    return calls


@dataclass
class File:
    """A file's durable bytes, and the changes since its last fsync."""

    durable: bytes = b""
    pending: list[Call] = field(default_factory=list)

    def sync(self) -> None:
        self.durable = self.after(lambda: True, lambda size: bytes(size))
        self.pending = []

    def after(self, survives: Callable[[], bool], lost: Callable[[int], bytes]) -> bytes:
        """Returns the contents if each change survives or not; `lost` makes the bytes that were never written."""
        data = bytearray(self.durable)

        def resize(size: int) -> None:
            if size > len(data):
                data.extend(lost(size - len(data)))
            else:
                del data[size:]

        for call in self.pending:
            if call.kind == "truncate":
                if survives():
                    resize(call.number)
                continue
            at = 0
            while at < len(call.data):
                count = BLOCK - (call.number + at) % BLOCK
                piece = call.data[at : at + count]
                if survives():
                    begin = call.number + at
                    if begin + len(piece) > len(data):
                        resize(begin + len(piece))
                    data[begin : begin + len(piece)] = piece
                at += count
        return bytes(data)


Change = dict[str, "File | Folder | None"]  # entries that come, or go


@dataclass
class Folder:
    """A folder's entries: those that a process sees, those that are durable, and the changes between them."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        _apply(change, self.entries)
        self.pending.append(change)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending = []

    def after(self, survives: Callable[[], bool]) -> dict[str, File | Folder]:
        """Returns the entries if each change survives or not."""
        found = dict(self.durable)
        for change in self.pending:
            if survives():
                _apply(change, found)
        return found


def _apply(change: Change, entries: dict[str, File | Folder]) -> None:
    for name, node in change.items():
        entries.pop(name, None)
        if node is not None:
            entries[name] = node


class Disk:
    """Replays calls below `root`, which exists and is empty at first."""

    def __init__(self, root: str) -> None:
        self._root_path = root
        self._root = Folder()

    def replay(self, call: Call) -> None:
        if call.kind == "mark":
            return
        folder, name = self._parent(call.path)
        if call.kind == "create":
            folder.change({name: File()})
        elif call.kind == "mkdir":
            folder.change({name: Folder()})
        elif call.kind in ("unlink", "rmdir"):
            folder.change({name: None})
        elif call.kind in ("rename", "exchange"):
            other, to = self._parent(call.to)
            assert other is folder, "the simulation moves entries within a folder only"
            node = folder.entries[name]
            if call.kind == "rename":
                assert to not in folder.entries, "a rename replaces nothing here"
                folder.change({name: None, to: node})
            else:
                folder.change({to: node, name: folder.entries[to]})
        else:
            node = folder.entries[name] if name else folder
            if call.kind == "fsync":
                node.sync()
            else:
                assert isinstance(node, File)
                node.pending.append(call)

    def write_state(self, target: Path, draw: random.Random) -> None:
        """Writes one of the states that the disk may have after a power cut now into an empty folder."""
        share = draw.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        has_old_bytes = draw.random() < 0.5

        def survives() -> bool:
            return draw.random() < share

        def lost(size: int) -> bytes:
            return draw.randbytes(size) if has_old_bytes else bytes(size)

        def write(node: Folder, path: Path) -> None:
            path.mkdir(exist_ok=True)
            for name, entry in node.after(survives).items():
                if isinstance(entry, Folder):
                    write(entry, path / name)
                else:
                    (path / name).write_bytes(entry.after(survives, lost))

        write(self._root, target)

    def _parent(self, path: str) -> tuple[Folder, str]:
        assert path.startswith(self._root_path)
        parts = path[len(self._root_path) :].strip("/").split("/")
        folder = self._root
        for part in parts[:-1]:
            found = folder.entries[part]
            assert isinstance(found, Folder)
            folder = found
        return folder, parts[-1]
