"""Tests the advice: the seeds' case of a slow loader, measured before and after, and each sentence."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from loops import Kept, make_batches, make_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.checkpointing import Checkpointer
from drivetrain.monitor import Monitor, Summary
from drivetrain.monitor.advice import Setup, advise
from drivetrain.phases import PHASES


class SlowDataset(Dataset[tuple[Tensor, Tensor]]):
    """Each sample takes 10 ms, as if it came from a slow disk."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.010)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.randn(4, generator=generator)


def utilization(num_workers: int, names_loader: bool = True) -> tuple[float, Monitor]:
    """Trains one epoch and returns the share of time in which the model works."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(SlowDataset(), batch_size=8, num_workers=num_workers)
    with Monitor(model, optimizer, loader if names_loader else None, progress=False) as monitor:
        for inputs, targets in monitor(loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            time.sleep(0.020)  # the model is as slow as a larger one
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return 1 - monitor.summary().share("data"), monitor


# The workers mostly sleep, so that more of them than cores are right here.
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_the_loader_case() -> None:
    before, monitor = utilization(0)
    (text,) = [text for text in monitor.advice if "waiting for data" in text]
    assert text in monitor.summary().notes
    assert "the training process loads its batches itself" in text
    advised = int(re.search(r"num_workers=(\d+)", text)[1])  # type: ignore[index]
    assert advised >= 2  # 80 ms of loading to 20 ms of training
    after, _ = utilization(advised, names_loader=False)
    assert before < 0.55
    assert after > before + 0.15


def summary_of(samples: int = 16, steps: int = 100, **seconds: float) -> Summary:
    """Returns the summary of equal steps."""
    summary = Summary()
    phases = dict.fromkeys(PHASES, 0.0) | seconds
    event = {"type": "step", "complete": True, "wall_s": sum(phases.values()), "samples": samples, "phases": phases}
    for _ in range(steps + 3):
        summary.take(event)
    return summary


@pytest.mark.parametrize(
    ("summary", "setup", "expected"),
    [
        (
            summary_of(data=0.0121, forward=0.0119, samples=10),
            Setup(num_workers=2, num_cores=8),
            "50% waiting for data: 2 workers deliver 417 samples/s, the step could take 840; num_workers=5 would do",
        ),
        (
            summary_of(data=0.030, forward=0.010),
            Setup(num_workers=1, num_cores=2),
            "75% waiting for data: 1 worker delivers 400 samples/s, the step could take 1,600; num_workers=4 would do "
            "if they mostly wait: this process may use 2 cores",
        ),
        (
            summary_of(data=0.030, forward=0.010),
            Setup(num_workers=0, num_cores=16),
            "75% waiting for data: the training process loads its batches itself and reaches 400 samples/s, the step "
            "could take 1,600; num_workers=3 would do",
        ),
        (
            summary_of(data=0.030, forward=0.010),
            Setup(),
            "75% waiting for data: the loader delivers 400 samples/s, the step could take 1,600; make it faster",
        ),
        (
            summary_of(communication=0.004, backward=0.006),
            Setup(ranks_are_even=True),
            "40% exposed communication: 4.0 ms of each step wait for gradients that backward does not hide. Two "
            "micro-batches per step under no_sync() would halve their share",
        ),
        (
            summary_of(recomputation=0.002, backward=0.008),
            Setup(),
            "20% recomputation: 2.0 ms of each step run forward operations again; a larger activation budget, or fewer "
            "checkpointed regions, removes it if memory allows",
        ),
        (
            summary_of(checkpoint=0.001, backward=0.009),
            Setup(),
            "10% checkpoint: saves take 1.0 ms per step; saving 5 times less often would bring them to 2 %",
        ),
        (
            summary_of(host=0.003, backward=0.007),
            Setup(),
            "30% of each step (3.0 ms) lies outside of loading, forward, backward and optimizer: look for printing, "
            "logging and .item() in the loop",
        ),
        (
            summary_of(host=0.003, backward=0.007),
            Setup(sees_loader=False),
            "30% of each step (3.0 ms) lies outside of forward, backward and optimizer: loop over monitor(loader), "
            "which tells how much of it waits for data",
        ),
    ],
    ids=[
        "workers",
        "cores",
        "no workers",
        "no loader",
        "communication",
        "recomputation",
        "checkpoint",
        "host",
        "no waits",
    ],
)
def test_each_sentence(summary: Summary, setup: Setup, expected: str) -> None:
    assert list(advise(summary, setup).values()) == [expected]


@pytest.mark.parametrize(
    ("summary", "setup"),
    [
        (summary_of(data=0.9, forward=0.1, steps=19), Setup()),
        (summary_of(data=0.09, forward=0.91), Setup()),
        (summary_of(data=0.5, forward=0.5, samples=0), Setup()),
        (summary_of(communication=0.5, backward=0.5), Setup(ranks_are_even=False)),
        (Summary(), Setup()),
    ],
    ids=["few steps", "small share", "no samples", "not compared", "nothing"],
)
def test_nothing_is_said_without_a_measurement(summary: Summary, setup: Setup) -> None:
    assert advise(summary, setup) == {}


def test_checkpoints_have_their_phase(tmp_path: Any) -> None:
    kept, model = Kept(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Checkpointer(tmp_path, model=model, optimizer=optimizer, every=2, exit_code=None) as ckpt,
        Monitor(model, optimizer, to=[kept], progress=False) as monitor,
    ):
        for inputs, _ in monitor(make_batches(4)):
            model(inputs).sum().backward()
            optimizer.step()
            ckpt.step()
    assert len(kept.steps()) == 4
    assert all(step["phases"]["checkpoint"] > 0 for step in kept.steps())
