"""Checks the arguments of DistributedDataParallel that have their own values, before there is a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import hang_reports, sharding
from .gradient_check import checked_mode
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
