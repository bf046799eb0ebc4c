"""Answers inverse questions: the largest sizes and the smallest devices that fit, and the options that help most."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .devices import device_names, device_of

if TYPE_CHECKING:
    from .result import Plan


@dataclass(frozen=True)
class Fit:
    """A device, and how the step would run there."""

    device: str
    fits: bool
    total_bytes: int
    capacity: int
    step_s: float


@dataclass(frozen=True)
class Gain:
    """The changes that an option makes.

    Attributes:
        option: Its name, as the plan takes it.
        saved_bytes: Bytes less at the peak.
        added_s: Seconds more in a step; negative if it is faster.
        fits: True if the step fits with it.
    """

    option: str
    saved_bytes: int
    added_s: float
    fits: bool


def largest(needs: Callable[[int], int], capacity: int, start: int, limit: int) -> int:
    """Returns the largest number from 1 to `limit` whose need is no more than a capacity; 0 if 1 needs more.

    Needs grow about linearly, so it tries numbers on the line through the nearest two, and halves where that fails. It
    tries `start` first.
    """
    low, high = 0, limit + 1
    tried: dict[int, int] = {}
    guess, width = start, high - low
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        tried[guess] = needs(guess)
        low, high = (guess, high) if tried[guess] <= capacity else (low, guess)
        guess = 2 * low if high > limit else (low + high) // 2
        is_closing_in = 2 * (high - low) <= width
        width = high - low
        if len(tried) > 1 and (is_closing_in or len(tried) % 2 == 0):
            (near, least), (far, most) = (
                (each, tried[each]) for each in sorted(tried, key=lambda n: abs(n - guess))[:2]
            )
            if most != least:
                guess = int(near + (capacity - least) * (far - near) / (most - least))
    return low


def devices_that_fit(plan: Plan, devices: str | os.PathLike[str] | None) -> list[Fit]:
    """Returns all devices of the plan's kind, smallest memory first."""
    found = []
    for key in device_names(devices):
        device = device_of(key, devices)
        if device.kind == plan.device.kind:
            other = plan.but(device=device)
            found.append(Fit(key, other.memory.fits, other.memory.total, device.memory_bytes, other.time.step_s))
    return sorted(found, key=lambda fit: fit.capacity)


def gains(plan: Plan) -> list[Gain]:
    """Tries each option alone."""
    options = plan.options
    tried: dict[str, dict[str, Any]] = {}
    has_half = any(p.dtype.itemsize == 2 for p in plan.trace.parameters)
    if options.state_bits != 8 and plan.trace.bytes_of("optimizer states"):
        tried["state_bits=8"] = {"state_bits": 8}
    if has_half and options.master_bits != 24 and plan.trace.bytes_of("optimizer states"):
        tried["master_bits=24"] = {"master_bits": 24}
    if not options.release and options.accumulate == 1:
        tried["release=True"] = {"release": True}
    if options.budget is None:
        activations = plan.memory.at_peak.get("activations", 0)
        for share in (75, 50, 25):
            tried[f"budget={share}% of activations"] = {"budget": activations * share // 100}
    if options.world_size > 1 and options.shard is None:
        tried['shard="optimizer"'] = {"shard": "optimizer"}
        tried['shard="gradients"'] = {"shard": "gradients"}
    if plan.device.kind == "cuda" and not options.expandable:
        tried["expandable=True"] = {"expandable": True}
    found = []
    for name, changes in tried.items():
        try:
            other = plan.but(None, **changes)
        except ValueError:  # a budget below the smallest, or an optimizer without formats
            continue
        found.append(
            Gain(
                name,
                plan.memory.total - other.memory.total,
                other.time.step_s - plan.time.step_s,
                other.memory.fits,
            )
        )
    return sorted(found, key=lambda gain: -gain.saved_bytes)
