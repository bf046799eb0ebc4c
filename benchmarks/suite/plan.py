"""Measures the errors of `drivetrain plan` over the published set of models, and what a large plan takes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.progress import track

from drivetrain.bench.measure import Row
from drivetrain.planner.calibrate import cache_path, corrected, fingerprint
from drivetrain.planner.planner import plan

from .plan_models import makers, measured_peak, measured_seconds

_MEDIAN, _PERCENTILE, _UNDER = 0.04, 0.08, 0.03  # targets of the peak's error
_TIME, _TIME_AFTER = 0.15, 0.05
_LARGE_S, _LARGE_GIB = 60.0, 2.0
_STEPS = 20
_LATER_S = 3.0  # of later steps; a second of them alone is up to 7 % off, as the speed of the machine drifts
_CALIBRATION_S = 30.0

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
    """Returns the rows of topic plan. Measurements of operations go into a cache of this run alone.

    Args:
        threads: CPU threads of torch.
    """
    torch.set_num_threads(threads)
    peaks, times, later = [], [], []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / cache_path().name
        for make in track(makers(), description="models", transient=True):
            torch.manual_seed(0)
            case = make()
            planned = plan(case.model, case.step, device="cpu")
            measured = measured_peak(case)
            peaks.append(planned.memory.peak_allocated / measured - 1)
            rows.append(_row(f"{case.name}: peak", "MiB", measured / 2**20, planned.memory.peak_allocated / 2**20))
            timed = planned.calibrated(_CALIBRATION_S, cache)
            seconds = measured_seconds(case, _STEPS)
            times.append(abs(timed.time.step_s / seconds - 1))
            rows.append(_row(f"{case.name}: step after calibration", "ms", 1e3 * seconds, 1e3 * timed.time.step_s))
            corrected(cache, fingerprint(timed.trace), timed.time.correction * seconds / timed.time.step_s)
            refined = planned.calibrated(0.0, cache)
            seconds = measured_seconds(case, _STEPS, least_s=_LATER_S)
            later.append(abs(refined.time.step_s / seconds - 1))
            rows.append(_row(f"{case.name}: step after {_STEPS} steps", "ms", 1e3 * seconds, 1e3 * refined.time.step_s))
    errors = sorted(map(abs, peaks))
    rows += [
        _gate("peak: median error", 100 * errors[len(errors) // 2], 100 * _MEDIAN),
        _gate(
            "peak: 95th percentile of the error", 100 * errors[int(0.95 * (len(errors) - 1) + 0.5)], 100 * _PERCENTILE
        ),
        _gate("peak: most that a plan is below", max(0.0, -100 * min(peaks)), 100 * _UNDER),
        _gate("step: largest error after calibration", 100 * max(times), 100 * _TIME),
        _gate(f"step: largest error after {_STEPS} steps", 100 * max(later), 100 * _TIME_AFTER),
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
