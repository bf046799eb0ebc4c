"""Prices a run from the user's own figures: device hours, interruptions of Spot instances, and checkpoints."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .devices import read_toml

_HOUR_S = 3600.0
_MONTH_H = 730.0
_TARIFFS = ("on_demand", "spot", "reserved")


@dataclass(frozen=True)
class Run:
    """The computation and storage of a run.

    Attributes:
        num_steps: Optimizer steps.
        checkpoint_interval_s: Seconds between checkpoints.
        checkpoints_kept: Checkpoints that are stored at a time.
    """

    num_steps: int
    checkpoint_interval_s: float = 600.0
    checkpoints_kept: int = 3

    def __post_init__(self) -> None:
        for name, least in (("num_steps", 1), ("checkpoints_kept", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}, expected a whole number of {least} or more")
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
        currency: The currency of both.
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


@dataclass(frozen=True)
class Prices:
    """A user's prices for one device, per device and hour.

    Attributes:
        tariffs: Prices by tariff.
        interruptions_per_hour: Interruptions of the whole job on Spot instances.
        restart_minutes: From an interruption to the first step after it.
        gib_month: Price of a stored GiB per month.
        currency: The currency of all prices.
    """

    tariffs: dict[str, float]
    interruptions_per_hour: float = 0.0
    restart_minutes: float = 5.0
    gib_month: float = 0.0
    currency: str = "USD"


def read_prices(prices: str | os.PathLike[str] | dict[str, Any], device: str) -> Prices:
    """Reads the prices of a device, by its key, from a TOML file or its content; docs/plan.md shows one.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not TOML, it has no prices for the device, or an entry is unknown or no number of 0 or more.
    """
    name = "prices" if isinstance(prices, dict) else os.fspath(prices)
    table = prices if isinstance(prices, dict) else read_toml(Path(prices))
    _checked(table, ("currency", "devices", "spot", "storage"), name)
    devices = _section(table, "devices", name)
    if device not in devices:
        raise ValueError(f"{name} has no [devices.{device}]; it has: {', '.join(devices) or 'none'}")
    where = f"{name}: devices"
    tariffs = _numbers(_section(devices, device, where), _TARIFFS, f"{where}.{device}")
    if not tariffs:
        raise ValueError(f"{name} has none of {', '.join(_TARIFFS)} under [devices.{device}]")
    spot = _numbers(_section(table, "spot", name), ("interruptions_per_hour", "restart_minutes"), f"{name}: spot")
    storage = _numbers(_section(table, "storage", name), ("gib_month",), f"{name}: storage")
    currency = str(table.get("currency", Prices.currency))
    return Prices(tariffs, **spot, **storage, currency=currency)


def price_run(
    prices: str | os.PathLike[str] | dict[str, Any],
    device: str,
    num_devices: int,
    step_s: float,
    checkpoint_bytes: int,
    run: Run,
) -> list[Price]:
    """Prices a run under every tariff of what `read_prices` takes.

    Raises:
        OSError: The file cannot be read.
        ValueError: The prices are wrong, or interruptions leave no time between checkpoints.
    """
    table = read_prices(prices, device)
    train_s = run.num_steps * step_s
    gib = run.checkpoints_kept * checkpoint_bytes / 2**30
    found = []
    for tariff, hourly in table.tariffs.items():
        wall_s = train_s
        if tariff == "spot":
            restart_s = 60 * table.restart_minutes
            wall_s = with_interruptions(train_s, table.interruptions_per_hour, run.checkpoint_interval_s, restart_s)
        hours = wall_s / _HOUR_S
        storage = table.gib_month * gib * hours / _MONTH_H
        found.append(Price(tariff, hours, hours * num_devices, hourly * hours * num_devices, storage, table.currency))
    return found


def with_interruptions(train_s: float, per_hour: float, interval_s: float, restart_s: float) -> float:
    """Returns the expected seconds of a run that is interrupted at random.

    Interruptions are a Poisson process. An interval between checkpoints that is interrupted begins again after the
    restart, so that it takes (exp(rate * interval) - 1) * (1 / rate + restart) on average. The restart lasts from an
    interruption to the first step after it.
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


def _section(table: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"{where}: {name} is {section!r}, expected a table: [{name}]")
    return section


def _checked(entries: dict[str, Any], known: Sequence[str], where: str) -> dict[str, Any]:
    for name in entries:
        if name not in known:
            raise ValueError(f"{where} has an entry {name!r}, expected one of: {', '.join(known)}")
    return entries


def _numbers(entries: dict[str, Any], known: Sequence[str], where: str) -> dict[str, float]:
    for name, value in _checked(entries, known, where).items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ValueError(f"{where}.{name} is {value!r}, expected a number of 0 or more")
    return {name: float(entries[name]) for name in known if name in entries}
