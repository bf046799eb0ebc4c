"""Converts checkpoints to and from the format of torch.distributed.checkpoint (DCP)."""

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from ...optim.sharded.dtensors import is_dtensor
from ..state.saved_optimizer import load_optimizer, parameter_names
from ..state.training_state import bare, state_dicts
from ..store.errors import CheckpointError
from ..store.reading import Checkpoint


def export_dcp(checkpoint: Checkpoint, directory: str | os.PathLike[str], rank: int = 0) -> None:
    """Writes a checkpoint of a Checkpointer as torch.distributed.checkpoint reads it.

    It contains what torch's `get_state_dict` names: "model" with the module's state dict, and "optim" with "state" by
    the names of parameters and "param_groups". Optimizers are merged. "step" and "scheduler" stand next to them.

    Args:
        checkpoint: The checkpoint.
        directory: A new folder.
        rank: The rank whose buffers are written, where ranks have their own.

    Raises:
        ValueError: `directory` exists, or something else than a Checkpointer saved the checkpoint.
        CheckpointError: A checksum does not hold, or a file cannot be read.
    """
    target = Path(directory)
    if target.exists():
        raise ValueError(f"directory is {target}, which exists: choose a new folder")
    found = state_dicts(checkpoint, rank)
    state: Any = checkpoint.state(rank)
    if found is None or (state.get("parameters") is None and found["optimizer"]):
        raise ValueError(
            f"checkpoint is {checkpoint.path}, which holds no names of parameters: expected one that a Checkpointer "
            "of this version saved. Restore it with a Checkpointer and save it again."
        )
    contents = {"model": found["model"], "step": checkpoint.step, "scheduler": found["scheduler"]}
    if found["optimizer"]:
        contents["optim"] = _by_name(found["optimizer"], state["parameters"])
    partial = target.with_name(target.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    with _alone():
        state_dict_saver.save(contents, storage_writer=FileSystemWriter(partial), no_dist=True)
    partial.rename(target)


def import_dcp(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    model_key: str = "model",
    optimizer_key: str = "optim",
) -> None:
    """Loads a checkpoint of torch.distributed.checkpoint, written on any number of ranks, into a model and optimizers.

    Call it on every rank before the block of the Checkpointer. The block restores a checkpoint of its own instead if
    its directory has one, and its first save writes the imported state in drivetrain's format::

        import_dcp("old/step-1000", model, optimizer)
        with Checkpointer("runs/gpt", model=model, optimizer=optimizer) as ckpt:
            ...

    DCP stores all values but tensors with pickle: import only what you trust.

    Args:
        directory: The folder that DCP wrote.
        model: The module; plain, in a DistributedDataParallel, or sharded by `fully_shard`.
        optimizer: The optimizer, or several. They need no state yet.
        model_key: The key of the model's state dict in what was saved; "" if its names stand at the top.
        optimizer_key: The key of the optimizer's state dict, by names of parameters or by their numbers.

    Raises:
        CheckpointError: The folder is no such checkpoint, or a file cannot be read.
        ValueError: The checkpoint lacks a parameter or an optimizer state, or has one of another shape. Nothing has
            changed then, except if a file is damaged.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    reader = FileSystemReader(directory)
    try:
        metadata = reader.read_metadata()
    except (OSError, ValueError, EOFError, CheckpointException) as error:
        raise CheckpointError(f"{directory} is no checkpoint of torch.distributed.checkpoint: {error}") from error
    stored = metadata.state_dict_metadata
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {name: (name,) for name in stored}
    ours = get_model_state_dict(model)
    head = f"{model_key}." if model_key else ""
    wanted: dict[str, Any] = {head + name.removeprefix("module."): value for name, value in ours.items()}
    for name, value in wanted.items():
        _check(directory, name, value, stored)
    states = _OptimizerStates(optimizers, model, optimizer_key, stored, paths)
    with _alone():
        try:
            state_dict_loader.load(
                flat := {**wanted, **states.flat}, storage_reader=reader, no_dist=not dist.is_initialized()
            )
        except CheckpointException as error:
            raise CheckpointError(f"{directory} cannot be read: {error}") from error
    set_model_state_dict(model, {name: flat[key] for key, name in zip(wanted, ours, strict=True)})
    states.load(flat)


class _OptimizerStates:
    """The entries of a DCP checkpoint that hold states of optimizers.

    Attributes:
        flat: Tensors to load into, and None for other values, by the checkpoint's keys.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: nn.Module,
        key: str,
        stored: Mapping[str, Any],
        paths: Mapping[str, tuple[Any, ...]],
    ) -> None:
        self.flat: dict[str, Any] = {}
        self._optimizers, self._paths, self._key = optimizers, paths, key
        if not optimizers:
            return
        self._names = parameter_names(bare(model), optimizers)
        params = [param for one in optimizers for group in one.param_groups for param in group["params"]]
        flat_names = [name for names in self._names for name in names]
        found = {path[2] for path in paths.values() if path[:2] == (key, "state")}  # DCP makes numbers text
        self._is_by_number = bool(found - set(flat_names)) and all(one.isdecimal() for one in found)
        if self._is_by_number and len(optimizers) > 1:
            raise ValueError(f"optimizer has {len(optimizers)} elements, expected 1: the checkpoint numbers parameters")
        keys = [str(one) for one in range(len(params))] if self._is_by_number else flat_names
        places = dict(zip(keys, params, strict=True))
        if None in places:
            raise ValueError("optimizer has a parameter that is not in model: pass the model that it steps")
        for name, path in paths.items():
            if path[0] != key or name not in stored:
                continue
            if path[1] == "state" and path[2] not in places:
                continue  # of a parameter that is not trained here
            entry = stored[name]
            is_tensor = isinstance(entry, TensorStorageMetadata)
            self.flat[name] = _like(places[path[2]], entry) if is_tensor else None
        found = {path[2] for name, path in paths.items() if name in self.flat and path[1] == "state"}
        if found and (lacking := [name for name, param in places.items() if param.requires_grad and name not in found]):
            raise ValueError(f"optimizer has the parameter {lacking[0]!r}, for which the checkpoint has no state")
        if not self.flat:
            raise ValueError(
                f"optimizer_key is {key!r}, under which the checkpoint has nothing: its keys are " + _heads(paths)
            )

    def load(self, flat: Mapping[str, Any]) -> None:
        """Loads the values into the optimizers."""
        if not self._optimizers:
            return
        states: dict[Any, dict[str, Any]] = {}
        groups: dict[int, dict[str, Any]] = {}
        whole: list[dict[str, Any]] = []
        for name in self.flat:
            path = self._paths[name][1:]
            if path[0] == "state":
                states.setdefault(path[1], {})[".".join(map(str, path[2:]))] = flat[name]
            elif len(path) == 1:
                whole = flat[name]  # a list without tensors is stored as one value
            else:
                groups.setdefault(path[1], {})[path[2]] = flat[name]
        saved_groups = whole or [groups[index] for index in sorted(groups)]
        by_param = {str(key): group for group in saved_groups for key in group["params"]}
        for optimizer, names in zip(self._optimizers, self._names, strict=True):
            ids = iter(range(len(names)))
            state: dict[int, Any] = {}
            own: list[dict[str, Any]] = []
            for group in optimizer.param_groups:
                numbers = [next(ids) for _ in group["params"]]
                keys = [str(one) if self._is_by_number else names[one] for one in numbers]
                saved = by_param.get(str(keys[0]), {}) if keys else {}
                own.append({**_without_params(group), **_without_params(saved), "params": numbers})
                state |= {one: states[key] for one, key in zip(numbers, keys, strict=True) if key in states}
            load_optimizer(optimizer, {"state": state, "param_groups": own})


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _by_name(saved: Sequence[dict[str, Any]], names: Sequence[Sequence[str | None]]) -> dict[str, Any]:
    """Returns the state dicts of optimizers as one, with names in place of numbers."""
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for one, ours in zip(saved, names, strict=True):
        numbers = [number for group in one["param_groups"] for number in group["params"]]
        called = {number: name or f"parameter-{number}" for number, name in zip(numbers, ours, strict=True)}
        merged["state"] |= {called[number]: values for number, values in one["state"].items()}
        merged["param_groups"] += [
            {**group, "params": [called[number] for number in group["params"]]} for group in one["param_groups"]
        ]
    return merged


def _like(param: Tensor, entry: TensorStorageMetadata) -> Tensor:
    """Returns a tensor for a state: sharded as its parameter if it has the parameter's shape."""
    if is_dtensor(param) and entry.size == param.shape:
        from torch.distributed.tensor import empty

        return empty(
            entry.size,
            dtype=entry.properties.dtype,
            device_mesh=param.device_mesh,
            placements=param.placements,
        )
    device = param.device if len(entry.size) else torch.device("cpu")
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _check(directory: str | os.PathLike[str], name: str, value: Any, stored: Mapping[str, Any]) -> None:
    entry = stored.get(name)
    if entry is None:
        raise ValueError(f"model has {name!r}, which {directory} lacks: its keys begin with {_heads(stored)}")
    if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
        raise ValueError(
            f"model has {name!r} of shape {tuple(value.shape)}, expected {tuple(entry.size)} as in {directory}"
        )


def _heads(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted({repr(name.split(".")[0]) for name in names})[:8])


@contextmanager
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that one process works without a process group
        yield
