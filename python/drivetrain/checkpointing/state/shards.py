"""Describes this rank's part of DTensors and ZeRO states, and reads parts for another number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...optim.sharded.dtensors import local_part
from ...optim.sharded.pieces import params_by_key
from ..store.errors import CheckpointError
from ..store.reading import Checkpoint

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

JSON = Any  # None, bool, int, float, str, or lists and dicts of them
Region = tuple[Sequence[int], Sequence[int]]  # offset and shape
KEY = "$shard/"  # before the path of a sharded tensor, among the loaded tensors of this rank


class Shard(NamedTuple):
    """This rank's restored part of a sharded tensor, on the CPU, with the shape of the whole and its place."""

    value: Tensor
    shape: tuple[int, ...]
    path: str


def part_of(value: DTensor, path: str) -> tuple[Tensor, tuple[int, ...] | None, int]:
    """Returns this rank's part of a DTensor, without a copy.

    Returns:
        The part, the place of its first element in the whole tensor, and the global rank that saves it: ranks with
        replicas save nothing. The place is None if the part is no block of the tensor.

    Raises:
        NotImplementedError: The DTensor holds sums that are not reduced, or its mesh leaves this rank out.
    """
    mesh, coordinate = value.device_mesh, value.device_mesh.get_coordinate()
    if coordinate is None:
        raise NotImplementedError(
            f"{path} is a DTensor on {mesh}, expected a mesh that contains rank {dist.get_rank()}"
        )
    if any(place.is_partial() for place in value.placements):
        raise NotImplementedError(
            f"{path} is a DTensor with placements {tuple(value.placements)}, a sum that is not reduced: redistribute "
            "it to Replicate() or Shard(dim) before Checkpointer.step()"
        )
    places = zip(value.placements, coordinate, strict=True)
    index = tuple(0 if place.is_replicate() else at for place, at in places)
    is_block = all(place.is_replicate() or type(place).__name__ == "Shard" for place in value.placements)
    offset = tuple(region_of(value.shape, mesh, value.placements)[0]) if is_block else None
    return local_part(value).detach(), offset, int(mesh.mesh[index])


def region_of(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Region:
    """Returns the offset and the shape of this rank's part of a tensor with these placements."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return offset, local


def describe_mesh(mesh: Any) -> dict[str, JSON]:
    """Returns a device mesh as JSON."""
    names = None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names)
    return {"shape": list(mesh.mesh.shape), "names": names, "ranks": mesh.mesh.flatten().tolist()}


def marked(value: JSON, mark: str) -> Iterator[Any]:
    """Yields the content of each `mark` in an encoded value, such as the name of each "$tensor".

    Parts of a "$shard" are not looked at.
    """
    if isinstance(value, list):
        for item in value:
            yield from marked(item, mark)
    elif isinstance(value, dict):
        if mark in value:
            yield value[mark]
        elif "$shard" not in value:
            for item in value.values():
                yield from marked(item, mark)


def read_shards(
    checkpoint: Checkpoint, state: JSON, region: Callable[[str, Sequence[int]], Region]
) -> dict[str, Tensor]:
    """Reads a part of each sharded tensor of a state, from the files of all ranks that saved overlapping parts.

    It holds one whole part besides the results at most, never a whole tensor unless a region asks for it.
    """
    wanted = {record["of"]: record for record in marked(state, "$shard")}
    if not wanted:
        return {}
    pieces: dict[tuple[str, tuple[int, ...]], dict[str, dict[str, JSON]]] = {}
    for rank in range(checkpoint.world_size):
        saved = checkpoint.state(rank)
        for record in marked(saved, "$shard"):
            if record["of"] in wanted:
                pieces.setdefault(_group(saved, record), {})[_name(record)] = record
    dtypes = checkpoint.dtypes()
    found = {}
    for path, record in wanted.items():
        if _name(record) not in dtypes:
            raise CheckpointError(f"{checkpoint.path} lacks the tensor {_name(record)!r}, which its state refers to")
        offset, shape = region(path, record["shape"])
        if record["offset"] is None:
            if tuple(shape) != tuple(record["local"]):
                raise CheckpointError(
                    f"{checkpoint.path} has {path!r} in strided shards {record['placements']}, which can be loaded "
                    "with the same mesh only: continue on as many ranks as saved it"
                )
            found[KEY + path] = _read(checkpoint, record)
            continue
        others = pieces[_group(state, record)].values()
        found[KEY + path] = _assembled(checkpoint, path, others, offset, shape, dtypes[_name(record)])
    return found


def whole_region(_: str, shape: Sequence[int]) -> Region:
    """Returns the region of a whole tensor."""
    return [0] * len(shape), shape


def without_shards(value: Any) -> Any:
    """Returns decoded values with the tensors in place of whole shards."""
    if isinstance(value, Shard):
        return value.value
    if isinstance(value, list):
        return [without_shards(item) for item in value]
    if type(value) is dict or hasattr(value, "move_to_end"):
        return type(value)((key, without_shards(item)) for key, item in value.items())
    return value


def _assembled(
    checkpoint: Checkpoint,
    path: str,
    pieces: Iterable[dict[str, JSON]],
    offset: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    result: Tensor | None = None
    count = 0
    for record in pieces:
        begins = [max(a, b) for a, b in zip(offset, record["offset"], strict=True)]
        ends = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, record["offset"], record["local"], strict=True)]
        if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
            continue
        piece = _read(checkpoint, record)
        if list(record["offset"]) == list(offset) and list(record["local"]) == list(shape):
            return piece
        if result is None:
            result = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        source = piece[_slices(begins, ends, record["offset"])]
        result[_slices(begins, ends, offset)] = source
        count += source.numel()
    result = torch.empty(tuple(shape), dtype=dtype, device="cpu") if result is None else result
    if count != result.numel():
        raise CheckpointError(
            f"{checkpoint.path} has {count} elements of the part of {path!r} at {list(offset)} of shape {list(shape)}, "
            f"expected {result.numel()}: the ranks that saved it had other parts"
        )
    return result


def _read(checkpoint: Checkpoint, record: dict[str, JSON]) -> Tensor:
    return checkpoint.read([_name(record)])[_name(record)]


def _slices(begins: Sequence[int], ends: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - at, end - at) for begin, end, at in zip(begins, ends, offset, strict=True))


def _name(record: dict[str, JSON]) -> str:
    name: str = record["tensor"]["$tensor"]
    return name


def _group(state: JSON, record: dict[str, JSON]) -> tuple[str, tuple[int, ...]]:
    # Stages of a pipeline may have different tensors at one path, on different meshes.
    return record["of"], tuple(state["meshes"][record["mesh"]]["ranks"])


# ---- ZeroRedundancyOptimizer: each rank has the states of some parameters.


def is_zero(optimizer: object) -> bool:
    """Returns whether the optimizer is torch's ZeroRedundancyOptimizer, without importing its module."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def inner(optimizer: Any) -> Any:
    """Returns the optimizer whose steps a ZeroRedundancyOptimizer makes, and others as they are."""
    return optimizer.optim if is_zero(optimizer) else optimizer


def own_state(optimizer: Any) -> dict[str, Any]:
    """Returns the state dict of an optimizer; of a ZeroRedundancyOptimizer with this rank's states alone."""
    if not is_zero(optimizer):
        found: dict[str, Any] = optimizer.state_dict()
        return found
    whole = torch.optim.Optimizer.state_dict(optimizer)
    local = optimizer.optim.state_dict()
    states = {
        optimizer._param_to_index[param]: local["state"][key]
        for key, param in params_by_key(optimizer.optim, local).items()
        if key in local["state"]
    }
    return {"state": states, "param_groups": whole["param_groups"]}


def load_own(optimizer: Any, saved: dict[str, Any], load: Callable[[Any, dict[str, Any]], None]) -> None:
    """Loads what `own_state` returned, or any state dict of all parameters, with `load` for the local optimizer."""
    if not is_zero(optimizer):
        load(optimizer, saved)
        return
    optimizer._sync_param_groups(saved["param_groups"], optimizer.param_groups)
    count = itertools.count()
    states: dict[int, Any] = {}
    groups = []
    for group, saved_group in zip(optimizer.optim.param_groups, saved["param_groups"], strict=True):
        numbers = []
        for param in group["params"]:
            numbers.append(next(count))
            if (values := saved["state"].get(optimizer._param_to_index[param])) is not None:
                states[numbers[-1]] = values
        groups.append({**saved_group, "params": numbers})
        groups[-1].pop("param_names", None)
    load(optimizer.optim, {"state": states, "param_groups": groups})


def merged(checkpoint: Checkpoint, state: JSON, numbers: Callable[[int], set[int] | None]) -> JSON:
    """Returns a state in which optimizers that were split over ranks have the states of all wanted parameters.

    `numbers` returns the numbers of these parameters by the optimizer's index; None means all.
    """
    if not isinstance(state, dict) or not state.get("split_optimizers"):
        return state
    optimizers = list(state["optimizer"])
    for index in state["split_optimizers"]:
        wanted = numbers(index)
        pairs: dict[int, JSON] = {}
        for rank in range(checkpoint.world_size):
            saved: Any = checkpoint.state(rank)
            found = saved["optimizer"][index]["state"].get("$dict", [])
            pairs |= {key: value for key, value in found if wanted is None or key in wanted}
        optimizers[index] = {**optimizers[index], "state": {"$dict": [[key, pairs[key]] for key in sorted(pairs)]}}
    return {**state, "optimizer": optimizers}
