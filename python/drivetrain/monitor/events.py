"""Builds the events of the stream. docs/monitoring.md documents their fields."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .. import _C
from ..phases import PHASES
from .stream import Event

VERSION = 2  # grows when a field changes its meaning or goes; readers must ignore fields that they do not know


def event(kind: str, rank: int, step: int, **fields: Any) -> Event:
    """Returns an event with the fields that all events have.

    Args:
        kind: "run", "step", "system", "advice", "straggler", "hang" or "end".
        rank: Rank that the event comes from.
        step: Number of the last step that has ended, from 1; 0 before the first.
        **fields: The fields of this kind.
    """
    return {"v": VERSION, "type": kind, "time": time.time(), "rank": rank, "step": step, **fields}


def step_event(account: _C.StepAccount, rank: int, samples: int, rates: Mapping[str, float | None]) -> Event:
    """Returns the event of a step.

    Args:
        account: Its times.
        rank: This rank.
        samples: Samples of this rank in the step.
        rates: "mfu" and "hfu", where they are known.
    """
    # A division rounds to the number that prints with nine decimals; a product with 1e-9 prints with up to 17 digits.
    wall_s = account.wall_ns / 1e9
    return event(
        "step",
        rank,
        account.step,
        wall_s=wall_s,
        phases={name: ns / 1e9 for name, ns in zip(PHASES, account.phase_ns, strict=True)},
        forwards=account.num_forwards,
        complete=account.is_complete,
        samples=samples,
        samples_per_s=samples / wall_s if samples and wall_s else None,
        **rates,
    )
