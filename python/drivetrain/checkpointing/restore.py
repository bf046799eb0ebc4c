"""Finds the newest checkpoint that all ranks can read, and reads it."""

import enum
import logging
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from .preemption.agreement import Ranks
from .state.encoding import Encoder
from .state.shards import JSON, read_shards
from .state.training_state import TrainingState, names_of
from .store.errors import CheckpointError
from .store.layout import step_of
from .store.reading import Checkpoint
from .store.store import Store

_logger = logging.getLogger("drivetrain")
_TOLD_FROM_BYTES = 1 << 30  # smaller checkpoints load in about a second


def load_newest(
    store: Store, ranks: Ranks, training: TrainingState
) -> tuple[Checkpoint, JSON, dict[str, Tensor]] | None:
    """Loads the newest checkpoint whose checksums hold on every rank, and warns of damaged newer ones.

    Returns:
        The checkpoint, this rank's state and the tensors that it refers to; None if the directory has no
        checkpoint. If the number of ranks has changed, rank r gets the state of rank r modulo the saved number.

    Raises:
        CheckpointError: Checkpoints exist and none can be read, or ranks see different directories.
    """
    local = store.directory
    complete, damaged = store.survey()
    found = {checkpoint.serial: checkpoint for checkpoint in complete}
    errors: list[CheckpointError] = [*damaged]  # those of checkpoints that were passed over come first
    passed = 0
    bound = max(found, default=0) + 1
    while True:
        mine = max((serial for serial in found if serial < bound), default=0)
        lowest, highest = ranks.agree(mine)
        if highest == 0:
            if ranks.any_true(bool(errors)):
                raise _nothing_intact(local, errors)
            return None
        if lowest == 0:
            if passed:
                raise _nothing_intact(local, errors)
            raise CheckpointError(
                f"{local} has checkpoints that rank {ranks.rank} or another rank cannot read: all ranks must see the "
                "same directory. `drivetrain ckpt verify` says which files are damaged."
            )
        if lowest != highest:
            bound = lowest + 1
            continue
        checkpoint, loaded = found[mine], None
        failure: CheckpointError | None = None
        try:
            loaded = _load(checkpoint, ranks.rank, training)
        except CheckpointError as error:
            failure = error
        if ranks.all_true(loaded is not None):
            assert loaded is not None
            newer = [one for one in damaged if (step_of(one.folder.name) or 0) > checkpoint.step]
            if ranks.rank == 0 and (reasons := [*map(str, [*errors[:passed], *newer])]):
                warnings.warn(
                    f"the training continues with step {checkpoint.step}, because newer checkpoints are damaged: "
                    f"{'; '.join(reasons)}",
                    stacklevel=4,
                )
            return checkpoint, *loaded
        failure = failure or CheckpointError(f"{checkpoint.path} cannot be read by another rank, whose log says why")
        _logger.warning("a checkpoint is passed over: %s", failure)
        errors.insert(passed, failure)
        passed += 1
        del found[mine]


def describe_run(config: Mapping[str, Any] | None, world_size: int) -> dict[str, JSON]:
    """Returns the user's configuration and the environment as JSON."""
    encoder = Encoder(lambda _: False, "")
    encoded = None if config is None else encoder.encode(_plain(dict(config)), "config")
    if encoder.tensors:
        raise TypeError(f"{next(iter(encoder.tensors))} is a tensor, expected numbers, text and containers of them")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {
        "config": encoded,
        "environment": {
            "world_size": world_size,
            "torch": str(torch.__version__),
            "drivetrain": version("drivetrain"),
            "device": device,
            "threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "DRIVETRAIN_ISA": os.environ.get("DRIVETRAIN_ISA", ""),
        },
    }


def _plain(value: Any) -> Any:
    """Returns settings with text in place of paths and members of enumerations, which are compared only."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


def differing_config(checkpoint: Checkpoint, state: Mapping[str, JSON], description: Mapping[str, JSON]) -> list[str]:
    """Returns what differs between the environment of a checkpoint and the present one.

    Raises:
        ValueError: The settings differ.
    """
    if settings := _differences("config", state["run_config"], description["config"]):
        raise ValueError(
            f"config differs from the one in {checkpoint.path}: {'; '.join(settings)}. To start another run, choose "
            "another directory. To continue this one with other settings, start it once without config"
        )
    found = _differences("environment", state["run_environment"], description["environment"])
    return [text for text in found if "world_size" not in text]


def _differences(part: str, saved: JSON, now: JSON) -> list[str]:
    """Returns a text per entry that differs, such as "config.lr: 0.1, was 0.2"; none if a side has no entries."""
    if saved is None or now is None:
        return []
    pairs = {name: (now.get(name, "absent"), saved.get(name, "absent")) for name in sorted(saved.keys() | now.keys())}
    return [f"{part}.{name}: {after}, was {before}" for name, (after, before) in pairs.items() if after != before]


def of_another_run(error: Exception, checkpoint: Checkpoint) -> ValueError:
    """Returns an error about a state that does not fit, with what to do for another run."""
    text = " ".join(str(error).split()).rstrip(".")
    return ValueError(f"{text}. To start a run other than the one in {checkpoint.path}, choose another directory")


def warn_of_differences(
    checkpoint: Checkpoint, world_size: int, resumes: bool, has_gradients: bool, differing: Sequence[str]
) -> None:
    """Warns that bits will not be the same, and why."""
    if checkpoint.world_size != world_size:
        warnings.warn(
            f"{checkpoint.path} was saved on {checkpoint.world_size} ranks and continues on {world_size}. "
            + (
                "The samples that are left follow, each once per epoch, but "
                if resumes
                else "No loader with a ResumableSampler was given, so the next samples are up to the script, and "
            )
            + "the bits of parameters and losses will differ from an uninterrupted run"
            + (". The gradients of its unfinished accumulation window are dropped" if has_gradients else ""),
            stacklevel=5,
        )
    if differing:
        warnings.warn(
            f"{checkpoint.path} was saved by another configuration: {'; '.join(differing)}. Its optimizer and "
            "scheduler states are restored as they were.",
            stacklevel=5,
        )


def _nothing_intact(directory: Path, errors: Sequence[CheckpointError]) -> CheckpointError:
    reason = f": {errors[0]}" if errors else ", as another rank says"
    more = f" ({len(errors) - 1} more are damaged)" if len(errors) > 1 else ""
    return CheckpointError(
        f"{directory} has checkpoints, and none is intact{reason}{more}. Restore a copy of them. To start from "
        "scratch on purpose, move the directory away or choose another one."
    )


def _load(checkpoint: Checkpoint, rank: int, training: TrainingState) -> tuple[JSON, dict[str, Tensor]]:
    state = checkpoint.state(rank % checkpoint.world_size)
    training.match_parameters(state)
    needed = names_of(state)
    shapes, dtypes = checkpoint.shapes(), checkpoint.dtypes()
    if lacking := sorted(set(needed) - shapes.keys()):
        raise CheckpointError(f"{checkpoint.path} lacks the tensor {lacking[0]!r}, which its state refers to")
    total, began = sum(shapes[name].numel() * dtypes[name].itemsize for name in needed), time.monotonic()
    is_told = rank == 0 and total >= _TOLD_FROM_BYTES
    if is_told:
        _logger.info("loading %.1f GiB from %s", total / 2**30, checkpoint.path)
    tensors = checkpoint.load(needed)
    if is_told:
        _logger.info("loaded %.1f GiB from %s in %.1f s", total / 2**30, checkpoint.path, time.monotonic() - began)
    tensors |= read_shards(checkpoint, state, training.region)
    return state, tensors
