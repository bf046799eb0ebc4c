"""Measures packing and unpacking of saved tensors against copies and against torch and NumPy."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from drivetrain import _C
from drivetrain.bench.measure import Row, interleaved, median_interval

NUMEL = 5_000_000  # above 32 MiB, glibc maps new memory for every call, which would dominate


@dataclass(frozen=True)
class PackCase:
    """A tensor to pack, and the same packing with torch or NumPy."""

    what: str
    packing: str
    tensor: Tensor
    by: str
    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]
    is_exact: bool = True  # both restore the same bits


def run(rounds: int) -> list[Row]:
    """Returns rows of unpacked bytes per second.

    Raises:
        AssertionError: The sides of an exact case restore different bits.
    """
    return [row for case in track(_cases(), description="packing", transient=True) for row in _measure(case, rounds)]


def _cases() -> list[PackCase]:
    import numpy as np

    torch.manual_seed(0)
    keep = 1 / 0.9
    mask = torch.rand(NUMEL) < 0.9
    normal = torch.randn(NUMEL)

    def packed_bits(x: Tensor) -> Any:
        return np.packbits((x != 0).numpy())

    def bools(bits: Any) -> Tensor:
        return torch.from_numpy(np.unpackbits(bits, count=NUMEL).view(np.bool_))

    def int8(x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantizes blocks of 256 by their largest magnitude."""
        rows = torch.nn.functional.pad(x, (0, -NUMEL % 256)).view(-1, 256)
        scales = rows.abs().amax(1, keepdim=True) / 127
        return (rows / scales).round_().to(torch.int8), scales

    return [
        PackCase("bool mask as bits", "bits", mask, "NumPy", lambda x: np.packbits(x.numpy()), bools),
        PackCase(
            "float32 dropout mask as bits",
            *("bits", mask.float() * keep, "torch and NumPy"),
            *(packed_bits, lambda bits: bools(bits).float().mul_(keep)),
        ),
        PackCase(
            "float32 as bfloat16",
            *("bfloat16", normal, "torch"),
            *(lambda x: x.to(torch.bfloat16), lambda halves: halves.to(torch.float32)),
        ),
        PackCase(
            "float32 as 8-bit codes",
            *("int8", normal, "torch"),
            *(int8, lambda packed: (packed[0] * packed[1]).view(-1)[:NUMEL]),
            is_exact=False,
        ),
    ]


def _measure(case: PackCase, rounds: int) -> list[Row]:
    x, copy = case.tensor, torch.empty_like(case.tensor)
    packed, theirs = _C.pack(x, case.packing), case.pack(x)
    if packed is None:
        raise AssertionError(f"{case.what}: packing refused the tensor, expected two values at most")
    if case.is_exact and not torch.equal(_C.unpack(packed), case.unpack(theirs)):
        raise AssertionError(f"{case.what}: unpacked bits differ from {case.by}'s")
    small = packed
    rows = [Row(f"{case.what}: packed bytes per byte", "", 1.0, packed.nbytes / x.nbytes)]
    for what, ours, other in (
        ("pack", lambda: _C.pack(x, case.packing), lambda: case.pack(x)),
        ("unpack", lambda: _C.unpack(small), lambda: case.unpack(theirs)),
    ):
        copy_s, other_s, ours_s = interleaved((lambda: copy.copy_(x), other, ours), rounds)
        rows.append(_row(f"  {what}, against {case.by}", x.nbytes, other_s, ours_s))
        rows.append(_row(f"  {what}, against a copy", x.nbytes, copy_s, ours_s))
    return rows


def _row(what: str, nbytes: int, other_s: list[float], ours_s: list[float]) -> Row:
    """Returns a row of bandwidths."""
    ratio, low, high = median_interval([a / b for a, b in zip(other_s, ours_s, strict=True)])
    rates = [nbytes / statistics.median(seconds) / 1e9 for seconds in (other_s, ours_s)]
    return Row(what, "GB/s", rates[0], rates[1], ratio, low, high)
