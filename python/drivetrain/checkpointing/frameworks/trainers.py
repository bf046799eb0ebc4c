"""Contains what the callbacks for two Trainers share: their options, the Checkpointer, and what counts as a step."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpointer import Checkpointer
from ..store.reading import Checkpoint, complete_checkpoints

_OWN = ("model", "optimizer", "scheduler", "scaler", "data", "window")


class TrainerSteps:
    """Makes a Trainer's Checkpointer, and counts a step when the Trainer fetches the next batch: after its logging."""

    def __init__(self, directory: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        for name in _OWN:
            if name in options:
                raise TypeError(
                    f"{name} is an argument of CheckpointCallback, which takes it from the Trainer: omit it"
                )
        if options.get("tiers"):
            raise ValueError("tiers are given, expected none: the position of the Trainer is read from the directory")
        self._directory, self._options = Path(directory), options
        self._checkpointer: Checkpointer | None = None  # inside of the training
        self._is_pending = False  # a step has ended and is not counted yet

    def _complete(self) -> list[Checkpoint]:
        """Returns the complete checkpoints, oldest first; none if the directory does not exist."""
        is_there = self._directory.is_dir()
        return complete_checkpoints(self._directory, self._options.get("encryption")) if is_there else []

    def _make(self, name: str, values: Any, **objects: Any) -> Checkpointer:
        """Makes the Checkpointer, which saves the Trainer's own values under its name."""
        options = {**self._options, "extra": {**self._options.get("extra", {}), name: values}}
        self._is_pending = False
        self._checkpointer = Checkpointer(self._directory, **objects, **options)
        self._checkpointer.position.call_before_fetch(self._count)
        return self._checkpointer

    def _count(self) -> None:
        if self._is_pending:
            self._is_pending = False
            assert self._checkpointer is not None
            self._checkpointer.step()


def check_position(checkpoint: Checkpoint, rank: int, name: str, shape: Mapping[str, int], unit: str) -> Any:
    """Returns a Trainer's own values, as they are encoded under its name in a checkpoint.

    A ValueError says that something else saved it, or that a number of `shape` differs, on which its count of `unit`,
    such as steps, depends.
    """
    state: Any = checkpoint.state(rank % checkpoint.world_size)
    saved = state.get("extra", {}).get(name) if isinstance(state, dict) else None
    if saved is None:
        raise ValueError(f"{checkpoint.path} is of no {name}: choose another directory")
    for entry, value in shape.items():
        if saved[entry] != value:
            raise ValueError(
                f"{entry} is {value}, expected {saved[entry]} as in the checkpoint: the Trainer counts its position in "
                f"{unit}, which would stand for other samples"
            )
    return saved
