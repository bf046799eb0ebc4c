"""Names the files of a checkpoint, and encodes the headers of its safetensors files.

The format is documented at https://github.com/huggingface/safetensors: eight bytes with the length of the header,
the header in JSON, and the tensors without gaps.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MANIFEST = "manifest.json"
LOCK = ".lock"
CHUNK_BYTES = 4 << 20  # each chunk of a file has its own checksum
BLOCK_BYTES = 4096  # O_DIRECT needs sizes and offsets of whole blocks
DTYPE_NOTES = "drivetrain.dtypes"  # a key of the header's __metadata__

_STEP = re.compile(r"step-(\d{10,})")
LEFTOVER = re.compile(r"\.(?:tmp|trash)-step-\d{10,}-[0-9a-f]{8}")
PART = re.compile(r"rank-\d{5,}-of-\d{5,}\.(?:safetensors|json)")

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
# safetensors has no code for these, or only some of its releases do. They are stored as real parts or as bytes in a
# last dimension, and a note in the header names the dtype.
_STORED_AS = {
    torch.complex128: (torch.float64, 2),
    torch.complex32: (torch.float16, 2),
    torch.float8_e4m3fnuz: (torch.uint8, 1),
    torch.float8_e5m2fnuz: (torch.uint8, 1),
    torch.float8_e8m0fnu: (torch.uint8, 1),
    torch.float4_e2m1fn_x2: (torch.uint8, 1),
}
_NOTED = {str(dtype): dtype for dtype in _STORED_AS}


class Entry(NamedTuple):
    """A tensor in a file: its torch dtype and shape, and the offsets of its bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def step_name(step: int) -> str:
    """Returns the name of the folder of a complete checkpoint."""
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """Returns the step of a complete checkpoint by the name of its folder; None for another name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def temporary_name(step: int, kind: str = "tmp") -> str:
    """Draws the name of a folder that is being written (`tmp`) or deleted (`trash`)."""
    return f".{kind}-{step_name(step)}-{secrets.token_hex(4)}"


def part_name(rank: int, world_size: int, suffix: str) -> str:
    """Returns the name of a rank's file; `suffix` is `safetensors` or `json`."""
    return f"rank-{rank:05d}-of-{world_size:05d}.{suffix}"


def is_known(name: str) -> bool:
    """Returns whether a file of this name inside a checkpoint's folder was written by this package."""
    return name == MANIFEST or PART.fullmatch(name) is not None


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raises TypeError or ValueError if the mapping cannot be stored."""
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"tensors has the key {name!r} of type {type(name).__name__}, expected a str")
        if name == "__metadata__":
            raise ValueError("tensors has the key '__metadata__', which safetensors reserves: rename it")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"tensors has the key {name!r}, expected a name that UTF-8 can encode") from None
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensors[{name!r}] is a {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise ValueError(
                f"tensors[{name!r}] is a {tensor.layout} tensor on {tensor.device}, "
                "expected a strided tensor on the CPU"
            )
        if tensor.dtype not in _CODES and tensor.dtype not in _STORED_AS:
            expected = ", ".join(map(str, [*_CODES, *_STORED_AS]))
            raise ValueError(f"tensors[{name!r}] has the dtype {tensor.dtype}, expected one of {expected}")


def encode_header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """Returns the beginning of a safetensors file, and the tensors in the order of their data.

    No tensor is copied unless it is a lazy conjugate or negative.

    Tensors of larger elements come first, so that each is aligned to its element. Spaces pad the header to whole
    blocks, so that the data begin at a multiple of 4096 bytes.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # stable: keeps the caller's order
    header: dict[str, Any] = {}
    notes: dict[str, str] = {}
    at = 0
    for name in order:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        stored, parts = _STORED_AS.get(tensor.dtype, (tensor.dtype, 0))
        shape = [*tensor.shape, parts] if parts else list(tensor.shape)
        if parts:
            notes[name] = str(tensor.dtype)
        header[name] = {"dtype": _CODES[stored], "shape": shape, "data_offsets": [at, end]}
        at = end
    metadata = {"format": "pt", **({DTYPE_NOTES: json.dumps(notes)} if notes else {})}
    text = json.dumps({"__metadata__": metadata, **header}, ensure_ascii=False, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // BLOCK_BYTES) * BLOCK_BYTES - 8
    ordered = [tensors[name].detach().resolve_conj().resolve_neg() for name in order]
    return size.to_bytes(8, "little") + text.ljust(size), ordered


def decode_header(data: bytes) -> dict[str, Entry]:
    """Returns the tensors of a safetensors file, by name in the order of their data."""
    try:
        header = json.loads(data[8:])
        notes = json.loads(header.pop("__metadata__", {}).get(DTYPE_NOTES, "{}"))
        entries = {name: _entry(value, notes.get(name), len(data)) for name, value in header.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"its header is no safetensors header: {type(error).__name__}: {error}") from error
    return dict(sorted(entries.items(), key=lambda item: item[1].begin))


def _entry(value: Mapping[str, Any], note: str | None, base: int) -> Entry:
    begin, end = value["data_offsets"]
    shape: Sequence[int] = value["shape"]
    if note is not None:
        return Entry(_NOTED[note], tuple(shape[:-1]), base + begin, base + end)
    return Entry(_DTYPES[value["dtype"]], tuple(shape), base + begin, base + end)
