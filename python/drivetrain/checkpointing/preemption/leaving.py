"""Says on stderr how to continue after a preemption, and in the log what a rank waits for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NAMED_AFTER_S = 20.0  # a wait for another rank, so that a script that hangs shows why within half a minute


def say_how_to_continue(reason: str | None, steps: int, directory: Path) -> None:
    """Writes on stderr why the process ends, how far the run is, and how to continue."""
    reason = reason or "another rank has it"
    file = reason.removeprefix("the file ").removesuffix(" exists")
    start = "Start" if file == reason else f"Delete {file}, then start"
    saved = f"Step {steps} is saved in {directory}" if steps else "No step was made"
    sys.stderr.write(
        f"drivetrain ends this process on a notice: {reason}. {saved}. {start} the script again to continue.\n"
    )
    sys.stderr.flush()


@contextmanager
def named_wait(describe: Callable[[], str | None], log: Callable[[str], None], limit: float) -> Iterator[None]:
    """Logs what the block waits for, if it takes long and `describe` returns a text then. It waits `limit` seconds."""

    def name() -> None:
        if (text := describe()) is not None:
            log(text)

    timer = threading.Timer(min(_NAMED_AFTER_S, limit / 2), name)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
