"""Measures the operations of a traced step on this machine's CPU: their time, and the memory that kernels take."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..memory import host_memory
from .devices import Device, with_figures
from .replay import CALL_ERRORS, UNSAFE, replay_bytes, replayed_seconds
from .timing import op_seconds
from .trace import FREE, OP, Signature, StepTrace, TensorSpec
from .tracer import trace_steps
from .workspaces import arguments_for, workspace

_COLD_BYTES = 64 << 20  # arguments take turns over so many bytes, so that caches do not hold them
_MAX_COPIES = 16
_LEAST_RUNS = 3
_MOST_RUNS = 25
_REPLAY_SHARE = 0.8  # of the free memory, which a replay of the step may take
_FIGURE_S = 1.0  # for one figure of the device: some processors multiply bfloat16 a hundred times slower than float32
_RUN_S = 0.02  # time for one operation, unless its least number of runs takes longer


@dataclass
class Calibration:
    """The measurements of a trace's operations, by signature.

    Attributes:
        seconds: Time of a call.
        workspaces: The most bytes that a call holds at a time, results included; 0: no more than these.
        figures: Measured figures of the device: "peak", "memory_bandwidth", "launch_s" and "call_s".
        correction: The ratio of measured to predicted times of the model's steps.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    workspaces: dict[int, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    correction: float = 1.0

    def device(self, device: Device) -> Device:
        """Returns the device with the measured figures."""
        return with_figures(device, self.figures) if self.figures else device


def cache_path() -> Path:
    """Returns the file that keeps measurements of this machine: of its processor, threads, torch and drivetrain."""
    facts = (_processor(), torch.get_num_threads(), torch.__version__, version("drivetrain"), platform.node())
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "drivetrain" / f"plan-{name}.json"


def calibrate(trace: StepTrace, device: Device, seconds: float = 30.0, cache: Path | None = None) -> Calibration:
    """Measures the operations of a trace alone, the most expensive first, and then in the order of the step.

    The times measured in the order of the step count, unless the step does not fit this machine's free memory or the
    time limit.

    Args:
        trace: The steps.
        device: The table's device of kind "cpu".
        seconds: The most time that this takes, besides some seconds for the first plan of a machine. Operations that
            are not reached keep their predicted time.
        cache: A file that keeps measurements for later plans; None: nothing is kept.

    Raises:
        ValueError: The device is not a CPU.
        OSError: The cache cannot be written.
    """
    if device.kind != "cpu":
        raise ValueError(f"calibrate measures this machine's CPU, and the plan is for {device.name}: leave it out")
    kept = _read(cache)
    if "figures" not in kept:
        kept["figures"] = _figures()
    deadline = time.monotonic() + seconds
    found = Calibration(figures=kept["figures"])
    measured: dict[str, list[float]] = kept.setdefault("ops", {})
    predicted: dict[int, float] = {}
    for op in trace.last_step():
        if op.signature >= 0:
            seconds_of_op = op_seconds(op, found.device(device), {})
            predicted[op.signature] = predicted.get(op.signature, 0.0) + seconds_of_op
    keys = {signature: _key(trace.signatures[signature]) for signature in predicted}
    half = deadline - seconds / 2  # the rest is for the step as a whole
    for signature in sorted(predicted, key=lambda index: -predicted[index]):
        if keys[signature] not in measured and time.monotonic() <= half:
            measured[keys[signature]] = list(_measure(trace.signatures[signature]) or ())
    in_steps: dict[str, dict[str, float]] = kept.setdefault("steps", {})
    step = _step_key(trace, keys)
    fits = replay_bytes(trace) <= _REPLAY_SHARE * host_memory().usable
    is_short = sum(predicted.values()) <= deadline - time.monotonic()
    if step not in in_steps and fits and is_short and (in_place := replayed_seconds(trace, deadline)):
        in_steps[step] = {keys[signature]: of_call for signature, of_call in in_place.items()}
    for signature in predicted:
        if of_op := measured.get(keys[signature]):
            found.seconds[signature], found.workspaces[signature] = of_op[0], int(of_op[1])
        if keys[signature] in in_steps.get(step, {}):
            found.seconds[signature] = in_steps[step][keys[signature]]
    if cache is not None:
        _write(cache, kept)
    return found


def _step_key(trace: StepTrace, keys: dict[int, str]) -> str:
    """Returns a key for the operations of the last step and their order."""
    order = [keys[op.signature] for op in trace.last_step() if op.signature >= 0]
    return hashlib.sha256("".join(order).encode()).hexdigest()[:24]


def _read(cache: Path | None) -> dict[str, Any]:
    if cache is None or not cache.exists():
        return {}
    try:
        kept = json.loads(cache.read_text())
    except ValueError:  # a damaged file is measured again
        return {}
    return kept if isinstance(kept, dict) else {}


def _write(cache: Path, kept: dict[str, Any]) -> None:
    """Replaces the cache as a whole, so that another process never reads a part of it."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    draft = cache.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(kept))
    draft.replace(cache)


def _key(signature: Signature) -> str:
    return hashlib.sha256(f"{signature.op}{signature.arguments}".encode()).hexdigest()[:24]


def _measure(signature: Signature) -> tuple[float, int] | None:
    """Returns the median seconds and the workspace of a call; None if it cannot run on made-up values."""
    if signature.op._schema.name in UNSAFE:
        return None
    specs = [argument for argument in signature.arguments if isinstance(argument, TensorSpec)]
    num_bytes = sum(
        spec.dtype.itemsize
        * math.prod(size if stride else 1 for size, stride in zip(spec.shape, spec.stride, strict=True))
        for spec in specs
    )
    copies = max(1, min(_MAX_COPIES, _COLD_BYTES // max(1, num_bytes)))
    try:
        with torch.no_grad():
            calls = [arguments_for(signature) for _ in range(copies)]
            held = workspace(signature, calls[0])
            times: list[float] = []
            begin = time.perf_counter()
            while len(times) < _LEAST_RUNS or (len(times) < _MOST_RUNS and time.perf_counter() - begin < _RUN_S):
                args, kwargs = calls[len(times) % copies]
                start = time.perf_counter()
                signature.op(*args, **kwargs)
                times.append(time.perf_counter() - start)
    except CALL_ERRORS:
        return None  # the roofline counts instead
    return statistics.median(times), held


def _figures() -> dict[str, Any]:
    """Measures products, bandwidth and the time of a call."""
    a = torch.rand(1024, 1024)
    matmul = 2 * 1024**3 / _median(lambda: torch.mm(a, a))
    half = a.bfloat16()
    matmul_half = 2 * 1024**3 / _median(lambda: torch.mm(half, half))
    big, other = torch.ones(1 << 24), torch.ones(1 << 24)
    bandwidth = 12 * (1 << 24) / _median(lambda: big.add_(other, alpha=0.5))
    small = torch.ones(8)
    launch = _median(lambda: small.add(small), runs=2000)
    return {
        "peak": {"float32": matmul, "tf32": matmul, "bfloat16": matmul_half, "float16": matmul_half},
        "matmul_share": 0.9,
        "memory_bandwidth": bandwidth,
        "launch_s": launch,
        "call_s": _call_seconds(),
    }


def _call_seconds() -> float:
    """Measures what modules and autograd add to an operation, by a model whose kernels take next to nothing."""
    layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(20)]
    model = nn.Sequential(*layers)
    batch = torch.rand(4, 16)

    def step() -> None:
        model(batch).sum().backward()
        model.zero_grad()

    trace = trace_steps(model, step)
    ops = trace.last_step()
    for _ in range(5):
        step()
    # So small kernels run on this thread alone, and to its time other programs add next to nothing. But a look at this
    # clock may take a microsecond, which the replay counts at each call and at each release of memory.
    clock = time.thread_time
    look = _median(clock, runs=1000, clock=clock) / 2
    looks = sum(1 for event in trace.events[trace.begin_of_last_step() :] if event.kind in (OP, FREE))
    rest = []
    for _ in range(5):
        whole = _median(step, runs=40, clock=clock)
        of_call = replayed_seconds(trace, math.inf, clock)
        rest.append(whole - sum(of_call.get(op.signature, 0.0) for op in ops) + looks * look)
    return max(0.0, statistics.median(rest)) / len(ops)


def _median(call: Any, runs: int = 15, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the median seconds of some calls, or of fewer if they take long."""
    times: list[float] = []
    deadline = clock() + _FIGURE_S
    while len(times) < runs and (not times or clock() < deadline):
        begin = clock()
        call()
        times.append(clock() - begin)
    return statistics.median(times)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def corrected(kept: Path, key: str, ratio: float | None = None) -> float:
    """Returns the kept ratio of measured to predicted step times of a model, after setting it where one is given."""
    cache = _read(kept)
    ratios = cache.setdefault("ratios", {})
    if ratio is not None:
        ratios[key] = ratio
        _write(kept, cache)
    return float(ratios.get(key, 1.0))


def fingerprint(trace: StepTrace) -> str:
    """Returns a key for the model of a trace and how it is trained, whatever its batch size."""
    parameters = [(p.name, p.shape, str(p.dtype)) for p in trace.parameters]
    calls = Counter((op.name, op.dtype) for op in trace.last_step())  # autocast and checkpoints change them
    facts = (parameters, sorted(calls.items()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
