"""Checks the machine code of the specialized CUDA kernels of optimizer steps against limits, without a GPU.

The code for sm_90 shows what decided the speed on an H100. This is registers, the width of loads and stores, and the
bytes that are loaded before the first is used. `make check-kernels` disassembles the built module and prints a table. A
kernel beyond a limit is named with the limit, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import sum_kernel_gates
from machine_code import (
    ARCHITECTURE,
    Code,
    GateError,
    Instruction,
    blocks_of,
    codes_of_file,
    first_loads,
    is_array_load,
)

THREADS = 256  # threads per block
REGISTERS = 65536  # registers per multiprocessor, allocated to warps in units of 8 per thread
MOST_THREADS = 2048
LEAST_BYTES_UNDER_WAY = 40 << 10  # outstanding loads per multiprocessor

# Values of Format (csrc/formats/storage.h) with kernels: name, bytes per element, and bytes of `extra`.
FORMATS = {
    0: ("fp32", 4, 0),
    2: ("bf16", 2, 0),
    3: ("fp16", 2, 0),
    6: ("bf16+16", 2, 2),
    7: ("bf16+8", 2, 1),
    10: ("fp16+32", 2, 4),
    11: ("8 bit", 1, 0),
}
STATES = {"Adam": 2, "Sgd": 0, "SgdMomentum": 1, "Adagrad": 1, "Rmsprop": 1, "Lion": 1}
CODES = 11

# The layouts that benchmarks name, others (I to L), and their limits. The largest number of registers leaves enough
# threads per multiprocessor. Instructions are per element: beyond them they take longer than memory.
LAYOUTS = {
    (0, 0, 0): "A",
    (2, 2, 0): "B",
    (2, 2, 2): "C",
    (6, 2, 2): "D",
    (6, 2, 11): "E",
    (7, 2, 11): "F",
    (0, 0, 11): "H",
    (6, 2, 0): "I",
    (7, 2, 0): "J",
    (6, 0, 0): "K",
    (10, 3, 0): "L",
}
MOST_INSTRUCTIONS = {"A": 62, "B": 65, "C": 58, "D": 63, "E": 93, "F": 95, "H": 85, "I": 70, "J": 74, "K": 68, "L": 72}
MOST_EARLY_LOADS = 2  # that wait for each other before the data: a block's work, and the record of its parameter
MOST_REGISTERS = {"A": 48, "B": 56, "C": 56, "D": 64, "E": 64, "F": 64, "H": 64, **dict.fromkeys("IJKL", 48)}


@dataclass
class Kernel:
    rule: str
    formats: tuple[int, int, int]  # formats of parameter, gradient and states
    registers: int = 0
    local: int = 0  # bytes of stack and local memory
    instructions: list[Instruction] = field(default_factory=list)

    @property
    def layout(self) -> str:
        return LAYOUTS[self.formats]

    @property
    def name(self) -> str:
        param, grad, state = (FORMATS[number][0] for number in self.formats)
        return f"{self.rule} {self.layout} ({param}, {grad}, {state if STATES[self.rule] else 'no states'})"

    @property
    def unit(self) -> int:
        """Consecutive elements of a lane; lanes have two such units where states have codes."""
        return 4 if 4 in (FORMATS[self.formats[1]][1], FORMATS[self.formats[2]][1]) or self.formats[2] == CODES else 8

    @property
    def units(self) -> int:
        return 2 if self.formats[2] == CODES and STATES[self.rule] else 1

    def arrays(self, stored: bool) -> list[int]:
        """Returns the bytes per element of each array that a step loads, or stores."""
        (_, param, extra), (_, grad, _), (_, state, _) = (FORMATS[number] for number in self.formats)
        states = [state] * STATES[self.rule]
        return [size for size in [param, extra, *([] if stored else [grad]), *states] if size > 0]

    @property
    def packs(self) -> int:
        """Number of instructions of a lane's step that round two values to bfloat16."""
        values = [*([self.formats[0]] if self.formats[0] == 2 else []), *([self.formats[2]] * STATES[self.rule])]
        return values.count(2) * self.unit * self.units // 2

    def expected(self, stored: bool) -> Counter[int]:
        """Returns how many accesses of which width a lane needs."""
        widths: Counter[int] = Counter()
        for size in self.arrays(stored):
            width = min(size * self.unit, 16)
            widths[width] += size * self.unit // width * self.units
        return widths


@dataclass
class Finding:
    gate: str
    value: str
    limit: str


@dataclass
class Measured:
    kernel: Kernel
    bytes_under_way: int  # bytes that a lane loads before the first use
    threads: int  # threads that fit on a multiprocessor
    per_element: float
    findings: list[Finding]


FORMAT = r"L(?:NS_7formats6FormatE|S\d*_)\d+E"
NAME = re.compile(rf"11step_kernelINS0_\d+(\w+?)E((?:{FORMAT})+)")
NAMES = "|".join([NAME.pattern, *(limits.pattern for limits in sum_kernel_gates.LIMITS)])  # of kernels with limits


def kernel_of(mangled: str) -> Kernel | None:
    """Returns the specialized kernel of that name, or None for other kernels."""
    found = NAME.search(mangled)
    if found is None:
        return None
    numbers = [int(number) for number in re.findall(r"(?:FormatE|S\d*_)(\d+)E", found.group(2))]
    if len(numbers) != 3 or tuple(numbers) not in LAYOUTS:
        raise GateError(f"{mangled} is made for formats that no layout of {Path(__file__).name} has: add it there")
    return Kernel(found.group(1), (numbers[0], numbers[1], numbers[2]))


def kernels_in(codes: Iterable[Code]) -> list[Kernel]:
    """Returns the specialized kernels among the codes."""
    kernels = []
    for code in codes:
        if kernel := kernel_of(code.name):
            kernel.registers, kernel.local, kernel.instructions = code.registers, code.local, code.instructions
            kernels.append(kernel)
    return kernels


def shortest_way(blocks: dict[int, list[Instruction]], through: int, stored: int, packs: int) -> list[int]:
    """Returns the blocks of the shortest path from the entry to the exit, or none if there is no path.

    The path contains the block `through`, rounds `packs` times and stores `stored` bytes per lane. It passes loops over
    data found at run time once.
    """
    order = sorted(blocks)
    following = dict(pairwise(order))

    def next_of(block: int) -> Iterator[int | None]:
        last = blocks[block][-1]
        kind = last.opcode.split(".")[0]
        if kind == "BRA" and last.target in blocks:
            yield last.target
        if kind in ("EXIT", "RET"):
            yield None
        # Conditional branches have their condition as a predicate or as an operand.
        is_conditional = bool(last.predicate) or bool(re.match(r"!?U?P\d", last.operands)) or ".DIV" in last.opcode
        if (kind not in ("BRA", "EXIT", "RET") or is_conditional) and block in following:
            yield following[block]

    State = tuple[int, bool, int, int]
    start: State = (order[0], False, 0, 0)
    best: dict[State, int] = {}
    queue: list[tuple[int, State, tuple[int, ...]]] = [(0, start, ())]
    while queue:
        cost, state, way = heapq.heappop(queue)
        if best.get(state, cost + 1) <= cost:
            continue
        best[state] = cost
        block, has_loaded, has_packed, has_stored = state
        has_loaded |= block == through
        if has_loaded:
            has_packed += sum(i.opcode.startswith("F2FP.BF16") for i in blocks[block])
            has_stored += sum(i.bytes for i in blocks[block] if i.is_global_store)
        has_packed, has_stored = min(has_packed, packs), min(has_stored, stored)
        for target in next_of(block):
            if target is not None:
                heapq.heappush(
                    queue, (cost + len(blocks[block]), (target, has_loaded, has_packed, has_stored), (*way, block))
                )
            elif has_loaded and has_packed == packs and has_stored == stored:
                return [*way, block]
    return []


def measure(kernel: Kernel) -> Measured:
    blocks = blocks_of(kernel.instructions)
    through = max(blocks, key=lambda block: sum(i.bytes for i in blocks[block] if is_array_load(i)))
    loads = first_loads(blocks[through])
    elements = kernel.unit * kernel.units
    stored = elements * sum(kernel.arrays(stored=True))
    way_blocks = shortest_way(blocks, through, stored, kernel.packs)
    way = [i for block in way_blocks for i in blocks[block]]
    threads = min(MOST_THREADS, REGISTERS // (-(-kernel.registers // 8) * 8 * THREADS) * THREADS)
    loaded = Counter(i.bytes for i in loads)
    if kernel.formats[2] == CODES:
        loaded[4] -= STATES[kernel.rule]  # Scales are shared by a warp.
    under_way = sum(size * count for size, count in loaded.items())
    stores = Counter(i.bytes for i in way if i.is_global_store)
    findings = []

    def check(gate: str, holds: bool, value: object, limit: object) -> None:
        if not holds:
            findings.append(Finding(gate, str(value), str(limit)))

    def widths(counter: Counter[int]) -> str:
        return ", ".join(f"{count} of {size} bytes" for size, count in sorted(counter.items()) if count) or "none"

    most = MOST_REGISTERS[kernel.layout]
    check("registers", kernel.registers <= most, kernel.registers, f"at most {most}")
    local = sum(i.opcode.startswith(("LDL", "STL")) for i in kernel.instructions)
    check("local memory", kernel.local == 0 and local == 0, f"{kernel.local} bytes, {local} accesses", "none")
    barriers = sum(i.opcode.startswith("BAR") for i in kernel.instructions)
    check("block barriers", barriers == 0, barriers, "none")
    narrow = [i.opcode for i in way if i.opcode.startswith(("LDG", "LDC", "LD.")) and i.bytes < 4]
    check("loads of bytes of arguments", not narrow, ", ".join(narrow), "none")
    most = MOST_INSTRUCTIONS[kernel.layout]
    check("instructions per element", len(way) <= most * elements, len(way) / elements, f"at most {most}")
    early = sum(i.is_global_load for block in way_blocks if block < through for i in blocks[block])
    check("loads before those of arrays", early <= MOST_EARLY_LOADS, early, f"at most {MOST_EARLY_LOADS}")
    expected = kernel.expected(stored=False)
    check("widths of loads before the first use", loaded >= expected, widths(loaded), widths(expected))
    expected = kernel.expected(stored=True)
    check("widths of stores", stores >= expected, widths(stores), widths(expected))
    total = under_way * threads
    least = min(LEAST_BYTES_UNDER_WAY, MOST_THREADS * elements * sum(kernel.arrays(False)))
    check("bytes in progress on a multiprocessor", total >= least, total, f"at least {least}")
    return Measured(kernel, under_way, threads, len(way) / elements, findings)


def table(all_measured: Iterable[Measured]) -> str:
    lines = [f"{'kernel':46} registers  bytes/lane  threads/SM  KiB in progress  instructions/element"]
    for measured in all_measured:
        kernel = measured.kernel
        lines.append(
            f"{kernel.name:46} {kernel.registers:9}  {measured.bytes_under_way:10}  {measured.threads:10}"
            f"  {measured.bytes_under_way * measured.threads / 1024:13.0f}"
            f"  {measured.per_element:20.0f}"
        )
    return "\n".join(lines)


def check(codes: Iterable[Code], file: Path) -> list[Measured]:
    """Measures every specialized kernel of a module or an object file."""
    kernels = kernels_in(codes)
    if not kernels:
        raise GateError(f"{file} has no specialized kernels for {ARCHITECTURE}: was it built with nvcc for it?")
    return [measure(kernel) for kernel in sorted(kernels, key=lambda kernel: (kernel.rule, kernel.layout))]


def report(all_measured: list[Measured]) -> int:
    """Prints the table and the failures, and returns the exit status."""
    print(table(all_measured))
    failed = [(measured.kernel, finding) for measured in all_measured for finding in measured.findings]
    for kernel, finding in failed:
        print(f"FAILED {kernel.name}: {finding.gate}: {finding.value}, limit: {finding.limit}")
    if not failed:
        print(f"{len(all_measured)} kernels for {ARCHITECTURE} keep all limits")
    return 1 if failed else 0


def built_module() -> Path:
    """Returns the path of drivetrain's module, without an import, which needs torch's libraries."""
    return Path(importlib.util.find_spec("drivetrain._C").origin)  # type: ignore[union-attr,arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a module or an object file (default: drivetrain's)")
    arguments = parser.parse_args()
    try:
        file = arguments.file or built_module()
        codes = codes_of_file(file, NAMES)
        return max(report(check(codes, file)), sum_kernel_gates.report(sum_kernel_gates.check(codes)))
    except GateError as error:
        print(f"check-kernels: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
