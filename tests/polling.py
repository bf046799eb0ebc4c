"""Waits for a condition in tests of background threads, with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 30.0


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Returns once the condition holds; raises AssertionError if it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {limit_s:g} s"
        time.sleep(0.001)
