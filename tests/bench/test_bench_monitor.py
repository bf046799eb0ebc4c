"""Tests the arithmetic by which `benchmarks/run.py monitor` compares accounts with torch.profiler's."""

from __future__ import annotations

import pytest

from suite.monitor import compare_with_profiler

STEP = {"data": 0.002, "forward": 0.010, "backward": 0.020, "optimizer": 0.003, "host": 0.001}
SEEN = {f"bench:{name}": 4 * seconds for name, seconds in STEP.items()} | {"aten::mm": 1.0}


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
@pytest.mark.parametrize(("factor", "met"), [(1.0, True), (1.049, True), (1.051, False), (0.951, True), (0.949, False)])
def test_each_phase_must_be_within_5_percent(phase: str, factor: float, met: bool) -> None:
    steps = [{**STEP, phase: factor * STEP[phase]}] * 4
    rows = {row.what.split()[0]: row for row in compare_with_profiler(steps, SEEN)}
    assert set(rows) == {"data", "forward", "backward", "optimizer"}
    assert {name for name, row in rows.items() if not row.met} == (set() if met else {phase})
    assert rows[phase].ratio == pytest.approx(factor)
    assert rows[phase].torch == pytest.approx(4e3 * STEP[phase])
    assert rows[phase].ours == pytest.approx(4e3 * factor * STEP[phase])
