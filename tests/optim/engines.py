"""Runs a script of a stranger under torch's classes, under drivetrain's, and under drivetrain's in torch's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import drivetrain
from drivetrain.optim import left_to_torch

ENGINES = ("drivetrain", "install")


@contextmanager
def engine(name: str) -> Iterator[Any]:
    """Yields the module from which a script takes optimizers: drivetrain.optim, or torch.optim with its classes or
    ours."""
    before = list(left_to_torch.constructed)
    if name == "install":
        drivetrain.install(optim=True)
    try:
        yield drivetrain.optim if name == "drivetrain" else torch.optim
    finally:
        if name == "install":
            drivetrain.uninstall()
        left_to_torch.constructed[:] = before


def outcome(script: Callable[[Any], Any], optim: Any) -> Any:
    """Returns what the script returns, or the type of its exception."""
    torch.manual_seed(0)
    try:
        return script(optim)
    except Exception as error:
        if "bug in drivetrain" in str(error):
            raise
        return type(error)


def same(a: Any, b: Any) -> bool:
    """Compares nested results. Steps of torch and of drivetrain differ by a few units in the last place."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_as_torch(name: str, *scripts: Callable[[Any], Any]) -> None:
    """Fails unless each script gives under this engine what it gives under torch."""
    with engine(name) as optim:  # which takes long to install
        found = [outcome(script, optim) for script in scripts]
    with engine("torch") as optim:
        expected = [outcome(script, optim) for script in scripts]
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert same(ours, theirs), f"script {number}: {name} gives {ours}, torch {theirs}"
