"""Tests that trainings of HF's Trainer, Lightning and Accelerate continue with the same bits after kill -9."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from drivetrain.checkpointing import Remote
from drivetrain.checkpointing.store.reading import complete_checkpoints
from frameworks import resumed_trainers as trainers


def needed(name: str) -> tuple[trainers.Train, str, int]:
    train, package, total = trainers.TRAINERS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'drivetrain[frameworks]'")
    return train, package, total


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", trainers.TRAINERS)
def test_a_killed_training_continues_with_the_same_bits(name: str, world_size: int, tmp_path: Path) -> None:
    train, package, total = needed(name)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    # In the first epoch, at the beginning of the next one, and later if alone. The last run ends the training.
    deaths = ([5, 16 // world_size, 21] if name != "huggingface" else [3, 8 // world_size, 13])[: 4 - world_size]
    runs = [(whole, total, None), *((killed, total, death) for death in deaths), (killed, total, None)]
    codes = trainers.run(train, package, runs, world_size)
    problem = trainers.errors_of(killed) + trainers.errors_of(whole)
    assert codes[0] == codes[-1] == [0] * world_size, problem
    assert [ranks[0] for ranks in codes[1:-1]] == [-signal.SIGKILL] * len(deaths), problem
    for rank in range(world_size):
        expected, found = trainers.lines_of(whole, rank), trainers.lines_of(killed, rank)
        assert set(found) == set(expected)
        assert len(found) < 3 * len(expected)


def test_a_lightning_training_that_has_ended_can_be_lengthened(tmp_path: Path) -> None:
    train, package, total = needed("lightning")
    whole, lengthened = tmp_path / "whole", tmp_path / "lengthened"
    runs = [(whole, total, None), (lengthened, total - 2, None), (lengthened, total, None)]
    assert trainers.run(train, package, runs) == [[0]] * 3, trainers.errors_of(lengthened)
    weights = [line for line in trainers.lines_of(lengthened) if "weights" in line]
    assert [line for line in trainers.lines_of(lengthened) if line != weights[0]] == trainers.lines_of(whole)


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(name: str, tmp_path: Path) -> None:
    train, package, total = needed(name)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    codes = trainers.run(train, package, [(whole, total, None), (killed, total // 2, None)], every=3)
    assert codes == [[0], [0]], trainers.errors_of(killed)
    newest = complete_checkpoints(killed / "checkpoints")[-1]
    file = next(newest.path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    codes = trainers.run(train, package, [(killed, total, None)])
    assert codes == [[0]], trainers.errors_of(killed)
    assert "a checkpoint is passed over" in trainers.errors_of(killed)
    weights = [line for line in trainers.lines_of(killed) if "weights" in line]
    assert weights[-1] == trainers.lines_of(whole)[-1]


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_a_signal_ends_the_training_and_saves_its_step(name: str, tmp_path: Path) -> None:
    train, package, total = needed(name)
    codes = trainers.run(_signaled(train), package, [(tmp_path / "run", total, None), (tmp_path / "run", total, None)])
    assert codes == [[75], [75]], trainers.errors_of(tmp_path / "run")
    steps = [json.loads(line)["step"] for line in trainers.lines_of(tmp_path / "run")]
    assert len(set(steps)) > 1


def _signaled(train: trainers.Train) -> trainers.Train:
    """Returns the training, which gets SIGTERM from itself at a batch."""
    return {"huggingface": _signaled_huggingface, "lightning": _signaled_lightning}[train.__name__]


def _signaled_huggingface(folder: Path, total: int, journal: trainers.Journal, options: dict[str, Any]) -> None:
    trainers.huggingface(folder, total, _SignalingJournal(journal), options)


def _signaled_lightning(folder: Path, total: int, journal: trainers.Journal, options: dict[str, Any]) -> None:
    trainers.lightning(folder, total, _SignalingJournal(journal), options)


class _SignalingJournal(trainers.Journal):
    def __init__(self, journal: trainers.Journal) -> None:
        self._journal = journal
        self._calls = 0

    def note(self, step: int, **values: Any) -> None:
        self._journal.note(step, **values)

    def die_at(self, step: int) -> None:
        self._calls += 1
        if self._calls == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_callbacks_refuse_what_the_trainer_has(tmp_path: Path) -> None:
    for name in ("huggingface", "lightning"):
        needed(name)
        module = importlib.import_module(f"drivetrain.checkpointing.frameworks.{name}")
        with pytest.raises(TypeError, match="model is an argument of CheckpointCallback, which takes it"):
            module.CheckpointCallback(tmp_path, model=nn.Linear(1, 1))
        with pytest.raises(ValueError, match="tiers are given, expected none"):
            module.CheckpointCallback(tmp_path, tiers=[Remote("memory://run")])
    with pytest.raises(ValueError, match="exit_code is None"):
        module.CheckpointCallback(tmp_path, exit_code=None)


def test_the_trainer_of_hugging_face_must_be_started_by_the_callback(tmp_path: Path) -> None:
    needed("huggingface")
    from transformers import Trainer, TrainingArguments

    from drivetrain.checkpointing.frameworks.huggingface import CheckpointCallback

    arguments = TrainingArguments(str(tmp_path / "trainer"), use_cpu=True, report_to="none", disable_tqdm=True)
    callback = CheckpointCallback(tmp_path / "checkpoints")
    trainer = Trainer(trainers.Model(), arguments, train_dataset=trainers.Rows(True), callbacks=[callback])
    with pytest.raises(RuntimeError, match=r"call CheckpointCallback\.train\(trainer\)"):
        trainer.train()
    with pytest.raises(TypeError, match="resume_from_checkpoint is given"):
        callback.train(trainer, resume_from_checkpoint=True)


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name, package in (("huggingface", "transformers"), ("lightning", "lightning.pytorch")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"drivetrain.checkpointing.frameworks.{name}", raising=False)
        with pytest.raises(ImportError, match="pip install"):
            importlib.import_module(f"drivetrain.checkpointing.frameworks.{name}")


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_another_number_of_ranks_is_refused(name: str, tmp_path: Path) -> None:
    train, package, total = needed(name)
    assert trainers.run(train, package, [(tmp_path / "run", 2, None)], world_size=2) == [[0, 0]]
    assert trainers.run(train, package, [(tmp_path / "run", total, None)]) == [[1]]
    assert "number of ranks is 1, expected 2 as in the checkpoint" in trainers.errors_of(tmp_path / "run")
