"""Encodes the manifest of a checkpoint and the part record of each rank as JSON with a checksum."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ..._C import crc32c
from .errors import CheckpointError

JSON: TypeAlias = "None | bool | int | float | str | list[JSON] | dict[str, JSON]"

VERSION = 1
_SEAL = re.compile(rb',\n"crc32c":"([0-9a-f]{8})"}\n')
_SEAL_BYTES = len(',\n"crc32c":"01234567"}\n')

T = TypeVar("T", "Record", "Manifest")


@dataclass(frozen=True)
class Record:
    """The record of one rank: its file with the checksum of each chunk, and its state."""

    step: int
    rank: int
    world_size: int
    file: str
    file_bytes: int
    header_bytes: int
    header_crc32c: str  # of the file's first `header_bytes`
    chunk_bytes: int
    chunks: list[str]  # CRC32C of each chunk, eight hexadecimal digits
    state: JSON


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank, and the checksum of its record."""

    record: str
    record_bytes: int
    record_crc32c: str
    file: str
    file_bytes: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint whose files are all durable."""

    serial: int  # grows with every checkpoint of a directory, also when a run goes back to an earlier step
    step: int
    world_size: int
    created: float  # seconds since the epoch
    parts: list[RankFiles]


def hexadecimal(checksum: int) -> str:
    """Spells a checksum as eight hexadecimal digits."""
    return f"{checksum:08x}"


def seal(body: Record | Manifest) -> bytes:
    """Encodes a record or manifest, followed by the CRC32C of all bytes before the checksum."""
    fields = dict(vars(body))
    if isinstance(body, Manifest):
        fields["parts"] = [vars(part) for part in body.parts]
    head = {"drivetrain": type(body).__name__.lower(), "version": VERSION}
    data = json.dumps(head | fields, separators=(",", ":"))[:-1].encode()
    return data + f',\n"crc32c":"{hexadecimal(crc32c(data))}"}}\n'.encode()


def unseal(data: bytes, kind: type[T]) -> T:
    """Decodes a record or manifest, and compares its checksum.

    Raises:
        ValueError: The checksum does not hold, or the bytes are of another kind.
        CheckpointError: A newer version wrote the bytes.
    """
    body, end = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    sealed = _SEAL.fullmatch(end)
    if sealed is None:
        raise ValueError("it does not end with a checksum: it was cut off or changed")
    found = hexadecimal(crc32c(body))
    if found.encode() != sealed[1]:
        raise ValueError(f"its CRC32C is {found}, expected {sealed[1].decode()}: its bytes have changed")
    fields: dict[str, Any] = json.loads(body + b"}")
    name, version = fields.pop("drivetrain", None), fields.pop("version", 0)
    if name != kind.__name__.lower():
        raise ValueError(f"it is a {name!r}, expected a {kind.__name__.lower()!r}")
    if version > VERSION:
        raise CheckpointError(f"a {name} has format version {version}, expected at most {VERSION}: update drivetrain")
    try:
        if "parts" in fields:
            fields["parts"] = [RankFiles(**part) for part in fields["parts"]]
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"it has other fields than a {name}: {error}") from error


def copy_json(value: object, where: str = "state") -> JSON:
    """Returns a copy of a value of which JSON gives back every member unchanged."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}, expected a str")
        return {key: copy_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list):
        return [copy_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[return-value]
    raise TypeError(
        f"{where} is a {type(value).__name__}, expected None, a bool, int, float, str, list or dict of these"
    )
