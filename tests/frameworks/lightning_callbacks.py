"""Trains with callbacks of Lightning that change weights, schedules and checkpoints, and records every loss."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain.data import ResumableSampler
from frameworks.resumed_trainers import BATCH_SIZE, Journal, Rows, Train, bits_of


def averages() -> list[Any]:
    from lightning.pytorch.callbacks import WeightAveraging

    return [WeightAveraging()]


def exponential_averages() -> list[Any]:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return [EMAWeightAveraging(decay=0.8, update_every_n_steps=2, update_starting_at_step=5)]


def averages_of_epochs() -> list[Any]:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return [StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=3)]


def unfreezing() -> list[Any]:
    from lightning.pytorch.callbacks import BackboneFinetuning

    return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=True, lambda_func=_double)]


def pruning() -> list[Any]:
    from lightning.pytorch.callbacks import ModelPruning

    return [ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False)]


def accumulation() -> list[Any]:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    return [GradientAccumulationScheduler({0: 1, 1: 3, 3: 2})]


def own_entries() -> list[Any]:
    """Scales gradients by a number that it keeps in an entry of the checkpoint, and by one that it reads once."""
    from lightning.pytorch import Callback

    class Scaling(Callback):
        def __init__(self) -> None:
            self.scale, self.seen, self.factor = torch.ones(100), 0, 0.0

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["scaling"] = {"scale": self.scale, "factor": self.factor}
            assert checkpoint["global_step"] == trainer.global_step
            assert len(checkpoint["optimizer_states"]) == 1

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            self.scale = checkpoint["scaling"]["scale"].clone()
            self.factor = checkpoint["scaling"]["factor"]
            assert checkpoint["state_dict"]["net.first.weight"].equal(pl_module.net.first.weight)
            assert checkpoint["optimizer_states"][0]["param_groups"]

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.factor = self.factor if self.seen else 2.0

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.seen += not trainer.sanity_checking

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            for param in pl_module.parameters():
                param.grad.mul_(self.scale[0] * self.factor * (1 - 0.001 * pl_module.calls))
            self.scale = 0.98 * self.scale + 0.01 * self.seen
            pl_module.calls += 1

    return [Scaling()]


def _double(epoch: int) -> int:
    return 2


class Net(nn.Module):
    """Has dropout, which draws random numbers, and batch normalization where a case asks for it."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 30), nn.Linear(30, 2)
        self.norm = nn.BatchNorm1d(30) if has_norm else nn.Identity()

    def forward(self, rows: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(rows)).relu(), 0.2, self.training)
        return (self.last(hidden) - rows[:, :2]).square().mean()


# Callbacks, whether the model has batch normalization, and whether a scheduler is configured.
CASES = {
    "averages": (averages, True, True),
    "exponential_averages": (exponential_averages, True, False),
    "averages_of_epochs": (averages_of_epochs, False, False),
    "averages_of_epochs_with_norm": (averages_of_epochs, True, True),
    "unfreezing": (unfreezing, True, False),
    "pruning": (pruning, True, True),
    "accumulation": (accumulation, True, True),
    "own_entries": (own_entries, True, True),
}


def case(name: str) -> Train:
    """Returns how to train `total` epochs with the callbacks of a case, last in the list or first."""
    return partial(_train, name)


def _train(name: str, folder: Path, total: int, journal: Journal, options: dict[str, Any]) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from drivetrain.checkpointing.frameworks.lightning import CheckpointCallback

    callbacks, has_norm, has_scheduler = CASES[name]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = Net(has_norm), 0
            if name == "unfreezing":
                self.backbone = self.net.first

        def training_step(self, rows: Tensor, index: int) -> Tensor:
            loss = self.net(rows)
            rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
            step = self.trainer.fit_loop.epoch_loop.total_batch_idx
            journal.note(step, epoch=self.trainer.current_epoch, loss=loss.item(), rates=rates, steps=self.global_step)
            return loss

        def on_after_backward(self) -> None:
            journal.die_at(self.trainer.fit_loop.epoch_loop.total_batch_idx)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if self.trainer.fit_loop._skip_backward:
                journal.die_at(self.trainer.fit_loop.epoch_loop.total_batch_idx)

        def validation_step(self, rows: Tensor, index: int) -> None:
            journal.note(-1, validated=self.net(rows).item(), steps=self.global_step)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["calls"] = self.calls

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.calls = checkpoint["calls"]

        def configure_optimizers(self) -> Any:
            params = [param for param in self.parameters() if param.requires_grad]
            optimizer = torch.optim.SGD(params, 0.02, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)] if has_scheduler else []

    torch.manual_seed(0)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ours = CheckpointCallback(folder / "checkpoints", **{"every": 1, "timeout": 60.0, **options})
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp_find_unused_parameters_true" if world_size > 1 else "auto",
        max_epochs=total,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[*callbacks(), ours],
    )
    rows, module = Rows(False), Module()
    rank = {"num_replicas": world_size, "rank": int(os.environ.get("RANK", "0"))}
    loader = DataLoader(rows, BATCH_SIZE, sampler=ResumableSampler(rows, **rank))
    trainer.fit(module, loader, DataLoader(rows, batch_size=31))
    journal.note(-2, weights=bits_of(module))
