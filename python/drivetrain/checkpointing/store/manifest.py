"""Encodes the manifest of a checkpoint and the part record of each rank as JSON with a checksum."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..._C import crc32c
from .errors import CheckpointError

if TYPE_CHECKING:
    from .encryption import FileCipher

JSON: TypeAlias = "None | bool | int | float | str | list[JSON] | dict[str, JSON]"

VERSION = 2  # 1 knows no encryption, and files without it are still of version 1
_SEAL = re.compile(rb',\n"crc32c":"([0-9a-f]{8})"}\n')
_SEAL_BYTES = len(',\n"crc32c":"01234567"}\n')
_SECRET = b',\n"secret":"'  # JSON writes no line ends elsewhere

T = TypeVar("T", "Record", "Manifest")


@dataclass(frozen=True)
class Protection:
    """Says how a record, with its tensor file, or a manifest is encrypted."""

    cipher: str
    key_id: str
    salt: str  # hexadecimal digits, drawn for each record and manifest


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
    state: JSON  # None if encrypted
    checkpoint: str = ""  # identifies the checkpoint of an encrypted record
    tags: list[str] = field(default_factory=list)  # of the encrypted chunks, in hexadecimal digits
    protection: Protection | None = None


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
    checkpoint: str = ""
    protection: Protection | None = None
    run: str = ""  # the identity of the run, and the directory that it was started with
    home: str = ""


def hexadecimal(checksum: int) -> str:
    """Spells a checksum as eight hexadecimal digits."""
    return f"{checksum:08x}"


def seal(body: Record | Manifest, cipher: FileCipher | None = None, secret: bytes = b"") -> bytes:
    """Encodes a record or manifest, followed by the CRC32C of all bytes before the checksum.

    The cipher, None for plain checkpoints, encrypts `secret` and authenticates all of `body`.
    """
    fields = dict(vars(body))
    if isinstance(body, Manifest):
        fields["parts"] = [vars(part) for part in body.parts]
    if body.protection is not None:
        fields["protection"] = vars(body.protection)
    for name in ("checkpoint", "tags", "protection") if cipher is None else ():
        fields.pop(name, None)
    for name in ("run", "home"):
        if not fields.get(name):
            fields.pop(name, None)
    head = {"drivetrain": type(body).__name__.lower(), "version": 1 if cipher is None else VERSION}
    data = json.dumps(head | fields, separators=(",", ":"))[:-1].encode()
    if cipher is not None:
        data += _SECRET + base64.b64encode(cipher.seal_text(secret, data)) + b'"'
    return data + f',\n"crc32c":"{hexadecimal(crc32c(data))}"}}\n'.encode()


def unseal(data: bytes, kind: type[T]) -> T:
    """Decodes the part of a record or manifest that is not encrypted, and compares the checksum of all of it.

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
    fields.pop("secret", None)
    try:
        if "parts" in fields:
            fields["parts"] = [RankFiles(**part) for part in fields["parts"]]
        if "protection" in fields:
            fields["protection"] = Protection(**fields["protection"])
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"it has other fields than a {name}: {error}") from error


def reveal(data: bytes, cipher: FileCipher) -> bytes:
    """Decrypts the secret in what `seal` wrote. Raises ValueError unless the cipher authenticates all bytes."""
    visible, _, encoded = data[:-_SEAL_BYTES].rpartition(_SECRET)
    return cipher.unseal_text(base64.b64decode(encoded[:-1]), visible)


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
