"""Stands in for drivetrain's native steps while a step is traced, because they need memory with values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..optim import step as steps
from ..optim.engine import Engine
from ..optim.report import states_of_step

if TYPE_CHECKING:
    from .recorder import Recorder


@contextlib.contextmanager
def native_steps(recorder: Recorder) -> Iterator[None]:
    """Makes steps of drivetrain's optimizers record the states that they would allocate, inside of the block."""
    known: set[tuple[int, str]] = set()

    def step(engine: Engine, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer, moved = engine.optimizer, 0
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                there = optimizer.state.get(param, {})
                moved += 3 * param.numel() * param.element_size()
                for name, size in states_of_step(engine, param, group).items():
                    moved += 2 * size
                    if name not in there and (id(param), name) not in known:
                        known.add((id(param), name))
                        recorder.allocate(size, param, name)
        recorder.native_op(f"drivetrain::{type(optimizer).__name__}", moved)
        return loss

    plain, steps.step = steps.step, step
    try:
        yield
    finally:
        steps.step = plain
