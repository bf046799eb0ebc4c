"""Limits on the machine code of the CUDA kernels beside the element-wise step: sums, accumulation, packing.

As tests/kernel_gates.py has them for the step's kernels; `make check-kernels` is to hold the built module to both. What
is per lane counts the loads that one basic block issues before the first of their values is used.
"""

from typing import NamedTuple


class Limits(NamedTuple):
    """Of the kernels whose mangled names match."""

    pattern: str
    most_registers: int
    least_bytes: int  # of loads a lane has under way
    most_barriers: int = 0
    local: int = 0  # bytes of stack and local memory


# Formats in names: 0 float32, 1 float64, 2 bfloat16, 3 float16, 7 bfloat16 and a byte, 11 signed codes.
LIMITS = (
    Limits("10chunk_sums", most_registers=64, least_bytes=64),
    Limits("5treat", most_registers=64, least_bytes=32, most_barriers=3),
    # A stream's loads stand in a block of their own, which its format chooses. What is under way is theirs together:
    # 128 bytes of LAMB and 64 of Adafactor in float32.
    Limits("10layer_sumsI.*4LambEf", most_registers=128, least_bytes=32),
    Limits("10layer_sumsI.*9AdafactorEf", most_registers=128, least_bytes=32),
    Limits("11adapt_rules", most_registers=64, least_bytes=64, most_barriers=6),
    Limits("11factor_sumsIf", most_registers=128, least_bytes=128, most_barriers=1),
    Limits("12update_meansI", most_registers=64, least_bytes=40),
    Limits("11factor_rowsI", most_registers=80, least_bytes=40, most_barriers=2),
    Limits("16accumulate_tilesI.*FormatE0ELS\\d*_2E", most_registers=40, least_bytes=96),
    Limits("16accumulate_tilesI.*FormatE7ELS\\d*_2E", most_registers=56, least_bytes=80),
    Limits("10pack_bools", most_registers=32, least_bytes=64),
    Limits("12unpack_bools", most_registers=32, least_bytes=8),
    Limits("12convert_rowsI.*FormatE0ELS\\d*_11E", most_registers=64, least_bytes=128),
    Limits("12convert_rowsI.*FormatE2ELS\\d*_11E", most_registers=64, least_bytes=64),
    Limits("12convert_rowsI.*FormatE11ELS\\d*_", most_registers=64, least_bytes=32),
    Limits("12convert_rowsI.*FormatE0ELS\\d*_2E", most_registers=64, least_bytes=128),
)
