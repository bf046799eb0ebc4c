"""Measures the operations of a traced step on this machine's CPU, and keeps their times."""

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
from .devices import Device
from .replay import replay_bytes, replayed_seconds
from .trace import FREE, OP, StepTrace
from .tracer import trace_steps

_REPLAY_SHARE = 0.8  # of the free memory, which a replay of the step may take
_FIGURE_S = 1.0  # for one figure of the device: some processors multiply bfloat16 a hundred times slower than float32


@dataclass
class Calibration:
    """The measurements of a trace's operations.

    Attributes:
        seconds: Time of a call, by signature.
        figures: Measured figures of the device: "peak", "memory_bandwidth", "launch_s" and "call_s".
        correction: The ratio of measured to predicted times of the model's steps.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    correction: float = 1.0


def cache_path() -> Path:
    """Returns the file that keeps measurements of this machine: of its processor, threads, torch and drivetrain."""
    facts = (processor_name(), torch.get_num_threads(), torch.__version__, version("drivetrain"), platform.node())
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "drivetrain" / f"plan-{name}.json"


def calibrate(trace: StepTrace, device: Device, seconds: float = 30.0, cache: Path | None = None) -> Calibration:
    """Measures the operations of a trace in the order of the step.

    If the step does not fit the free memory or the time, the measured figures of the machine predict its operations.
    The first plan of a machine takes some seconds more. `cache` keeps measurements for later plans.

    Raises:
        ValueError: The device is not a CPU.
        OSError: The cache cannot be written.
    """
    if device.kind != "cpu":
        raise ValueError(f"calibrate measures this machine's CPU, and the plan is for {device.name}: leave it out")
    kept = _read(cache)
    if "figures" not in kept:
        kept["figures"] = _figures()
    in_steps: dict[str, dict[str, float]] = kept.setdefault("steps", {})
    order = [_key(trace, op.signature) for op in trace.last_step() if op.signature >= 0]
    step = hashlib.sha256("".join(order).encode()).hexdigest()[:24]
    if step not in in_steps and replay_bytes(trace) <= _REPLAY_SHARE * host_memory().usable:
        in_place = replayed_seconds(trace, time.monotonic() + seconds)
        if in_place:
            in_steps[step] = {_key(trace, signature): of_call for signature, of_call in in_place.items()}
    if cache is not None:
        _write(cache, kept)
    measured = in_steps.get(step, {})
    found = {signature: measured.get(_key(trace, signature)) for signature in range(len(trace.signatures))}
    return Calibration({signature: of_call for signature, of_call in found.items() if of_call}, kept["figures"])


def _key(trace: StepTrace, signature: int) -> str:
    op, arguments, _ = trace.signatures[signature]
    return hashlib.sha256(f"{op}{arguments}".encode()).hexdigest()[:24]


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


def processor_name() -> str:
    """Returns the name of this machine's processor."""
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
