"""Prints a hash of what the kernels compute from inputs made of integers, per instruction set of this processor.

Two processors compute the same bits if they print the same hashes. A NaN counts as one value, whatever its sign and
payload: processors choose these.
"""

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain import _C
from optim_cases import CASES

SIZES = (1, 17, 255, 513, 5000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "8 bits": {"state_bits": 8, "min_8bit_size": 0},
    "4 bits": {"state_bits": 4, "min_8bit_size": 0},
    "fp8": {"state_bits": "fp8", "min_8bit_size": 0},
    "16 bits": {"state_bits": 16},
    "master 32": {"master_bits": 32},
    "master 24": {"master_bits": 24},
    "stochastic": {"rounding": "stochastic"},
    "kahan": {"rounding": "kahan"},
    "clipped": {"max_grad_norm": 0.5, "zero_grads_in_step": True},
}
WITH_INFINITIES = ("plain", "8 bits", "fp8")
# Ties of rounding to bfloat16, to float16 and to 24 bits; the largest value that does not overflow float16, and the
# next; subnormal values of float32 and of float16; zeros, infinities and the largest float32.
SPECIAL = (
    *(0x3F808000, 0x3F818000, 0xBF808000, 0x3F801000, 0x3F803000, 0x3F800080, 0x477FEFFF, 0x477FF000),
    *(0x00000001, 0x807FFFFF, 0x33000000, 0x33000001, 0x387FC000, 0x00000000, 0x80000000, 0x7F7FFFFF),
)
INFINITIES = (0x7F800000, 0xFF800000)


def mixed(index: np.ndarray) -> np.ndarray:
    """Returns 32 random bits for each index (lowbias32)."""
    x = index.astype(np.uint64)
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D) & np.uint64(0xFFFFFFFF)
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B) & np.uint64(0xFFFFFFFF)
    return x ^ (x >> np.uint64(16))


def values(numel: int, salt: int, special: tuple[int, ...] = ()) -> Tensor:
    """Returns floats from 2^-12 to 8 of both signs, and these bit patterns at every 37th place."""
    bits = mixed(np.arange(numel) + (salt << 20))
    exponent = np.uint64(115) + (bits >> np.uint64(23)) % np.uint64(15)
    words = (bits & np.uint64(0x807FFFFF)) | exponent << np.uint64(23)
    for place, pattern in enumerate(special):
        words[5 + 37 * place :: 37 * len(special)] = pattern
    return torch.from_numpy(words.astype(np.uint32).view(np.float32))


def digest(*tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            found.update(repr(tensor).encode())
            continue
        data = tensor.detach().contiguous()
        if data.dtype in DTYPES:
            data = torch.where(data.isnan(), torch.tensor(float("nan"), dtype=data.dtype), data)
        found.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def steps(name: str, dtype: torch.dtype, options: dict[str, Any], special: tuple[int, ...]) -> str:
    case = CASES[name]
    params = [values(size, salt).to(dtype).requires_grad_() for salt, size in enumerate(SIZES)]
    try:
        optimizer = case.ours(params, **case.options, **options)
        for step in range(3):
            for salt, param in enumerate(params):
                param.grad = values(param.numel(), 100 * step + salt + 10, special).to(dtype)
            optimizer.step()
    except (TypeError, ValueError) as error:  # this rule or dtype has no such format
        return f"{type(error).__name__}"
    return digest(*params, *(value for param in params for value in optimizer.state[param].values()))


def results() -> Iterator[tuple[str, str]]:
    """Yields what was computed, and its hash."""
    for name in CASES:
        for dtype in DTYPES:
            for what, options in FORMATS.items():
                # A norm over the special values is infinite.
                special = () if what == "clipped" else SPECIAL
                yield f"{name}, {dtype}, {what}", steps(name, dtype, options, special)
                if what in WITH_INFINITIES:
                    yield f"{name}, {dtype}, {what}, infinities", steps(name, dtype, options, SPECIAL + INFINITIES)
    for size in SIZES:
        for dtype in DTYPES:
            data = values(size, 7, SPECIAL + INFINITIES).to(dtype)
            bits = torch.where(data > 0, data[0], data[-1])
            for packing, source in (("bits", bits), ("bfloat16", data), ("int8", data)):
                try:
                    packed = _C.pack(source, packing)
                except (TypeError, ValueError):
                    continue
                if packed is not None:
                    yield f"pack {packing}, {dtype}, {size}", digest(packed.bytes, packed.extra, _C.unpack(packed))
            finite = values(size, 8).to(dtype)
            yield f"norm, {dtype}, {size}", repr(_C.sum_of_squares([finite]))
            yield f"hash, {dtype}, {size}", str(_C.hash_tensor(finite))
        yield f"crc32c, {size}", str(_C.crc32c(values(10 * size, 9).numpy().tobytes()))


def main() -> None:
    for isa in sys.argv[1:] or _C.available_isas():
        _C.force_isa(isa)
        for what, found in results():
            print(isa, found, what, sep="\t", flush=True)


if __name__ == "__main__":
    main()
