"""Tests that loops with Accelerate continue with the same bits from any step, with its loaders and with plain ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.checkpointing import Checkpointer
from drivetrain.data import ResumableSampler

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
prepare_data_loader = pytest.importorskip("accelerate.data_loader").prepare_data_loader

pytestmark = pytest.mark.filterwarnings("default")  # Accelerate's own warnings cannot be fixed here

STEPS, EPOCHS = 20, 4


class Noisy(Dataset[torch.Tensor]):
    """Rows with noise from the generator of the process that loads them."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(4)


def plain() -> DataLoader[torch.Tensor]:
    rows: Any = torch.arange(44.0).reshape(11, 4)
    return DataLoader(rows, batch_size=2, sampler=ResumableSampler(11))


def prepared(num_workers: int, **options: Any) -> Any:
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=num_workers)
    return prepare_data_loader(loader, put_on_device=False, **options)


def train(folder: Path, stop: int, make: Callable[[], Any] = plain) -> list[tuple[Any, ...]]:
    """Returns what each step of this call saw, until step `stop` of all calls.

    These are the number of the epoch, the rows, the loss, and whether a prepared loader says that the epoch ends.
    """
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loader = make()
    found = []
    with Checkpointer(folder, every=None, model=model, optimizer=optimizer, scheduler=scheduler, data=loader) as ckpt:
        for epoch in range(ckpt.epoch, EPOCHS):
            for batch in loader:
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                ckpt.step()
                is_end = getattr(loader, "end_of_dataloader", None)
                found.append((epoch, batch.flatten().tolist(), loss.item(), is_end))
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


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        (0, {}),
        (0, {"use_seedable_sampler": True}),
        (0, {"num_processes": 2, "process_index": 1, "use_seedable_sampler": True}),
        (1, {}),
    ],
    ids=["torch's order", "a seed per epoch", "the second of two ranks", "a worker"],
)
def test_a_prepared_loader_continues_with_the_same_bits(
    tmp_path: Path, num_workers: int, options: dict[str, Any]
) -> None:
    steps, make = 14, functools.partial(prepared, num_workers, **options)
    whole = train(tmp_path / "whole", steps, make)
    assert len({epoch for epoch, *_ in whole}) >= 3
    assert len(whole) <= steps
    # With a worker, noise depends on how often the worker has drawn, which is not known. Its seed is restored.
    stops = range(1, len(whole)) if num_workers == 0 else (len([epoch for epoch, *_ in whole if epoch == 0]),)
    for stop in stops:
        first = train(tmp_path / f"at-{stop}", stop, make)
        torch.rand(3)
        assert first + train(tmp_path / f"at-{stop}", steps, make) == whole, stop


def test_a_second_restart_of_a_prepared_loader(tmp_path: Path) -> None:
    make = functools.partial(prepared, 0, use_seedable_sampler=True)
    whole = train(tmp_path / "whole", 12, make)
    parts = [train(tmp_path / "parts", stop, make) for stop in (2, 3, 6, 7, 12)]
    assert [step for part in parts for step in part] == whole


def test_a_loader_whose_batches_one_rank_dispatches_is_refused(tmp_path: Path) -> None:
    loader = prepare_data_loader(DataLoader(Noisy()), put_on_device=True, dispatch_batches=True)
    with pytest.raises(TypeError, match=r"DataLoaderDispatcher.*Leave the loader out of accelerator\.prepare\(\)"):
        Checkpointer(tmp_path, model=nn.Linear(1, 1), data=loader)


def test_a_checkpoint_of_a_plain_loader_does_not_fit_a_prepared_one(tmp_path: Path) -> None:
    model, plain = nn.Linear(4, 1), DataLoader(Noisy())
    with Checkpointer(tmp_path, model=model, data=plain) as ckpt:
        for _ in plain:
            ckpt.step()
    with pytest.raises(ValueError, match="was prepared by Accelerate"):
        Checkpointer(tmp_path, model=model, data=prepare_data_loader(plain)).__enter__()
