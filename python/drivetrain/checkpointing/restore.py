"""Finds the newest checkpoint that all ranks can read, and reads it with a progress bar."""

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
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from .preemption.agreement import Ranks
from .state.encoding import Encoder
from .state.shards import JSON, read_shards
from .state.training_state import TrainingState, names_of
from .store.errors import CheckpointError, EncryptionError
from .store.layout import step_of
from .store.reading import Checkpoint
from .tiers import Tiers

_logger = logging.getLogger("drivetrain")
_BYTES_AT_ONCE = 256 << 20
_SHOWN_FROM_BYTES = 1 << 30  # smaller checkpoints load before a bar could help


def load_newest(
    tiers: Tiers, ranks: Ranks, training: TrainingState
) -> tuple[Checkpoint, JSON, dict[str, Tensor]] | None:
    """Loads the newest checkpoint of all tiers whose checksums hold on every rank, and warns of damaged newer ones.

    Returns:
        The checkpoint, this rank's state and the tensors that it refers to; None if the directory has never had a
        checkpoint. If the number of ranks has changed, rank r gets the state of rank r modulo the saved number.

    Raises:
        CheckpointError: Checkpoints exist and none can be read, or ranks see different directories.
        EncryptionError: The key of the newest checkpoint is missing.
    """
    local = tiers.store.directory
    complete, damaged = tiers.store.survey()
    found = {checkpoint.serial: checkpoint for checkpoint in complete}
    errors: list[CheckpointError] = [*damaged]  # those of checkpoints that were passed over come first
    passed, fetched = 0, set()
    bound = max(found, default=0) + 1
    while True:
        mine = max((serial for serial in found if serial < bound), default=0)
        lowest, highest = ranks.agree(mine)
        if highest == 0:
            if ranks.any_true(bool(errors)):
                raise _nothing_intact(local, errors)
            tiers.check_new()
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
            if ranks.rank == 0 and (reasons := [*map(str, [*errors[:passed], *newer]), *tiers.damaged]):
                warnings.warn(
                    f"the training continues with step {checkpoint.step}, because newer checkpoints are damaged: "
                    f"{'; '.join(reasons)}",
                    stacklevel=4,
                )
            tiers.continue_with(checkpoint)
            return checkpoint, *loaded
        is_locked = isinstance(failure, EncryptionError)
        failure = failure or CheckpointError(f"{checkpoint.path} cannot be read by another rank, whose log says why")
        if ranks.any_true(is_locked):
            raise failure  # a missing key must not bring back an older state silently
        older = max((serial for serial in found if serial < mine), default=0)
        if mine not in fetched and tiers.fetch(older, mine):
            fetched.add(mine)
            _logger.warning("%s is damaged, and a remote copy takes its place: %s", checkpoint.path, failure)
            found |= {checkpoint.serial: checkpoint for checkpoint in tiers.store.survey().complete}
            continue
        _logger.warning("a checkpoint is passed over: %s", failure)
        errors.insert(passed, failure)
        passed += 1
        del found[mine]


def describe_run(config: Mapping[str, Any] | None, world_size: int) -> dict[str, JSON]:
    """Returns the user's configuration and the environment as JSON."""
    encoder = Encoder(lambda _: False, "")
    encoded = encoder.encode(_plain(dict(config or {})), "config")
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


def differing_config(
    checkpoint: Checkpoint, state: Mapping[str, JSON], description: Mapping[str, JSON], run: str | None
) -> list[str]:
    """Returns a text per difference of the settings and the environment, such as "config.lr: 0.1, was 0.2"."""
    found = []
    for part, now in description.items():
        saved = state[f"run_{part}"]
        for name in sorted(saved.keys() | now.keys()):
            before, after = saved.get(name, "absent"), now.get(name, "absent")
            if before != after and "world_size" not in name:
                found.append(f"{part}.{name}: {after}, was {before}")
    if run is None and (settings := [text for text in found if text.startswith("config.")]):
        cure = f"run={checkpoint.run!r}" if checkpoint.run else "a name as `run`"
        raise ValueError(
            f"config differs from the one in {checkpoint.path}: {'; '.join(settings)}. To start another run, choose "
            f"another directory. To continue this one with other settings, pass {cure} to Checkpointer"
        )
    return found


def of_another_run(error: Exception, checkpoint: Checkpoint) -> ValueError:
    """Returns an error about a state that does not fit, with what to do for another run."""
    text = " ".join(str(error).split()).rstrip(".")
    return ValueError(f"{text}. To start a run other than the one in {checkpoint.path}, choose another directory")


def warn_of_differences(
    checkpoint: Checkpoint,
    world_size: int,
    resumes: bool,
    has_gradients: bool,
    differing: Sequence[str],
    keeps_bits: bool = False,
) -> None:
    """Warns that bits will not be the same, and why."""
    if checkpoint.world_size != world_size and not (resumes and keeps_bits):
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
    state = training.wanted(checkpoint, checkpoint.state(rank % checkpoint.world_size))
    needed = set(names_of(state))
    shapes, dtypes = checkpoint.shapes(), checkpoint.dtypes()
    if lacking := sorted(needed - shapes.keys()):
        raise CheckpointError(f"{checkpoint.path} lacks the tensor {lacking[0]!r}, which its state refers to")
    sizes = {name: shapes[name].numel() * dtypes[name].itemsize for name in shapes if name in needed}
    tensors: dict[str, Tensor] = {}
    total, console, began = sum(sizes.values()), Console(stderr=True), time.monotonic()
    is_told = rank == 0 and total >= _SHOWN_FROM_BYTES
    columns = "loading {task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    is_hidden = not (is_told and console.is_terminal)
    if is_told:
        _logger.info("loading %.1f GiB from %s", total / 2**30, checkpoint.path)
    with Progress(
        *columns, console=console, transient=True, disable=is_hidden, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task, waiting = bar.add_task(checkpoint.path.name, total=total), list(sizes)
        while waiting:
            group, nbytes = [], 0
            while waiting and nbytes < _BYTES_AT_ONCE:
                group.append(waiting.pop(0))
                nbytes += sizes[group[-1]]
            tensors.update(checkpoint.read(group))
            bar.advance(task, nbytes)
    if is_told:
        _logger.info("loaded %.1f GiB from %s in %.1f s", total / 2**30, checkpoint.path, time.monotonic() - began)
    parts = read_shards(checkpoint, state, training.region)
    tensors |= parts
    checkpoint.record_load(sum(sizes.values()) + sum(part.nbytes for part in parts.values()))
    return state, tensors
