"""Tests the 64-bit hashes of tensors against a plain Python version."""

import functools
import random

import pytest
import torch
import torch.utils.checkpoint

from drivetrain import _C


def hash_of(data: bytes) -> int:
    """csrc/base/hash*.cpp in Python."""

    def mix(hash: int, word: int) -> int:
        hash = (hash ^ word) * 0x9E3779B97F4A7C15 % 2**64
        return hash ^ hash >> 29

    def of_chunk(chunk: bytes) -> int:
        padded = chunk + bytes(-len(chunk) % 256)
        lanes = list(range(32))
        for at in range(0, len(padded), 8):
            lanes[at // 8 % 32] = mix(lanes[at // 8 % 32], int.from_bytes(padded[at : at + 8], "little"))
        return functools.reduce(mix, lanes, len(chunk))

    return functools.reduce(mix, (of_chunk(data[at : at + 2**20]) for at in range(0, len(data), 2**20)), len(data))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 255, 256, 257, 4096, 2**20, 2**20 + 9])
def test_hash(size: int, isa: str) -> None:
    data = random.Random(size).randbytes(size)
    assert _C.hash_tensor(torch.tensor(list(data), dtype=torch.uint8).view(1, size).contiguous()) == hash_of(data)


def test_hash_is_of_values_in_order() -> None:
    x = torch.randn(8, 6, dtype=torch.complex64)
    assert _C.hash_tensor(x.t()) == _C.hash_tensor(x.t().contiguous()) != _C.hash_tensor(x)
    assert _C.hash_tensor(x.conj()) == _C.hash_tensor(x.conj().resolve_conj()) != _C.hash_tensor(x)
    assert _C.hash_tensor(x[::2, 1:]) == _C.hash_tensor(x[::2, 1:].clone())
    assert _C.hash_tensor(torch.eye(3).to_sparse()) == _C.hash_tensor(torch.eye(3))
    assert _C.hash_tensor(torch.tensor(0.0)) != _C.hash_tensor(torch.tensor(-0.0))
    flipped = torch.zeros(10_000)
    hashes = set()
    for i in range(0, 10_000, 7):
        flipped[i] = -flipped[i]
        hashes.add(_C.hash_tensor(flipped))
    assert len(hashes) == len(range(0, 10_000, 7))
