"""Records the results of torch's own class in these tests on a CPU; `python -m torch_ddp.baseline` measures them."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

from .pool import Outcome, Pool

FILE = Path(__file__).with_name("baseline.txt")
PASSES = "passes"
_UNEXPLAINED = "torch's class does not pass it here:"

# Maps a pattern of the final error to the reason why torch's class does not pass a test here.
_REASONS = {
    r"SyncBatchNorm layers only work with GPU modules": "SyncBatchNorm has GPU kernels only",
    r"None is not [01]$|String comparison failed: '' != '[01]'": "compares the index of the GPU that a tensor is on",
    r"String comparison failed: 'gloo' != 'nccl'": "reads NCCL's part of the profiler's trace",
    r"Timed out waiting|Application timeout": "needs a backward that does not wait for the other rank, as NCCL's",
}


def torch_version() -> str:
    """Returns torch's version without its build (2.13.0+cpu is 2.13.0). It does not import torch."""
    return version("torch").partition("+")[0]


def recorded() -> dict[str, str]:
    """Returns the recorded verdict of each DDP test: "passes" or a reason. It is empty for an unrecorded torch."""
    first, *lines = FILE.read_text().splitlines()
    if first != _heading(torch_version()):
        return {}
    return dict(line.split(": ", 1) for line in lines)


def verdict(outcome: Outcome) -> str:
    """Returns "passes" or the reason of a failure. An error that matches no known reason is returned itself."""
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
        print("\nadd the reasons of these failures to baseline.py:", *unexplained, sep="\n")
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
