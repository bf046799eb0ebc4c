"""Reference of the storage formats of csrc/formats/storage.h in torch's own operations: float32 to codes and back."""

import torch
from torch import Tensor

BLOCK, BLOCK_4 = 256, 128  # values per scale of 8-bit and 4-bit codes


def bits_of(values: Tensor) -> Tensor:
    """Returns a float32 tensor's bits, as int64 from 0 to 2^32 - 1."""
    return values.view(torch.int32).long() & 0xFFFFFFFF


def float_of(bits: Tensor) -> Tensor:
    return torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)


def signed(bits: Tensor, width: int) -> Tensor:
    """Returns the two's complement number in the last `width` bits."""
    bits = bits & (2**width - 1)
    return torch.where(bits >= 2 ** (width - 1), bits - 2**width, bits)


def split(values: Tensor, remainder_bits: int) -> tuple[Tensor, Tensor]:
    """Splits float32 into the bits of a bfloat16 and a remainder of 16 or 8 bits, both int64."""
    bits = bits_of(values)
    if remainder_bits == 8:
        bits = torch.where(values.isnan(), bits, (bits + 0x7F + ((bits >> 8) & 1)) & ~0xFF)
    halves = ((bits + 0x8000) >> 16) & 0xFFFF
    remainders = signed(bits - (halves << 16), 32) >> (16 - remainder_bits)
    nan = values.isnan()
    return torch.where(nan, (bits >> 16) | 0x40, halves), torch.where(nan, 0, remainders)


def blocks(values: Tensor, block: int = BLOCK) -> Tensor:
    """Returns one row per block; zeros fill the last one."""
    flat = values.flatten()
    rows = -(-flat.numel() // block)
    return torch.cat([flat, flat.new_zeros(rows * block - flat.numel())]).view(rows, block)


def root(values: Tensor) -> Tensor:
    """Returns the correctly rounded root; torch's own float32 root is not correct everywhere."""
    return values.double().sqrt().float()


def _scales(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest finite magnitude of each row, and whether an element is not finite."""
    finite = rows.isfinite()
    return torch.where(finite, rows.abs(), 0).amax(1), ~finite.all(1)


def encode_signed(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes (int8, flat) and scales (float32)."""
    rows = blocks(values)
    scales, special = _scales(rows)
    scales = torch.where(scales > 0, scales.clamp(min=2.0**-113), 0)
    factors = torch.where(scales > 0, torch.tensor(126.0**2) / scales, 0)  # a number over a tensor rounds twice
    codes = torch.copysign(root(rows.abs() * factors[:, None]), rows).round()
    codes = torch.where(rows.isinf(), torch.copysign(torch.tensor(127.0), rows), codes)
    codes = torch.where(rows.isnan(), -128, codes)
    return codes.flatten()[: values.numel()].to(torch.int8), torch.where(special, -scales, scales)


def encode_squared(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (uint8, flat) and scales (float32)."""
    rows = blocks(values)
    largest, special = _scales(rows)
    scales = root(largest)
    factors = torch.where(scales > 0, torch.tensor(253.0) / scales, 0)
    codes = (root(rows) * factors[:, None]).round().clamp(min=1)
    codes = torch.where(rows == 0, 0, codes)
    codes = torch.where(rows.isinf(), 254, codes)
    codes = torch.where(rows.isnan(), 255, codes)
    return codes.flatten()[: values.numel()].to(torch.uint8), torch.where(special, -scales, scales)


def decode_signed(codes: Tensor, scales: Tensor) -> Tensor:
    numbers = codes.float()
    values = (
        numbers * numbers.abs() * (scales.abs() * torch.tensor(1.0 / 126**2)).repeat_interleave(BLOCK)[: len(codes)]
    )
    values = torch.where(numbers.abs() == 127, torch.copysign(torch.tensor(torch.inf), numbers), values)
    return torch.where(codes == -128, torch.nan, values)


def decode_squared(codes: Tensor, scales: Tensor) -> Tensor:
    roots = codes.float() * (scales.abs() * torch.tensor(1.0 / 253)).repeat_interleave(BLOCK)[: len(codes)]
    values = torch.where(codes == 254, torch.inf, roots * roots)
    return torch.where(codes == 255, torch.nan, values)


def _with_room(scales: Tensor, special: Tensor, room: float) -> Tensor:
    """Enlarges the scales of blocks that also have infinities or NaN, and marks them by a sign."""
    return torch.where(special, -(scales * torch.tensor(room)).clamp(max=torch.finfo(torch.float32).max), scales)


def _packed(codes: Tensor, count: int) -> Tensor:
    """Packs the first codes, two per byte, the first of two in its lower half."""
    codes = torch.cat([codes.flatten()[:count].long() & 15, torch.zeros(count % 2, dtype=torch.long)])
    return codes[::2] | codes[1::2] << 4


def _drawn(values: Tensor) -> Tensor:
    """Returns the number that rounds each value up where the distance from its lower code is larger."""
    return ((bits_of(values) * 0x9E3779B1 & 0xFFFFFFFF) >> 22).add(0.5).float() / 1024


def encode_signed_4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns packed codes (int8) and scales: code n stands for n^3 / 343 of the scale."""
    rows = blocks(values, BLOCK_4)
    scales, special = _scales(rows)
    scales = _with_room(torch.where(scales > 0, scales.clamp(min=2.0**-113), 0), special, 343 / 216)
    factors = torch.where(scales != 0, torch.tensor(343.0) / scales.abs(), 0)
    cubes = torch.arange(9.0) ** 3
    steps = rows.abs() * factors[:, None]
    lower = torch.bucketize(steps, cubes[1:8], right=True)
    codes = lower + (steps >= cubes[lower] + _drawn(rows) * (cubes[lower + 1] - cubes[lower])).int().where(lower < 7, 0)
    codes = torch.where(rows.isinf(), 7, codes) * torch.where(rows < 0, -1, 1)
    packed = _packed(torch.where(rows.isnan(), -8, codes), values.numel())
    return packed.to(torch.uint8).view(torch.int8), scales


def encode_squared_4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns packed codes (uint8) and scales: code n stands for n^2 / 225 of the scale, squared."""
    rows = blocks(values, BLOCK_4)
    largest, special = _scales(rows)
    scales = _with_room(root(largest), special, 225 / 169)
    factors = torch.where(scales != 0, torch.tensor(225.0) / scales.abs(), 0)
    steps = root(rows) * factors[:, None]
    lower = root(steps).floor()
    codes = lower + (steps >= lower * lower + _drawn(root(rows)) * (2 * lower + 1)).float()
    codes = torch.where(rows == 0, 0, codes.clamp(min=1))
    codes = torch.where(rows.isinf(), 14, codes)
    return _packed(torch.where(rows.isnan(), 15, codes), values.numel()).to(torch.uint8), scales


def decode_4(packed: Tensor, scales: Tensor, count: int) -> Tensor:
    """Returns the values of packed codes, signed ones if they are int8."""
    bytes_ = packed.view(torch.uint8).long()
    codes = torch.stack([bytes_ & 15, bytes_ >> 4], dim=1).flatten()[:count]
    special = (scales.view(torch.int32) < 0).repeat_interleave(BLOCK_4)[:count]
    of_elements = scales.abs().repeat_interleave(BLOCK_4)[:count]
    if packed.dtype == torch.uint8:
        roots = codes.float() * codes.float() * torch.tensor(1 / 225) * of_elements
        values = torch.where(special & (codes == 14), torch.inf, roots * roots)
        return torch.where(special & (codes == 15), torch.nan, values)
    numbers = signed(codes, 4).float()
    values = numbers * numbers * numbers * torch.tensor(1 / 343) * of_elements
    infinite = torch.copysign(torch.tensor(torch.inf), numbers)
    values = torch.where(special & (numbers.abs() == 7), infinite, values)
    return torch.where(special & (numbers == -8), torch.nan, values)


def accumulated(total: Tensor, micro: Tensor, bits: int) -> Tensor:
    """Adds a micro-batch's gradient and returns what float32, or 24 bits, keep of the sum, as float32."""
    total = total + micro.float()
    if bits == 32:
        return total
    halves, remainders = split(total.contiguous(), 8)
    return float_of((halves << 16) + (remainders << 8) & 0xFFFFFFFF)
