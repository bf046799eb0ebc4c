"""Prices a run from the user's own figures: device hours, interruptions of Spot instances, and checkpoints."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .devices import read_toml

_HOUR_S = 3600.0
_MONTH_H = 730.0


@dataclass(frozen=True)
class Run:
    """What a run computes and keeps.

    Attributes:
        num_steps: Optimizer steps.
        checkpoint_interval_s: Seconds between checkpoints.
        checkpoints_kept: Checkpoints that are stored at a time.
    """

    num_steps: int
    checkpoint_interval_s: float = 600.0
    checkpoints_kept: int = 3

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}, expected 1 or more")
        if not self.checkpoint_interval_s > 0:
            raise ValueError(f"checkpoint_interval_s is {self.checkpoint_interval_s}, expected a number above 0")


@dataclass(frozen=True)
class Price:
    """The price of a run under one tariff.

    Attributes:
        tariff: "on_demand", "spot" or "reserved".
        hours: Wall-clock hours, with lost work and restarts.
        device_hours: Hours of all devices.
        amount: Price of the devices.
        storage: Price of the stored checkpoints.
        currency: Of both.
    """

    tariff: str
    hours: float
    device_hours: float
    amount: float
    storage: float
    currency: str

    @property
    def total(self) -> float:
        return self.amount + self.storage


def price_run(
    prices: str | os.PathLike[str] | dict[str, Any],
    device: str,
    num_devices: int,
    step_s: float,
    checkpoint_bytes: int,
    run: Run,
) -> list[Price]:
    """Prices a run under every tariff of a file.

    Args:
        prices: A TOML file, or its content; docs/plan.md shows one. Prices are per device and hour.
        device: The key of the device.
        num_devices: Number of devices.
        step_s: Seconds of a step.
        checkpoint_bytes: Bytes of a checkpoint.
        run: The run.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has no prices for the device, or an entry is missing or no number of 0 or more.
    """
    table = prices if isinstance(prices, dict) else read_toml(Path(prices))
    entry = table.get("devices", {}).get(device)
    if not isinstance(entry, dict):
        raise ValueError(f"prices has no [devices.{device}]")
    currency = str(table.get("currency", "USD"))
    per_gib_month = _number(table.get("storage", {}), "gib_month", "storage", 0.0)
    train_s = run.num_steps * step_s
    found = []
    for tariff in ("on_demand", "spot", "reserved"):
        if tariff not in entry:
            continue
        wall_s = train_s
        hourly = _number(entry, tariff, f"devices.{device}")
        if tariff == "spot":
            rate = _number(table.get("spot", {}), "interruptions_per_hour", "spot", 0.0)
            restart_s = _number(table.get("spot", {}), "restart_minutes", "spot", 5.0) * 60
            wall_s = with_interruptions(train_s, rate, run.checkpoint_interval_s, restart_s)
        hours = wall_s / _HOUR_S
        gib = run.checkpoints_kept * checkpoint_bytes / 2**30
        storage = per_gib_month * gib * hours / _MONTH_H
        found.append(Price(tariff, hours, hours * num_devices, hourly * hours * num_devices, storage, currency))
    if not found:
        raise ValueError(f"prices has none of on_demand, spot and reserved under [devices.{device}]")
    return found


def with_interruptions(train_s: float, per_hour: float, interval_s: float, restart_s: float) -> float:
    """Returns the expected seconds of a run that is interrupted at random.

    Interruptions are a Poisson process. An interval between checkpoints that is interrupted begins again after the
    restart, so that it takes (exp(rate * interval) - 1) * (1 / rate + restart) on average.

    Args:
        train_s: Seconds without interruptions.
        per_hour: Interruptions of the whole job per hour.
        interval_s: Seconds between checkpoints.
        restart_s: Seconds from an interruption to the first step after it.
    """
    if per_hour == 0:
        return train_s
    rate = per_hour / _HOUR_S
    interval = min(interval_s, train_s)
    if rate * interval > 50:
        raise ValueError(
            f"interruptions_per_hour is {per_hour} with a checkpoint every {interval_s:g} s: the run makes no "
            "progress, so save more often"
        )
    return train_s / interval * math.expm1(rate * interval) * (1 / rate + restart_s)


def _number(entry: Any, name: str, where: str, default: float | None = None) -> float:
    value = entry.get(name, default) if isinstance(entry, dict) else default
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ValueError(f"prices: {where}.{name} is {value!r}, expected a number of 0 or more")
    return float(value)
