"""Tests that a loop with Accelerate continues with the same bits from any step, and that its loaders are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.checkpointing import Checkpointer
from drivetrain.data import ResumableSampler

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")

pytestmark = pytest.mark.filterwarnings("default")  # Accelerate's own warnings cannot be fixed here

STEPS, EPOCHS = 20, 4


def train(folder: Path, stop: int) -> list[tuple[list[float], float]]:
    """Returns the rows and the loss of each step of this call, until step `stop` of all calls."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    rows: Any = torch.arange(44.0).reshape(11, 4)
    loader: DataLoader[torch.Tensor] = DataLoader(rows, batch_size=2, sampler=ResumableSampler(11))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    found = []
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    with Checkpointer(folder, every=None, **objects) as ckpt:
        for _ in range(ckpt.epoch, EPOCHS):
            for batch in loader:
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                ckpt.step()
                found.append((batch.flatten().tolist(), loss.item()))
                if ckpt.steps == stop:
                    return found
    return found


def test_any_step_continues_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", STEPS)
    assert len(whole) == STEPS
    for stop in range(1, STEPS):
        first = train(tmp_path / f"stopped-{stop}", stop)
        torch.rand(3)
        assert first + train(tmp_path / f"stopped-{stop}", STEPS) == whole, stop


def test_a_prepared_loader_is_refused(tmp_path: Path) -> None:
    loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(torch.arange(4)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"leave the loader out of accelerator\.prepare\(\)"):
        Checkpointer(tmp_path, model=nn.Linear(1, 1), data=loader)
