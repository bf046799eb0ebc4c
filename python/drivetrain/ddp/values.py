"""Checks the arguments of DistributedDataParallel that have their own values, before there is a module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .. import _C
from . import hang_reports, sharding
from .logical_ranks import parts as logical
from .transport import requested, requested_wire_dtype


def check_values(given: Mapping[str, Any]) -> None:
    """Checks the values of arguments.

    Args:
        given: Arguments of DistributedDataParallel by name; a missing one has its default.

    Raises:
        ValueError: A value is none of those that the argument takes.
        NotImplementedError: Two of the arguments do not go together.
    """
    steps = given.get("check_replicas_every", 0)
    if steps < 0:
        raise ValueError(f"check_replicas_every is {steps}, expected a number of steps, or 0: never")
    sharding.check(given.get("shard"), given.get("shard_group"), dict(given))
    logical.check(given.get("logical_ranks"), given)
    requested(given.get("transport", "auto"))
    requested_wire_dtype(given.get("wire_dtype"))
    hang_reports.limit_from(given.get("report_hang_after"))
    checked_mode(given.get("check_gradients"), given.get("spike_factor", 0.0))


# ---- The check of gradients before their reduction; csrc/ddp/gradient_check.h describes it.

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
