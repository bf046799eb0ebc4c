"""Facts about process groups, a value of every rank with one collective, and calls that keep no object alive."""

import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

R = TypeVar("R")

_SIZE_BYTES, _AT_ONCE = 8, 1024  # of a rank's text in the first collective: its size, and all of it

_TORCHS_MODULES = ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d")  # of its classes of backends


def is_foreign(group: dist.ProcessGroup | None) -> bool:
    """Returns True for a group that torch.distributed has not made: a class of a script, or one that it does not know.

    Such a group gets the calls of torch's DistributedDataParallel, and no others.
    """
    return group is not None and (
        type(group) is not dist.ProcessGroup or group not in dist.distributed_c10d._world.pg_map
    )


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns the name of the group's backend for tensors on that type of device, or None if torch brings none."""
    if is_foreign(group):
        return None
    try:
        backend = group._get_backend(torch.device(device.type))
    except RuntimeError:
        return None
    return str(backend.name()) if type(backend).__module__ in _TORCHS_MODULES else None


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Returns the numbers of the group's ranks in the job. A foreign group's ranks have their numbers in the group."""
    return list(range(group.size())) if is_foreign(group) else dist.get_process_group_ranks(group)


def cpu_backend(group: dist.ProcessGroup) -> str | None:
    """Returns the name of the group's backend for tensors on the CPU, or None if torch brings none."""
    return backend_for(group, torch.device("cpu"))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which torch's collectives of objects take place on that device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gather_objects(mine: R, group: dist.ProcessGroup | None) -> list[R]:
    """Returns every rank's object, on every rank. The objects must be picklable.

    torch's all_gather_object exchanges sizes first. Over gloo, small objects take one collective.
    """
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    if cpu_backend(whole) != "gloo":
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
        return found
    data = pickle.dumps(mine)
    header = len(data).to_bytes(_SIZE_BYTES, "little")
    texts = _gather(header + data[: _AT_ONCE - _SIZE_BYTES], _AT_ONCE, whole)
    longest = max(int.from_bytes(text[:_SIZE_BYTES], "little") for text in texts)
    if longest > _AT_ONCE - _SIZE_BYTES:
        texts = _gather(header + data, _SIZE_BYTES + longest, whole)
    return [pickle.loads(text[_SIZE_BYTES:]) for text in texts]  # which ignores what follows an object


def _gather(mine: bytes, num_bytes: int, group: dist.ProcessGroup) -> list[bytes]:
    sent = torch.frombuffer(bytearray(mine.ljust(num_bytes, b"\0")), dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    return [one.numpy().tobytes() for one in received]


def weakly(owner: object, method: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Returns a call of a method that does not keep its object alive, and returns None after the object's end."""
    of = weakref.ref(owner)

    def run(*more: Any) -> Any:
        return None if (found := of()) is None else method(found, *args, *more)

    return run
