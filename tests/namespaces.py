"""Finds out whether this user may make namespaces, in which tests run containers and hosts."""

import shutil
import subprocess

import pytest


def needs_namespaces(*command: str) -> None:
    """Skips the test if this user may not make namespaces."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no program {command[0]} here")
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if run.returncode != 0:
        pytest.skip(f"not permitted here: {' '.join(command)}: {run.stderr.strip()}")
