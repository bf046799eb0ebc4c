"""Builds what tests compile once per run of the suite, although the run has several test processes."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """Returns the folder `name` after `build(folder)` has filled it, in this or another test process of the run.

    A process that needs the folder while another fills it waits. After a build that failed, the next process tries.
    """
    folder = factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # the run's folder, which holds one of each process
    folder /= name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file
        finished = folder / "finished"
        if not finished.exists():
            build(folder)
            finished.touch()
    return folder
