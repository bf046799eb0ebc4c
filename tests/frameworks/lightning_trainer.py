"""Trains with Lightning's Trainer, which starts its second rank itself: automatic and manual optimization."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from job import ACCUMULATE, COLLECTIVE_TIMEOUT_S, MICRO_BATCH, Notes, classifier, digits, sgd, start
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Automatic(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = classifier(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        self.notes = Notes()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.notes.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        self.notes.gradient(self, is_reduced=len(self.notes.losses) % ACCUMULATE == 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class Manual(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()

    def on_after_backward(self) -> None:
        self.notes.gradient(self, is_reduced=True)


class KeepWrapper(pl.Callback):
    """Keeps the wrapper, which the Trainer removes at its end."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.wrapper = trainer.model


def fit(out: Path, kind: type[Automatic], **options: Any) -> None:
    name = kind.__name__.lower()
    keep = KeepWrapper()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)),
        max_epochs=1,
        callbacks=[keep],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
        **options,
    )
    module = kind()
    trainer.fit(module, DataLoader(digits(), batch_size=MICRO_BATCH))
    path = out / f"{name}.ckpt"
    trainer.save_checkpoint(path)
    saved = kind.load_from_checkpoint(path).state_dict()
    module.notes.report(out / f"{name}-{trainer.global_rank}.pt", keep.wrapper, saved)


out = start()
fit(out, Automatic, accumulate_grad_batches=ACCUMULATE, gradient_clip_val=1.0)
fit(out, Manual)
