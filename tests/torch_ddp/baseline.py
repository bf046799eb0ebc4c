"""What torch's own class does in these tests on a CPU; `python -m torch_ddp.baseline` measures and records it."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

from .pool import Outcome, Pool

FILE = Path(__file__).with_name("baseline.txt")
PASSES = "passes"
_UNEXPLAINED = "torch's class does not pass it here:"

# Why torch's class does not pass a test here, by the error it ends with.
_REASONS = {
    r"SyncBatchNorm layers only work with GPU modules": "SyncBatchNorm has GPU kernels only",
    r"None is not [01]$|String comparison failed: '' != '[01]'": "compares the index of the GPU that a tensor is on",
    r"String comparison failed: 'gloo' != 'nccl'": "reads NCCL's part of the profiler's trace",
    r"Timed out waiting|Application timeout": "needs a backward that does not wait for the other rank, as NCCL's",
}


def torch_version() -> str:
    """The installed torch's version without its build, as 2.13.0+cpu is 2.13.0; torch itself is not imported."""
    return version("torch").partition("+")[0]


def recorded() -> dict[str, str]:
    """Every DDP test and what torch's class does in it: "passes" or why it cannot; empty for an unrecorded torch."""
    first, *lines = FILE.read_text().splitlines()
    if first != _heading(torch_version()):
        return {}
    return dict(line.split(": ", 1) for line in lines)


def verdict(outcome: Outcome) -> str:
    """ "passes", or why torch's class does not: the error itself where nobody has looked at it yet."""
    if outcome.status == "passed":
        return PASSES
    for pattern, words in _REASONS.items():
        if re.search(pattern, outcome.why):
            return words
    return f"{_UNEXPLAINED} {outcome.why}"


def _heading(torch: str) -> str:
    return f"# torch {torch}'s own class in its DDP tests on two CPU ranks, written by: python -m torch_ddp.baseline"


def main() -> int:
    pool = Pool("torch")
    lines = [_heading(torch_version())]
    try:
        for name in pool.names():
            lines.append(f"{name}: {verdict(pool.run(name))}")
            print(lines[-1], flush=True)
    finally:
        pool.close()
    FILE.write_text("\n".join(lines) + "\n")
    unexplained = [line for line in lines if _UNEXPLAINED in line]
    if unexplained:
        print("\nlook at these and add their reasons here:", *unexplained, sep="\n")
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
