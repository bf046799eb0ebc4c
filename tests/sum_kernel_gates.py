"""Limits on the machine code of the CUDA kernels other than the element-wise step: sums, accumulation, packing.

tests/kernel_gates.py has those of the step's kernels; `make check-kernels` holds the built module to both. Bytes per
lane count the loads that one basic block issues before the first of their values is used.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from machine_code import Code, Instruction, blocks_of, read_registers, registers_of


class Limits(NamedTuple):
    """Limits on the kernels whose mangled names match a pattern."""

    pattern: str
    most_registers: int
    least_bytes: int  # of loads a lane has in progress
    most_barriers: int = 0
    local: int = 0  # bytes of stack and local memory


# Formats in names: 0 float32, 1 float64, 2 bfloat16, 3 float16, 7 bfloat16 and a byte, 11 signed codes.
LIMITS = (
    Limits("10chunk_sums", most_registers=64, least_bytes=64),
    Limits("13chunk_sums_of", most_registers=64, least_bytes=64),
    Limits("20compute_grad_scaling", most_registers=64, least_bytes=32, most_barriers=3),
    # Each array's loads are in a basic block of their own, which its format chooses. Together they have 128 bytes in
    # flight for LAMB and 64 for Adafactor in float32.
    Limits("16trust_ratio_sumsI.*4LambEf", most_registers=128, least_bytes=32),
    Limits("16trust_ratio_sumsI.*9AdafactorEf", most_registers=128, least_bytes=32),
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


def bytes_under_way(block: Iterable[Instruction]) -> int:
    """Bytes of the loads, predicated ones included, that are issued before any of their values is used."""
    total = 0
    loaded: set[int] = set()
    for instruction in block:
        if loaded & read_registers(instruction):
            break
        if instruction.is_global_load:
            total += instruction.bytes
            loaded |= registers_of(instruction.operands.split(",")[0], instruction.bytes)
    return total


def violations(code: Code, limits: Limits) -> list[str]:
    """Returns every limit that the kernel exceeds, with the value found."""
    blocks = blocks_of(code.instructions).values()
    barriers = sum(i.opcode.startswith("BAR") for i in code.instructions)
    under_way = max(bytes_under_way(block) for block in blocks)
    found = []
    if code.registers > limits.most_registers:
        found.append(f"registers: {code.registers}, limit: {limits.most_registers}")
    if code.local > limits.local:
        found.append(f"local memory: {code.local} bytes, limit: {limits.local}")
    if barriers > limits.most_barriers:
        found.append(f"block barriers: {barriers}, limit: {limits.most_barriers}")
    if under_way < limits.least_bytes:
        found.append(f"bytes in progress per lane: {under_way}, limit: at least {limits.least_bytes}")
    return found


def check(codes: Iterable[Code]) -> dict[str, list[str]]:
    """Returns the limits that each kernel exceeds, by pattern and name, and reports patterns without a kernel."""
    codes = list(codes)
    result: dict[str, list[str]] = {}
    for limits in LIMITS:
        matching = [code for code in codes if re.search(limits.pattern, code.name)]
        if not matching:
            result[limits.pattern] = ["no kernel has this name"]
        for code in matching:
            result[f"{limits.pattern} {code.name}"] = violations(code, limits)
    return result


def report(found: dict[str, list[str]]) -> int:
    """Prints the failures and returns the exit status."""
    failed = [(name, violation) for name, all_of in found.items() for violation in all_of]
    for name, violation in failed:
        print(f"FAILED {name}: {violation}")
    if not failed:
        print(f"{len(found)} kernels of sums, accumulation and packing keep all limits")
    return 1 if failed else 0
