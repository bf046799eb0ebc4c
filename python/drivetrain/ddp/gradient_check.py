"""Reads the arguments of the check of gradients before their reduction; csrc/ddp/gradient_check.h describes it."""

import math
from typing import NamedTuple

import torch

from .. import _C

MODES = ("raise", "skip")


class SkippedSteps(NamedTuple):
    """Steps whose gradients were dropped on every rank.

    Attributes:
        num_steps: Their number.
        last: The finding in the last one, with ranks and parameters; "" if there was none.
    """

    num_steps: int
    last: str


def checked_mode(mode: str | None, spike_factor: float) -> tuple[str, float] | None:
    """Returns the arguments of DistributedDataParallel, None if nothing is to be checked.

    Raises:
        ValueError: One of them is wrong, or spike_factor comes alone.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"check_gradients is {mode!r}, expected None, 'raise' or 'skip'.")
    if not (math.isfinite(spike_factor) and (spike_factor == 0 or spike_factor > 1)):
        raise ValueError(f"spike_factor is {spike_factor}, expected a factor above 1, or 0: no norm is a finding.")
    if mode is None:
        if spike_factor:
            raise ValueError(f"spike_factor is {spike_factor} without check_gradients: pass 'raise' or 'skip' too.")
        return None
    return mode, float(spike_factor)


def set_gradient_check(reducer: _C.Reducer, mode: tuple[str, float] | None, device: torch.device) -> None:
    """Sets the check of a reducer.

    Raises:
        NotImplementedError: Norms are to be checked, and the parameters are not on the CPU.
    """
    if mode is None:
        return
    if mode[1] and device.type != "cpu":
        raise NotImplementedError(
            f"spike_factor is for parameters on the CPU, and these are on {device}: leave it out. check_gradients "
            "finds nan and inf there."
        )
    reducer.set_gradient_check(mode[0] == "skip", mode[1])
