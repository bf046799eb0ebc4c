"""Checks the options of the callbacks for Trainers, and the checkpoints that they find."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..store.reading import Checkpoint, complete_checkpoints

_OWN = ("model", "optimizer", "scheduler", "scaler", "data", "window")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError for an object that the Trainer has itself, and ValueError for tiers."""
    for name in _OWN:
        if name in options:
            raise TypeError(f"{name} is an argument of CheckpointCallback, which takes it from the Trainer: omit it")
    if options.get("tiers"):
        raise ValueError("tiers are given, expected none: the position of the Trainer is read from the directory")


def found_in(directory: Path, options: Mapping[str, Any]) -> list[Checkpoint]:
    """Returns the complete checkpoints, oldest first; none if the directory does not exist."""
    return complete_checkpoints(directory, options.get("encryption")) if directory.is_dir() else []


def check_position(checkpoint: Checkpoint, rank: int, name: str, shape: Mapping[str, int], unit: str) -> Any:
    """Returns a Trainer's own values, as they are encoded under its name in a checkpoint.

    Args:
        checkpoint: The checkpoint.
        rank: This rank.
        name: Such as "lightning.Trainer".
        shape: The numbers on which the count of `unit` depends.
        unit: In what the Trainer counts its position, such as "steps".

    Raises:
        ValueError: Something else saved the checkpoint, or the position stands for other samples here.
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
