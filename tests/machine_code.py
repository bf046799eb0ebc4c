"""Reads the machine code of CUDA kernels from a module or an object file, without a GPU.

The disassembler comes with the packages in TOOLS or with the CUDA toolkit.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

TOOLS = ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
ARCHITECTURE = "sm_90"
TIMEOUT_S = 300


class GateError(Exception):
    """An error that prevents the check of the gates."""


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str  # "" or as in "@!P0"
    opcode: str
    operands: str

    @property
    def is_global_load(self) -> bool:
        return self.opcode.startswith("LDG")

    @property
    def is_global_store(self) -> bool:
        return self.opcode.startswith("STG")

    @property
    def bytes(self) -> int:
        """Bytes that a thread moves with the instruction."""
        parts = self.opcode.split(".")
        for part, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
            if part in parts:
                return size
        return 4

    @property
    def target(self) -> int | None:
        """The target address of a branch."""
        found = re.search(r"(0x[0-9a-f]+)", self.operands) if self.opcode.split(".")[0] == "BRA" else None
        return int(found.group(1), 16) if found else None


@dataclass
class Code:
    """The code of a kernel and its mangled name."""

    name: str
    registers: int
    local: int  # bytes of stack and local memory
    instructions: list[Instruction] = field(default_factory=list)


def tool(name: str) -> str:
    """Returns the path of a tool in its package, else in the CUDA toolkit."""
    for package in TOOLS:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == name and Path(str(file.locate())).is_file():
                return str(file.locate())
    found = shutil.which(name)
    if found is None:
        raise GateError(f"no {name}: install {' and '.join(TOOLS)}, or run make check-kernels, which does so")
    return found


def output_of(*command: str, folder: str | None = None) -> str:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    if run.returncode != 0:
        raise GateError(f"{' '.join(command)} ended with {run.returncode}: {run.stderr.strip()}")
    return run.stdout


def codes_in(usage: str, disassembly: str) -> list[Code]:
    """Parses the kernels in cuobjdump's output."""
    codes: dict[str, Code] = {}
    name = ""
    for line in usage.splitlines():
        if found := re.match(r"\s*Function (\S+):", line):
            name = found.group(1)
        elif found := re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", line):
            codes[name] = Code(name, int(found.group(1)), int(found.group(2)) + int(found.group(3)))
    instructions: list[Instruction] | None = None
    line_of_code = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
    for line in disassembly.splitlines():
        if found := re.match(r"\s*Function : (\S+)", line):
            instructions = codes[found.group(1)].instructions if found.group(1) in codes else None
        elif instructions is not None and (found := line_of_code.match(line)):
            address, predicate, opcode, operands = found.groups()
            instructions.append(Instruction(int(address, 16), (predicate or "").strip(), opcode, operands.strip()))
    return list(codes.values())


def codes_of_file(file: Path, names: str) -> list[Code]:
    """Returns the kernels of a module or an object file, from each source that has one whose name matches `names`."""
    cuobjdump, codes = tool("cuobjdump"), []
    tool("nvdisasm")  # which it calls
    with tempfile.TemporaryDirectory() as folder:
        output_of(cuobjdump, "-arch", ARCHITECTURE, "-xelf", "all", str(file.resolve()), folder=folder)
        for cubin in map(str, Path(folder).iterdir()):
            usage = output_of(cuobjdump, "-res-usage", cubin)
            if re.search(names, usage):
                codes += codes_in(usage, output_of(cuobjdump, "-sass", cubin))
    return codes


def registers_of(operand: str, size: int) -> set[int]:
    """Returns the registers of a value of `size` bytes."""
    found = re.match(r"R(\d+)", operand)
    return {int(found.group(1)) + i for i in range(max(1, size // 4))} if found else set()


def read_registers(instruction: Instruction) -> set[int]:
    operands = instruction.operands if instruction.is_global_store else instruction.operands.partition(",")[2]
    sizes = dict.fromkeys(re.findall(r"\bR\d+", operands), 4)
    if instruction.is_global_store:
        sizes |= dict.fromkeys(re.findall(r"\bR\d+", operands.rpartition(",")[2]), instruction.bytes)
    return {register for operand, size in sizes.items() for register in registers_of(operand, size)}


def blocks_of(code: list[Instruction]) -> dict[int, list[Instruction]]:
    """Returns basic blocks by their first address."""
    begins = {code[0].address} | {target for i in code if (target := i.target) is not None}
    for instruction, following in pairwise(code):
        if instruction.opcode.split(".")[0] in ("BRA", "EXIT", "RET"):
            begins.add(following.address)
    blocks: dict[int, list[Instruction]] = {}
    for instruction in code:
        if instruction.address in begins:
            current = blocks.setdefault(instruction.address, [])
        current.append(instruction)
    return blocks


def is_array_load(instruction: Instruction) -> bool:
    """Returns whether it loads whole units of an array: loads of a rest have predicates."""
    return instruction.is_global_load and not instruction.predicate


def first_loads(block: Iterable[Instruction]) -> list[Instruction]:
    """Returns the arrays' loads that are issued before any of their values is used."""
    loads: list[Instruction] = []
    loaded: set[int] = set()
    for instruction in block:
        if loaded & read_registers(instruction):
            break
        if is_array_load(instruction):
            loads.append(instruction)
            loaded |= registers_of(instruction.operands.split(",")[0], instruction.bytes)
    return loads
