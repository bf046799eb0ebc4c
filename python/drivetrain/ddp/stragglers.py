"""Straggler times: the seconds by which each rank delays the others in a step, from the ranks' waiting times."""

import math
from collections.abc import Sequence


def delays(waits: Sequence[float | None]) -> list[float]:
    """Returns by how much each rank delays the others.

    The rank that arrives last waits least. The delay of a rank is the longest wait over ranks minus its own.

    Args:
        waits: Seconds per step that each rank waits; None for a rank that has published nothing.

    Returns:
        Seconds per step for every rank; nan where the wait is None.
    """
    longest = max((wait for wait in waits if wait is not None), default=0.0)
    return [math.nan if wait is None else longest - wait for wait in waits]
