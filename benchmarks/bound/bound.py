"""Judges the solver of activation budgets by a lower bound on the time that any plan adds to a step.

python benchmarks/bound/bound.py    (profiles the models of `benchmarks/run.py activations`; needs a C++20 compiler)
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SOURCES = (
    *(HERE / name for name in ("library.cpp", "backward_bound.cpp")),
    *(REPOSITORY / "csrc/budget/solver" / name for name in ("min_cut.cpp", "trace_index.cpp")),
    REPOSITORY / "csrc/base/check.cpp",
)
HEADERS = (*HERE.glob("*.h"), *(REPOSITORY / "csrc/budget/solver").glob("*.h"))


def bound(
    trace: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
    budget_bytes: int,
    *,
    enough_seconds: float = math.inf,
    price: float | None = None,
    num_states: int = 8000,
) -> float:
    """Returns a lower bound on the seconds that every policy within the budget adds to a step.

    Args:
        trace: The values, operations and uses, as `_C.activation_solve` takes them.
        budget_bytes: The most bytes in memory at a time during backward.
        enough_seconds: Higher bounds are not searched.
        price: Seconds per byte saved at the end of forward; by default the minimum cut's.
        num_states: States of the search at a time; more of them give higher bounds and take longer.

    Raises:
        ValueError: The trace contradicts itself.
    """
    found = float(
        _library().activation_bound(
            _numbers(trace), budget_bytes, enough_seconds, -1.0 if price is None else price, num_states
        )
    )
    if math.isnan(found):
        raise ValueError("trace contradicts itself: expected one that _C.activation_solve accepts")
    return found


def _numbers(trace: tuple[Sequence[Any], Sequence[Any], Sequence[Any]]) -> bytes:
    values, ops, uses = trace
    lines = [f"{len(values)} {len(ops)} {len(uses)}"]
    for num_bytes, can_save, can_recompute, replaces, formats in values:
        parts = [f"{form_bytes} {float(seconds)!r}" for form_bytes, seconds in formats]
        lines.append(" ".join([f"{num_bytes} {int(can_save)} {int(can_recompute)} {replaces} {len(formats)}", *parts]))
    for seconds, reads, writes in ops:
        lines.append(" ".join(map(str, [repr(float(seconds)), len(reads), *reads, len(writes), *writes])))
    lines += [f"{value} {int(is_release)}" for value, is_release in uses]
    return "\n".join(lines).encode()


@functools.cache
def _library() -> ctypes.CDLL:
    """Compiles the library into build/bound, unless these sources are already compiled there."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((*SOURCES, *HEADERS)))).hexdigest()[:16]
    path = REPOSITORY / "build" / "bound" / f"bound-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-fPIC", "-shared", "-ffp-contract=off"]
        includes = [f"-I{HERE}", f"-I{REPOSITORY / 'csrc'}"]
        unfinished = path.with_suffix(f".{os.getpid()}")
        subprocess.run([*compiler, *includes, *map(str, SOURCES), "-o", str(unfinished)], check=True, timeout=600)
        unfinished.replace(path)
    library = ctypes.CDLL(str(path))
    library.activation_bound.restype = ctypes.c_double
    library.activation_bound.argtypes = (
        *(ctypes.c_char_p, ctypes.c_int64, ctypes.c_double, ctypes.c_double, ctypes.c_size_t),
    )
    return library


class Recorded(NamedTuple):
    """A model's trace, as the solver takes it, and the bytes that a step without a budget keeps."""

    name: str
    trace: tuple[list[Any], list[Any], list[Any]]
    unplanned_bytes: int


def recorded_models() -> Iterator[Recorded]:
    """Profiles the models of `benchmarks/run.py activations` one after another, with one thread."""
    import torch

    from drivetrain.budget.trace import STORAGE_FORMATS, profile
    from suite.activation_models import cases
    from suite.activations import Variant

    torch.set_num_threads(1)
    for case in cases():
        variant = Variant.of("profiled", case)
        for _ in range(2):
            variant.step()
        trace, unplanned_bytes = profile(variant.model, variant.step, [STORAGE_FORMATS["bits"]])
        yield Recorded(case.name, trace.for_solver(), unplanned_bytes)


def main() -> None:
    """Prints each plan's added time, its lower bound and their ratio."""
    from drivetrain import _C
    from suite.activations import SHARES

    print("model and budget: planned milliseconds, lower bound, ratio")
    for recorded in recorded_models():
        for percent in SHARES:
            budget = recorded.unplanned_bytes * percent // 100
            solved = _C.activation_solve(*recorded.trace, budget)
            if not solved["is_feasible"]:
                print(f"{recorded.name}, {percent} %: no plan fits")
                continue
            planned, least = solved["seconds"], bound(recorded.trace, budget)
            print(f"{recorded.name}, {percent} %: {1e3 * planned:.2f}, {1e3 * least:.2f}, {planned / least:.3f}")


if __name__ == "__main__":
    main()
