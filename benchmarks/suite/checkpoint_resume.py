"""Counts the losses that stay bit-equal after a resume: the Trainers' own checkpoints and drivetrain's callbacks."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.bench.measure import Row
from drivetrain.data import ResumableSampler

STEPS, STOP = 20, 10  # the run is stopped and resumed within the second epoch
ROWS, BATCH = 28, 4

Losses = dict[int, float]  # by step
Train = Callable[[Path, bool, int | None], Losses]  # folder, with drivetrain's callback, the step to stop before


def run(folder: Path) -> list[Row]:
    """Returns a row per installed framework. The dataset adds random noise, as augmentations do."""
    trainers: dict[str, tuple[str, Train]] = {
        "transformers": ("HF's Trainer", _huggingface),
        "lightning": ("Lightning's Trainer", _lightning),
    }
    return [
        _row(name, train, folder / package)
        for package, (name, train) in trainers.items()
        if importlib.util.find_spec(package) is not None
    ]


def _row(name: str, train: Train, folder: Path) -> Row:
    same = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the frameworks' own calls
        for is_ours in (False, True):
            whole = train(folder / f"whole-{is_ours}", is_ours, None)
            train(folder / f"stopped-{is_ours}", is_ours, STOP)
            resumed = train(folder / f"stopped-{is_ours}", is_ours, None)
            same[is_ours] = sum(resumed.get(step) == whole[step] for step in range(STOP + 1, STEPS + 1))
    what = f"losses with the same bits in the {STEPS - STOP} steps after a resume: {name} by itself"
    total = STEPS - STOP
    return Row(what, "", same[False], same[True], same[True] / total, target="all", met=same[True] == total)


class _Noisy(Dataset[Any]):
    def __init__(self, as_dict: bool) -> None:
        self._rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
        self._as_dict = as_dict

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index] + 0.1 * torch.randn(6)
        return {"rows": row} if self._as_dict else row


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 30), nn.Linear(30, 6)

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        hidden = nn.functional.dropout(self.first(rows).relu(), 0.2, self.training)
        return {"loss": (self.last(hidden) - rows).square().mean()}


class _Stopped(Exception):
    """Ends a run at a step, as a crash would."""


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def _huggingface(folder: Path, is_ours: bool, stop: int | None) -> Losses:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils import logging

    from drivetrain.checkpointing.frameworks.huggingface import CheckpointCallback

    logging.set_verbosity_error()
    losses: Losses = {}

    class Events(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop:
                raise _Stopped

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                losses[state.global_step] = logs["loss"]

    _seed()
    own = folder / "trainer"
    arguments = TrainingArguments(
        str(own),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no" if is_ours else "steps",
        save_steps=STOP,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(_Net(), arguments, train_dataset=_Noisy(True), callbacks=[Events()])
    trainer.pop_callback(PrinterCallback)
    with contextlib.suppress(_Stopped):
        if is_ours:
            CheckpointCallback(folder / "ours", every=STOP).train(trainer)
        else:
            trainer.train(resume_from_checkpoint=any(own.glob("checkpoint-*")))
    return losses


def _lightning(folder: Path, is_ours: bool, stop: int | None) -> Losses:
    import logging

    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from drivetrain.checkpointing.frameworks.lightning import CheckpointCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses: Losses = {}

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _Net()

        def training_step(self, rows: Tensor, index: int) -> Tensor:
            loss = self.net(rows)["loss"]
            losses[self.global_step + 1] = loss.item()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    class Stop(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == stop:
                raise _Stopped

    _seed()
    own = folder / "own"
    saver: Any = ModelCheckpoint(own, every_n_train_steps=STOP, save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        enable_checkpointing=not is_ours,
        callbacks=[CheckpointCallback(folder / "ours", every=STOP) if is_ours else saver, Stop()],
    )
    rows = _Noisy(False)
    loader = DataLoader(rows, BATCH, sampler=ResumableSampler(rows) if is_ours else None, shuffle=not is_ours)
    last = own / "last.ckpt"
    with contextlib.suppress(_Stopped):
        trainer.fit(Module(), loader, ckpt_path=str(last) if last.exists() and not is_ours else None)
    return losses
