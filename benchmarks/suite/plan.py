"""Measures the errors of `drivetrain plan` over the published set of models, and what a large plan takes."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from rich.progress import track

from drivetrain.bench.measure import Row
from drivetrain.planner.planner import plan

from .plan_models import makers, measured_peak

_MEDIAN, _PERCENTILE, _UNDER = 0.04, 0.08, 0.03  # targets of the peak's error
_LARGE_S, _LARGE_GIB = 60.0, 2.0

# A child process, so that its memory is the plan's alone.
_LARGE = """
import json, re, time
from pathlib import Path
import torch
import drivetrain
from suite.activation_models import GPT
begin = time.perf_counter()
with torch.device("meta"):
    model = GPT(depth=32, dim=4096, heads=32, length=2048, dropout=0.0, vocabulary=32000).bfloat16()
def step():
    tokens, targets = torch.randint(32000, (2, 1, 2048))
    model(tokens, targets).backward()
plan = drivetrain.plan(model, step, device="h100", world_size=64, batch=1, optimizer="AdamW", master_bits=24)
seconds = time.perf_counter() - begin
# getrusage() would also count the process that started this one.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps([seconds, peak / 2**20, plan.trace.num_parameters / 1e9]))
"""


def run(threads: int = 2) -> list[Row]:
    """Returns the rows of topic plan.

    Args:
        threads: CPU threads of torch.
    """
    torch.set_num_threads(threads)
    peaks = []
    rows: list[Row] = []
    for make in track(makers(), description="models", transient=True):
        torch.manual_seed(0)
        case = make()
        planned = plan(case.model, case.step, device="cpu")
        measured = measured_peak(case)
        peaks.append(planned.memory.peak_allocated / measured - 1)
        rows.append(_row(f"{case.name}: peak", "MiB", measured / 2**20, planned.memory.peak_allocated / 2**20))
    errors = sorted(map(abs, peaks))
    rows += [
        _gate("peak: median error", 100 * errors[len(errors) // 2], 100 * _MEDIAN),
        _gate(
            "peak: 95th percentile of the error", 100 * errors[int(0.95 * (len(errors) - 1) + 0.5)], 100 * _PERCENTILE
        ),
        _gate("peak: most that a plan is below", max(0.0, -100 * min(peaks)), 100 * _UNDER),
        *large_rows(),
    ]
    return rows


def large_rows() -> list[Row]:
    """Returns the time and the resident memory of a plan of a model of 7 B parameters on "meta"."""
    code = f"import sys; sys.path[:0] = {sys.path!r}{_LARGE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"the plan of the large model failed:\n{done.stderr}")
    seconds, gib, billions = json.loads(done.stdout.splitlines()[-1])
    name = f'{billions:.1f} B parameters on "meta"'
    return [
        _gate(f"{name}: time of the plan", seconds, _LARGE_S, "s"),
        _gate(f"{name}: resident memory", gib, _LARGE_GIB, "GiB"),
    ]


def _row(what: str, unit: str, measured: float, planned: float) -> Row:
    return Row(what, unit, measured, planned, planned / measured)


def _gate(what: str, value: float, limit: float, unit: str = "%") -> Row:
    return Row(what, unit, limit, value, target=f"<= {limit:g} {unit}", met=value <= limit)
