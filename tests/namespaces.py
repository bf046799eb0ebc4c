"""Finds out whether this user may make namespaces, in which tests run containers and hosts."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from faults.hosts import IPV4, Hosts


def needs_namespaces(*command: str) -> None:
    """Skips the test if this user may not make namespaces."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no program {command[0]} here")
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if run.returncode != 0:
        pytest.skip(f"not permitted here: {' '.join(command)}: {run.stderr.strip()}")


@contextmanager
def simulated_hosts(count: int, networks: Sequence[str] = (IPV4,)) -> Iterator[Hosts]:
    """Makes hosts, or skips the test if this user may not."""
    hosts = Hosts(count, networks)
    try:
        hosts.__enter__()
    except PermissionError as error:
        pytest.skip(str(error))
    try:
        yield hosts
    finally:
        hosts.__exit__(None, None, None)
