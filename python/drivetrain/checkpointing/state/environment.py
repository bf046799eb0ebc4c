"""Describes what the bits of a training depend on besides its state, and names what differs after a restart."""

import enum
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import PurePath
from typing import Any

import torch

from .encoding import Encoder
from .shards import JSON


def describe(config: Mapping[str, Any] | None, world_size: int) -> dict[str, JSON]:
    """Returns the user's configuration and the environment as JSON."""
    encoder = Encoder(lambda _: False, "")
    encoded = encoder.encode(_plain(dict(config or {})), "config")
    if encoder.tensors:
        raise TypeError(f"{next(iter(encoder.tensors))} is a tensor, expected numbers, text and containers of them")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {
        "config": encoded,
        "environment": {
            "world_size": world_size,
            "torch": str(torch.__version__),
            "drivetrain": version("drivetrain"),
            "device": device,
            "threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "DRIVETRAIN_ISA": os.environ.get("DRIVETRAIN_ISA", ""),
        },
    }


def _plain(value: Any) -> Any:
    """Returns settings with text in place of paths and members of enumerations, which are compared only."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


def differences(saved: Mapping[str, JSON], now: Mapping[str, JSON]) -> list[str]:
    """Returns a text per entry that differs between two results of `describe`, such as "config.lr: 0.1, was 0.2"."""
    found = []
    for part in ("config", "environment"):
        for name in sorted(saved[part].keys() | now[part].keys()):
            before, after = saved[part].get(name, "absent"), now[part].get(name, "absent")
            if before != after:
                found.append(f"{part}.{name}: {after}, was {before}")
    return found
