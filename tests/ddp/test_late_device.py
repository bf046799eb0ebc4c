"""Tests data parallelism where streams run late and the process group takes no CPU tensors.

The cases are in tests/late_device/reduce.py.
"""

import re
import subprocess
from pathlib import Path

from warm_python import warm_python

FOLDER = Path(__file__).parents[1] / "late_device"


def test_data_parallelism(late_device: Path) -> None:
    command = [warm_python(), str(FOLDER / "reduce.py"), str(late_device)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    verdicts = re.findall(r"^(OK|BAD) ", run.stdout, re.MULTILINE)
    assert len(verdicts) > 20, run.stderr
    assert "BAD" not in verdicts, run.stdout


def test_a_lost_rank_is_named(late_device: Path) -> None:
    command = [warm_python(), str(FOLDER / "lost_rank.py"), str(late_device)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "the rank that waits names the one that has ended" in run.stdout, run.stdout + run.stderr
