"""Measures TraceML's overhead on the loop of `benchmarks/run.py monitor`, under TraceML's own launcher."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drivetrain.bench.measure import Row, median_interval  # the file also runs as a script

_LIMIT_S = 180
# The launcher passes variables on, and arguments in a way of its own.
_OUT, _ROUNDS = (
    "DRIVETRAIN_BENCH_OUT",
    "DRIVETRAIN_BENCH_ROUNDS",
)


def traceml_row(threads: int, rounds: int) -> Row | None:
    """Returns the row of TraceML; None, with a line on stderr that says why, if it cannot be measured.

    Args:
        threads: CPU threads of torch.
        rounds: Timed rounds without TraceML, and as many with it.
    """
    if importlib.util.find_spec("traceml_ai") is None:
        print("run.py monitor: TraceML is not measured: pip install traceml-ai", file=sys.stderr)
        return None
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "seconds.json"
        command = [sys.executable, "-m", "traceml_ai.launcher.cli", "run", __file__, "--logs-dir", f"{name}/logs"]
        environment = {**os.environ, _OUT: str(out), _ROUNDS: str(rounds), "OMP_NUM_THREADS": str(threads)}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        try:
            ran = subprocess.run(command, env=environment, cwd=name, capture_output=True, text=True, timeout=_LIMIT_S)
            said = ran.stdout + ran.stderr
        except subprocess.TimeoutExpired:
            said = f"it has not ended within {_LIMIT_S} s"
        if not out.exists():
            print(f"run.py monitor: TraceML is not measured: {said[-500:]}", file=sys.stderr)
            return None
        bare, traced = json.loads(out.read_text())
    ratio, low, high = median_interval([one / other for one, other in zip(traced, bare, strict=True)])
    row = Row("step under TraceML, against none, in one process", "ms", 1e3 * sorted(bare)[len(bare) // 2])
    row.ours, row.ratio, row.low, row.high = 1e3 * sorted(traced)[len(traced) // 2], ratio, low, high
    return row


def _measure(rounds: int) -> None:
    """Writes the seconds per step of blocks without TraceML, and then of blocks under it.

    Its patches stay once it has begun, so that blocks of both kinds cannot alternate.
    """
    from suite.monitor_training import STEPS, Training

    traceml: Any = importlib.import_module("traceml_ai")
    training = Training()

    def block() -> float:
        return training.loop(training.batches(STEPS)) / STEPS

    block()
    bare = [block() for _ in range(rounds)]
    traceml.init(mode="auto")
    plain = training.step

    def traced_step(tokens: Any) -> None:
        with traceml.trace_step(training.model):
            plain(tokens)

    training.step = traced_step  # type: ignore[method-assign]
    block()
    traced = [block() for _ in range(rounds)]
    Path(os.environ[_OUT]).write_text(json.dumps([bare, traced]))


if __name__ == "__main__":
    _measure(rounds=int(os.environ[_ROUNDS]))
