"""What carries gradients between ranks: the choice, and what a rank must know of the others before it is made."""

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from . import _C

CHOICES = ("auto", "torch", "shm", "nccl")
VARIABLE = "DRIVETRAIN_TRANSPORT"

# Per process group, made once however many modules are wrapped: groups of some or all of its ranks, by what for (None
# on ranks that are not in it), and the transport that rounds on the wire, where all must go in one order.
_groups_beside: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup | None]] = WeakKeyDictionary()
_wire_comms: WeakKeyDictionary[dist.ProcessGroup, _C.Comm] = WeakKeyDictionary()


def requested(argument: str) -> str:
    """The transport asked for: the argument, or, where that is "auto", the environment variable if it is set."""
    source, choice = "transport", argument
    if argument == "auto" and os.environ.get(VARIABLE):
        source, choice = VARIABLE, os.environ[VARIABLE]
    if choice not in CHOICES:
        raise ValueError(f"{source} is {choice!r}, expected one of: {', '.join(map(repr, CHOICES))}.")
    if choice == "nccl":
        raise NotImplementedError(
            f"{source} is 'nccl', which drivetrain does not support yet: over an NCCL process group, 'torch' uses NCCL."
        )
    return choice


def requested_wire_dtype(argument: torch.dtype | str | None) -> torch.dtype | None:
    """The wire_dtype asked for; the command line can only give its name."""
    if argument is None:
        return None
    if argument in (torch.bfloat16, "bfloat16", "torch.bfloat16"):
        return torch.bfloat16
    if argument in (torch.float16, "float16", "torch.float16"):
        raise ValueError(
            "wire_dtype is float16, expected torch.bfloat16 or None: gradients may pass float16's largest, 65504."
        )
    raise ValueError(f"wire_dtype is {argument!r}, expected torch.bfloat16 or None.")


def make_comm(
    choice: str, group: dist.ProcessGroup, device: torch.device, wire_dtype: torch.dtype | None = None
) -> _C.Comm:
    """The transport for parameters on that device. Every rank of the group must call it.

    Args:
        choice: what `requested` returned; must be the same on every rank.
        group: the ranks.
        device: the parameters'.
        wire_dtype: what `requested_wire_dtype` returned; must be the same on every rank.

    Raises:
        RuntimeError: the ranks ask for different transports.
        NotImplementedError: wire_dtype is given, and the parameters are not on the CPU or the group is not gloo there.
    """
    size = dist.get_world_size(group)
    if wire_dtype is not None and (device.type != "cpu" or _cpu_backend(group) != "gloo"):
        raise NotImplementedError(
            f"wire_dtype is {wire_dtype}, the parameters are on {device} and the process group's backend for the CPU "
            f"is {_cpu_backend(group)!r}: drivetrain supports wire_dtype for parameters on the CPU over 'gloo' only. "
            "Leave it out, or, over NCCL, register torch's bf16_compress_hook, which adds up in bfloat16 too."
        )
    if size == 1:
        wire_dtype = None
    hosts, why_not = _hosts(choice, group, device, wire_dtype)
    over_group = _comm_over(group, device, _group_beside(group, "wire", list(range(size))) if wire_dtype else None)
    if not hosts:
        if choice == "shm" and why_not and dist.get_rank(group) == 0:
            _warn(why_not)
        return over_group
    over_leaders = None
    if len(set(hosts)) > 1:
        first_ranks = [rank for rank, host in enumerate(hosts) if rank == hosts.index(host)]
        leaders = _group_beside(group, "leaders", first_ranks)
        returning = _group_beside(group, "leaders' wire", first_ranks) if wire_dtype else None
        over_leaders = _comm_over(leaders, device, returning) if leaders else None
    return _C.shm_comm(
        process_group=group.group_name,
        hosts=hosts,
        group=over_group,
        leaders=over_leaders,
        timeout_s=_timeout(group).total_seconds(),
    )


def warn_of_fallback(comm: _C.Comm, group: dist.ProcessGroup) -> None:
    """Warns on rank 0 if memory was to be shared and could not be. To be called once all memory is allocated."""
    if comm.why_not and dist.get_rank(group) == 0:
        _warn(comm.why_not)


def _warn(why_not: str) -> None:
    warnings.warn(
        f"drivetrain: gradients go through the process group, not through shared memory: {why_not}. This is slower and "
        f"otherwise the same; transport='torch' or {VARIABLE}=torch says that it is meant.",
        RuntimeWarning,
        stacklevel=2,
    )


def _hosts(
    choice: str, group: dist.ProcessGroup, device: torch.device, wire_dtype: torch.dtype | None
) -> tuple[list[int], str]:
    """Each rank's host as a number, if memory is to be shared; else nothing, and why not ("": there is no need)."""
    size = dist.get_world_size(group)
    if size == 1:
        return [], ""
    if device.type != "cpu":
        return [], f"the parameters are on {device}, shared memory is for the CPU"
    if (backend := _cpu_backend(group)) != "gloo":
        return [], f"the process group's backend for the CPU is {backend!r}, expected 'gloo'"
    facts: list[Any] = [None] * size
    dist.all_gather_object(facts, (choice, wire_dtype, _host_identity()), group=group)
    _check_same("transport", [fact[0] for fact in facts], f", or set {VARIABLE} everywhere")
    _check_same("wire_dtype", [fact[1] for fact in facts])
    if choice == "torch":
        return [], ""
    identities = [fact[2] for fact in facts]
    if len(set(identities)) == size:
        return [], "no two ranks are on the same host, in the same container and of the same user"
    return [identities.index(identity) for identity in identities], ""


def _check_same(what: str, values: list[Any], or_else: str = "") -> None:
    if len(set(values)) > 1:
        by_rank = "; ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
        raise RuntimeError(
            f"DistributedDataParallel needs the same {what} on every rank, but it differs: {by_rank}. Pass the same "
            f"one everywhere{or_else}."
        )


def _host_identity() -> tuple[str, ...]:
    """The same for ranks that can share memory, and different for others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = (str(Path("/proc/self/ns", space).readlink()) for space in ("net", "pid"))
    return (boot, *spaces, str(os.getuid()))


def _cpu_backend(group: dist.ProcessGroup) -> str | None:
    try:
        return str(group._get_backend(torch.device("cpu")).name())
    except RuntimeError:  # torch's word for: none for that device
        return None


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """The group's, for operations on the CPU."""
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def _group_beside(group: dist.ProcessGroup, purpose: str, ranks: list[int]) -> dist.ProcessGroup | None:
    """A further gloo group of those ranks of the group; None on the others. Every rank of the group must call it."""
    made = _groups_beside.setdefault(group, {})
    if purpose not in made:
        is_member = dist.get_rank(group) in ranks
        # All ranks of the job take part in making a group, unless told that only its own do.
        is_whole_job = dist.get_world_size(group) == dist.get_world_size()
        beside = None
        if is_whole_job or is_member:
            beside = dist.new_group(
                [dist.get_global_rank(group, rank) for rank in ranks],
                timeout=_timeout(group),
                backend="gloo",
                use_local_synchronization=not is_whole_job,
            )
        made[purpose] = beside if is_member else None
    return made[purpose]


def _comm_over(group: dist.ProcessGroup, device: torch.device, returning: dist.ProcessGroup | None) -> _C.Comm:
    """The transport over the process group; with bfloat16 on the wire if there is a group for its sums to return in."""
    if returning is None:
        return _C.torch_comm(process_group=group.group_name, device=str(device))
    if group not in _wire_comms:
        _wire_comms[group] = _C.wire_comm(process_group=group.group_name, returning=returning.group_name)
    return _wire_comms[group]
