"""Names the phases of a training step, in the order of csrc/trace/phases.h, and marks them."""

import contextlib
from collections.abc import Iterator

from . import _C

PHASES = (
    "host",
    "data",
    "copy",
    "forward",
    "backward",
    "communication",
    "recomputation",
    "optimizer",
    "checkpoint",
)
# The order of tables, and what a reader calls each phase.
LABELS = {
    "data": "waiting for data",
    "copy": "copy to the device",
    "forward": "forward and loss",
    "backward": "backward",
    "recomputation": "recomputation",
    "communication": "exposed communication",
    "optimizer": "clipping and optimizer",
    "checkpoint": "checkpoint",
    "host": "everything else",
}


def number_of(phase: str) -> int:
    """Returns the number of a phase in the native trace.

    Raises:
        ValueError: There is no phase of that name.
    """
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}, expected one of {', '.join(PHASES)}")
    return PHASES.index(phase)


@contextlib.contextmanager
def span(phase: str) -> Iterator[None]:
    """Attributes the time inside of the block to a phase. Does nothing while no monitor is active.

    Args:
        phase: A name of `PHASES`.

    Raises:
        ValueError: There is no phase of that name.
    """
    number = number_of(phase)
    _C.trace_begin(number)
    try:
        yield
    finally:
        _C.trace_end(number)
