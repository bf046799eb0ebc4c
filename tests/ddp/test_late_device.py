"""Tests data parallelism where streams run late and the process group takes no CPU tensors.

The cases are in tests/late_device/reduce.py.
"""

import re
import subprocess
from pathlib import Path

import pytest

from warm_python import warm_python

FOLDER = Path(__file__).parents[1] / "late_device"


def test_data_parallelism(late_device: Path) -> None:
    command = [warm_python(has_whole_end=True), str(FOLDER / "reduce.py"), str(late_device)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    verdicts = re.findall(r"^(OK|BAD) ", run.stdout, re.MULTILINE)
    assert verdicts == ["OK"] * 23, run.stdout + run.stderr


@pytest.mark.parametrize(("how", "lost"), [("killed", "has ended"), ("still", "stands still")])
def test_a_lost_rank_is_named(late_device: Path, how: str, lost: str) -> None:
    command = [warm_python(has_whole_end=True), str(FOLDER / "lost_rank.py"), str(late_device), how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert f"the rank that waits names the one that {lost}" in run.stdout, run.stdout + run.stderr
