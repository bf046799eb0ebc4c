"""Provides small training loops for the tests of the monitor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.monitor.stream import Event, Sink


class Kept(Sink):
    """Keeps all events in memory."""

    name = "kept"

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    def steps(self) -> list[Event]:
        return [event for event in self.events if event["type"] == "step"]


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 4))


def make_batches(count: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)) for _ in range(count)
    ]


def working(work: Callable[[str], None]) -> tuple[type[nn.Linear], type[torch.optim.SGD]]:
    """Returns a model and an optimizer that call work("forward"), work("backward") and work("optimizer") there."""

    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            work("forward")
            result = super().forward(input)
            if result.requires_grad:
                result.register_hook(lambda grad: work("backward"))
            return result

    class SGD(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            work("optimizer")
            return super().step(*args, **kwargs)

    return Model, SGD


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> list[Tensor]:
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses
