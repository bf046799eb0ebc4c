"""Tests that the accounts of trainings by HF's Trainer, Lightning and Accelerate add up, step by step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Kept
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.monitor import Monitor
from drivetrain.monitor.trainers import TrainerMonitorCallback
from drivetrain.phases import LABELS, span

pytestmark = pytest.mark.filterwarnings("default")  # the frameworks' own warnings cannot be fixed here

BATCH, ACCUMULATE, ROWS, EPOCHS = 4, 2, 24, 2
STEPS = EPOCHS * ROWS // (BATCH * ACCUMULATE)
OF_EVALUATION = "checkpoint"  # evaluations mark themselves by a phase that no step has
NAP_S = 0.002  # sleeps last at least as long; no upper bound is ever asserted


class Rows(Dataset[Any]):
    """Rows that take a while to read."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(NAP_S)
        return {"rows": torch.full((4,), float(index))}


class Model(nn.Module):
    """Takes a while for a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        time.sleep(NAP_S)
        return {"loss": self.last(rows).square().mean()}


def check(kept: Kept, used: list[str]) -> None:
    """Checks the accounts of all steps.

    Args:
        kept: The events.
        used: Phases that take time in every step.
    """
    steps = kept.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert step["complete"]
        assert sum(step["phases"].values()) == pytest.approx(step["wall_s"], rel=1e-9)
        assert step["samples"] == BATCH * ACCUMULATE
        assert step["phases"]["forward"] >= ACCUMULATE * NAP_S
        assert [phase for phase in LABELS if phase in used and not step["phases"][phase]] == []
        assert step["phases"][OF_EVALUATION] == 0
    # A loader that fetches ahead has read some rows of a step in the step before.
    assert sum(step["phases"]["data"] for step in steps) >= EPOCHS * ROWS * NAP_S
    assert kept.events[-1]["type"] == "end"
    losses = [event for event in kept.events if event["type"] == "metrics" and "loss" in event["values"]]
    assert {event["step"] for event in losses} == {step["step"] for step in steps}
    assert all(event["values"]["loss"] > 0 for event in losses)


USED = ["data", "forward", "backward", "optimizer", "host"]


class _Stop(Exception):
    """Ends a training early."""


def arguments_of(folder: Path, **more: Any) -> Any:
    """Returns the arguments of an HF training."""
    from transformers import TrainingArguments

    sizes = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATE}
    silent = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    return TrainingArguments(str(folder), use_cpu=True, num_train_epochs=EPOCHS, **sizes, **silent, **more)


def lightning_trainer(folder: Path, **more: Any) -> Any:
    """Returns a Trainer of Lightning that shows nothing."""
    import lightning.pytorch as pl

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    silent = dict.fromkeys(names, False)
    return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **silent, **more)


@pytest.mark.parametrize("evaluates", [False, True])
def test_huggingface(tmp_path: Path, evaluates: bool) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import Trainer, TrainerCallback

    from drivetrain.monitor.huggingface import MonitorCallback

    kept = Kept()
    evaluated: list[bool] = []
    callback = MonitorCallback(to=[kept], progress=False)

    class Marked(TrainerCallback):
        """Marks evaluations, whose time must belong to no step."""

        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            evaluated.append(True)
            with span(OF_EVALUATION):
                time.sleep(NAP_S)

    how = {"eval_strategy": "steps" if evaluates else "no", "eval_steps": 2, "per_device_eval_batch_size": ROWS}
    arguments = arguments_of(tmp_path, logging_steps=1, **how)
    trainer = Trainer(
        Model(),
        arguments,
        train_dataset=Rows(),
        eval_dataset=Rows() if evaluates else None,
        callbacks=[callback, Marked()],
    )
    trainer.train()
    check(kept, USED)
    assert callback.summary().num_steps > 0
    assert bool(evaluated) == evaluates


def test_a_callback_after_a_failed_training(tmp_path: Path) -> None:
    """A training that raises leaves the monitor active, and the next one ends it."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import Trainer, TrainerCallback

    from drivetrain.monitor.huggingface import MonitorCallback

    class Fail(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise _Stop

    kept = Kept()
    callback = MonitorCallback(to=[kept], progress=False)
    arguments = arguments_of(tmp_path)
    with pytest.raises(_Stop):
        Trainer(Model(), arguments, train_dataset=Rows(), callbacks=[Fail(), callback]).train()
    Trainer(Model(), arguments, train_dataset=Rows(), callbacks=[callback]).train()
    ends = [index for index, event in enumerate(kept.events) if event["type"] == "end"]
    assert len(ends) == 2
    del kept.events[: ends[0] + 1]
    check(kept, USED)


@pytest.mark.parametrize("validates", [False, True])
def test_lightning(tmp_path: Path, validates: bool) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    import lightning.pytorch as pl

    from drivetrain.monitor.lightning import MonitorCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.net(**batch)["loss"]

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            evaluated.append(True)
            with span(OF_EVALUATION):
                time.sleep(NAP_S)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    kept = Kept()
    evaluated: list[bool] = []
    callback = MonitorCallback(to=[kept], progress=False)
    how = {"accumulate_grad_batches": ACCUMULATE, "val_check_interval": 2 if validates else None}
    trainer = lightning_trainer(tmp_path, max_epochs=EPOCHS, callbacks=[callback], **how)
    start = trainer.profiler.start
    trainer.fit(Module(), DataLoader(Rows(), BATCH), DataLoader(Rows(), ROWS) if validates else None)
    check(kept, USED)
    assert bool(evaluated) == validates
    assert trainer.profiler.start == start


def test_lightning_ends_at_an_error(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    import lightning.pytorch as pl

    from drivetrain.monitor.lightning import MonitorCallback

    class Module(pl.LightningModule):
        def training_step(self, batch: Any, index: int) -> Tensor:
            raise _Stop

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([nn.Parameter(torch.ones(1))])

    kept = Kept()
    trainer = lightning_trainer(tmp_path, max_epochs=1, callbacks=[MonitorCallback(to=[kept], progress=False)])
    with pytest.raises(_Stop):
        trainer.fit(Module(), DataLoader(Rows(), BATCH))
    assert (kept.events[-1]["type"], kept.events[-1]["failed"]) == ("end", True)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = Model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(Rows(), BATCH)
    )
    kept = Kept()
    with Monitor(model, optimizer, loader, to=[kept], progress=False) as monitor:
        for _ in range(EPOCHS):
            for batch in monitor(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
    check(kept, USED)


@pytest.mark.parametrize("name", ["model", "optimizer", "loader"])
def test_objects_of_the_framework_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is an argument of TrainerMonitorCallback, which takes it from the fr"):
        TrainerMonitorCallback(**{name: None})
