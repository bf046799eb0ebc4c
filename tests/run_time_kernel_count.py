"""Counts instructions per element of the kernels that chose formats at run time, before their rewrite.

The table of the specialized kernels (tests/kernel_gates.py) has these figures next to its own. Pass an object file or a
module that has the loop_cuda of commit 62af386 or before:

    nvcc -std=c++20 -O3 -arch=sm_90 -fmad=false -Icsrc -c csrc/optim/step_cuda.cu -o step.o
    python tests/run_time_kernel_count.py step.o

It counts one turn of the loop over tiles, in which a lane has 4 elements: the way through the turn with the fewest
instructions that makes as many loads and stores of each width as the formats need. It leaves out what comes before the
loop: the search for the parameter, its pointers and the arguments of the rule. Where two formats move the same bytes,
it counts the shorter way, so that a figure may be too small and never too large. Each 8-bit state counts as the
cheaper kind of code.
"""

from __future__ import annotations

import heapq
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from kernel_gates import FORMATS, LAYOUTS, STATES
from machine_code import Code, Instruction, blocks_of, codes_of_file

ELEMENTS = 4  # of a lane in a turn
CODES = 11
STREAMS = {1: "U8", 2: "U16", 4: ""}


def opcode(kind: str, width: str) -> str:
    return f"{kind}.E.{width}" if width else f"{kind}.E"


def needed(rule: str, formats: tuple[int, int, int]) -> dict[str, int]:
    """Returns how many accesses of each opcode a turn makes. With 8-bit states only loads that tell formats apart
    count."""
    (_, param, extra), (_, grad, _), (_, state, _) = (FORMATS[number] for number in formats)
    has_codes = formats[2] == CODES and STATES[rule] > 0
    result: dict[str, int] = {}

    def add(kind: str, width: str) -> None:
        result[opcode(kind, width)] = result.get(opcode(kind, width), 0) + ELEMENTS

    if not has_codes:
        add("LD", STREAMS[param])
        add("LD", STREAMS[grad])
    add("ST", STREAMS[param])
    if extra:
        add("LD", f"S{8 * extra}")
        add("ST", STREAMS[extra])
    for _ in range(STATES[rule]):
        add("LD", STREAMS[state])
        add("ST", STREAMS[state])
    return result


def tile_loop(code: Code) -> tuple[int, int]:
    """Returns the first and the last address of the loop over tiles: the smallest loop with most of the stores."""
    stores = [i.address for i in code.instructions if i.opcode.startswith("ST.")]
    loops = [(i.target, i.address) for i in code.instructions if i.target is not None and i.target < i.address]
    counts = [sum(first <= address <= last for address in stores) for first, last in loops]
    return min(
        (loop for loop, count in zip(loops, counts, strict=True) if count >= 0.6 * max(counts)),
        key=lambda loop: loop[1] - loop[0],
    )


def shortest_turn(code: Code, need: dict[str, int]) -> int:
    """Returns the smallest number of instructions of a turn with exactly those accesses."""
    blocks = blocks_of(code.instructions)
    following = dict(pairwise(sorted(blocks)))
    first, last = tile_loop(code)
    full = tuple(need.values())

    def accesses(block: list[Instruction]) -> tuple[int, ...]:
        return tuple(sum(i.opcode == name for i in block) for name in need)

    def next_of(block: int) -> Iterator[int]:
        end = blocks[block][-1]
        kind = end.opcode.split(".")[0]
        if kind == "BRA" and end.target is not None:
            yield end.target
        is_conditional = bool(end.predicate) or bool(re.match(r"!?U?P\d", end.operands)) or ".DIV" in end.opcode
        if (kind not in ("BRA", "EXIT", "RET") or is_conditional) and block in following:
            yield following[block]

    of_block = {block: accesses(blocks[block]) for block in blocks}
    queue = [(0, first, (0,) * len(full))]
    seen: set[tuple[int, tuple[int, ...]]] = set()
    while queue:
        cost, block, made = heapq.heappop(queue)
        if (block, made) in seen:
            continue
        seen.add((block, made))
        now = tuple(a + b for a, b in zip(made, of_block[block], strict=True))
        if any(a > b for a, b in zip(now, full, strict=True)):
            continue
        cost += len(blocks[block])
        if blocks[block][-1].address == last and now == full:
            return cost
        for target in next_of(block):
            if first < target <= last and target in blocks and (target, now) not in seen:
                heapq.heappush(queue, (cost, target, now))
    raise ValueError(f"{code.name} has no way that makes {need}")


def main() -> None:
    codes = codes_of_file(Path(sys.argv[1]))
    for rule in STATES:
        (code,) = (code for code in codes if re.search(rf"9loop_cudaINS0_\d+{rule}Ef", code.name))
        for formats, layout in LAYOUTS.items():
            if rule == "Adam" or formats in ((0, 0, 0), (2, 2, 2)):
                print(
                    f'    "{rule} {layout}": {shortest_turn(code, needed(rule, formats)) / ELEMENTS:.1f},', flush=True
                )


if __name__ == "__main__":
    main()
