"""Tests that trainings with callbacks of Lightning continue with the same bits, and restore in Lightning's order."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from frameworks import lightning_callbacks as cases
from frameworks import resumed_trainers as trainers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed: pip install 'drivetrain[frameworks]'",
)
EPOCHS = 4
DEATHS = [5, 20, 32, 40, 60]  # in each epoch, and at the beginning of one
AFTER_THE_LAST = 70  # in the epoch that StochasticWeightAveraging adds for batch normalization


@pytest.mark.parametrize("name", cases.CASES)
def test_a_killed_training_with_callbacks_continues_with_the_same_bits(name: str, tmp_path: Path) -> None:
    deaths = [*DEATHS, AFTER_THE_LAST] if name == "averages_of_epochs_with_norm" else DEATHS
    _compare(name, tmp_path, deaths, 1)


@pytest.mark.parametrize("name", ["averages", "averages_of_epochs_with_norm", "own_entries"])
def test_so_it_does_on_two_ranks(name: str, tmp_path: Path) -> None:
    _compare(name, tmp_path, [5, 20], 2)


def _compare(name: str, folder: Path, deaths: list[int], world_size: int) -> None:
    whole, killed = folder / "whole", folder / "killed"
    # The last run is of a training that has ended.
    runs = [(whole, EPOCHS, None), *((killed, EPOCHS, death) for death in deaths), *[(killed, EPOCHS, None)] * 2]
    codes = trainers.run(cases.case(name), "lightning", runs, world_size)
    problem = trainers.errors_of(killed) + trainers.errors_of(whole)
    assert codes[0] == codes[-2] == codes[-1] == [0] * world_size, problem
    assert [ranks[0] for ranks in codes[1:-2]] == [-signal.SIGKILL] * len(deaths), problem
    for rank in range(world_size):
        expected, found = trainers.lines_of(whole, rank), trainers.lines_of(killed, rank)
        assert found[-1] == found[-2] == expected[-1]
        assert set(found) == set(expected)


@pytest.mark.parametrize("name", ["averages", "exponential_averages", "own_entries"])
def test_a_training_with_callbacks_that_has_ended_can_be_lengthened(name: str, tmp_path: Path) -> None:
    whole, lengthened = tmp_path / "whole", tmp_path / "lengthened"
    runs = [(whole, EPOCHS, None), (lengthened, EPOCHS - 2, None), (lengthened, EPOCHS, None)]
    assert trainers.run(cases.case(name), "lightning", runs) == [[0]] * 3, trainers.errors_of(lengthened)
    weights = [line for line in trainers.lines_of(lengthened) if "weights" in line]
    assert [line for line in trainers.lines_of(lengthened) if line != weights[0]] == trainers.lines_of(whole)


@pytest.mark.filterwarnings("default")
def test_hooks_come_in_the_order_of_lightning(tmp_path: Path) -> None:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from drivetrain.checkpointing.frameworks.lightning import CheckpointCallback

    called: list[str] = []

    def fit(epochs: int, *callbacks: Any, **options: Any) -> list[str]:
        class Noting(Callback):
            def setup(self, *_: Any, **__: Any) -> None:
                called.append("setup")

            def state_dict(self) -> dict[str, Any]:
                return {"value": 1}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                called.append("load_state_dict")

            def on_load_checkpoint(self, *_: Any) -> None:
                called.append("on_load_checkpoint")

            def on_fit_start(self, *_: Any) -> None:
                called.append("on_fit_start")

            def on_sanity_check_start(self, *_: Any) -> None:
                called.append("on_sanity_check_start")

            def on_train_start(self, *_: Any) -> None:
                called.append("on_train_start")

        class Data(LightningDataModule):
            def train_dataloader(self) -> Any:
                return DataLoader(trainers.Rows(False), 31)

            def val_dataloader(self) -> Any:
                return self.train_dataloader()

            def state_dict(self) -> dict[str, Any]:
                return {"value": 1}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                called.append("data module")

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = trainers.Model()

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                called.append("module.on_load_checkpoint")

            def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
                if "on_train_start" not in called and "on_fit_start" not in called:
                    called.append("module.load_state_dict")
                return super().load_state_dict(*args, **kwargs)

            def training_step(self, rows: Any, index: int) -> Any:
                return self.net(rows)["loss"]

            def validation_step(self, rows: Any, index: int) -> None: ...

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), 0.1)

        called.clear()
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
            callbacks=[Noting(), *callbacks],
        )
        trainer.fit(Module(), datamodule=Data(), **options)
        return list(called)

    fit(1, ModelCheckpoint(tmp_path / "lightnings", save_last=True))
    expected = fit(2, ckpt_path=tmp_path / "lightnings" / "last.ckpt")
    fit(1, CheckpointCallback(tmp_path / "ours"))
    # Lightning checks the validation again after an epoch's end only. An uninterrupted training does not.
    expected.remove("on_sanity_check_start")
    assert fit(2, CheckpointCallback(tmp_path / "ours")) == expected
    with pytest.raises(ValueError, match="expected None: the callback restores the state"):
        fit(3, CheckpointCallback(tmp_path / "ours"), ckpt_path=tmp_path / "lightnings" / "last.ckpt")


@pytest.mark.filterwarnings("default")
def test_what_cannot_be_continued_is_refused_before_training(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelPruning

    from drivetrain.checkpointing.frameworks.lightning import CheckpointCallback

    class Module(LightningModule):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, size)

        def training_step(self, rows: Any, index: int) -> Any:
            return self.layer(rows).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(size: int, *callbacks: Any) -> None:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        given = [CheckpointCallback(tmp_path), *callbacks]
        trainer = Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, callbacks=given, **quiet)
        trainer.fit(Module(size), DataLoader(trainers.Rows(False), 31))

    fit(3)
    with pytest.raises(ValueError, match=r"layer\.weight.* To start a run other than the one in .* choose"):
        fit(4)
    with pytest.raises(ValueError, match="ModelPruning has use_lottery_ticket_hypothesis, expected False"):
        fit(3, ModelPruning("l1_unstructured", amount=0.2))
