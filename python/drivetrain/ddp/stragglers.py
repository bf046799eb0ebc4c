"""Straggler times: the seconds by which each rank delays the others in a step, from the ranks' waiting times."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .hang_reports import HangReporter


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


def delays_of(reporter: HangReporter | None, device: torch.device, group: dist.ProcessGroup) -> list[float]:
    """Returns the delays that the records of a wrapper's ranks give; see `DistributedDataParallel.stragglers`."""
    if device.type != "cpu":
        raise NotImplementedError(
            f"stragglers() is for parameters on the CPU, and these are on {device}: there a stream waits, not the host."
        )
    if reporter is None:
        if dist.get_world_size(group) == 1:
            return [0.0]
        raise RuntimeError(
            "stragglers() needs the records that ranks publish for hang reports, and report_hang_after is 0: pass "
            "seconds > 0."
        )
    return delays(reporter.wait_times())
