"""Tests data parallelism where streams run late and the process group takes no CPU tensors.

The cases are in tests/late_device/reduce.py.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "late_device"
CASES = re.findall(r"^@case\ndef (\w+)", (FOLDER / "reduce.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def verdicts(late_device: Path) -> dict[str, str]:
    """Returns the failure of each case, "" if it passes."""
    command = [sys.executable, str(FOLDER / "reduce.py"), str(late_device)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    lines = re.findall(r"^(OK|BAD) (\w+)(?:: (.*))?$", run.stdout, re.MULTILINE)
    return {name: what if verdict == "BAD" else "" for verdict, name, what in lines}


@pytest.mark.parametrize("name", CASES)
def test_data_parallelism(verdicts: dict[str, str], name: str) -> None:
    assert verdicts.get(name, "there is no verdict") == ""


def test_a_lost_rank_is_named(late_device: Path) -> None:
    command = [sys.executable, str(FOLDER / "lost_rank.py"), str(late_device)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "the rank that waits names the one that has ended" in run.stdout, run.stdout + run.stderr
