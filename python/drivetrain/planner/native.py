"""Stands in for drivetrain's native steps while a step is traced, because they need memory with values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..optim.engine import Engine
from ..optim.report import states_of_step

if TYPE_CHECKING:
    from .recorder import Recorder


class NativeSteps:
    """Makes steps of drivetrain's optimizers record the states that they would allocate, as a context manager.

    Args:
        recorder: Takes the records.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: set[tuple[int, str]] = set()
        self._original: Any = None

    def __enter__(self) -> NativeSteps:
        def step(engine: Engine, closure: Any = None) -> Any:
            return self._step(engine, closure)

        self._original = Engine.step
        Engine.step = step  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Engine.step = self._original  # type: ignore[method-assign]

    def _step(self, engine: Engine, closure: Any) -> Any:
        optimizer = engine.optimizer
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = 0
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                there = optimizer.state.get(param, {})
                moved += 3 * param.numel() * param.element_size()
                for name, size in states_of_step(engine, param, group).items():
                    moved += 2 * size
                    key = (id(param), name)
                    if name not in there and key not in self._known:
                        self._known.add(key)
                        self._recorder.allocate(size, param, name)
        self._recorder.native_op(f"drivetrain::{type(optimizer).__name__}", moved)
        return loss
