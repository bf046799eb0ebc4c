"""Tests saves of tensors on an accelerator, whose copies run during the training."""

from __future__ import annotations

import subprocess
from pathlib import Path

from warm_python import warm_python


def test_on_a_late_device(repository: Path, late_device: Path) -> None:
    """Runs streams in a random order, which shows missing waits, and counts waits on the host."""
    command = [warm_python(has_whole_end=True), str(repository / "tests/late_device/saves.py"), str(late_device)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "each save has the values of its step" in run.stdout
