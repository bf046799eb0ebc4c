"""Chooses the transport that carries gradients between ranks, after the ranks have exchanged where they run."""

import importlib.util
import itertools
import os
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from .. import _C, processes
from .gather import backend_for, cpu_backend, gather_objects, is_foreign, on_device, ranks_of

CHOICES = ("auto", "torch", "shm", "nccl")
VARIABLE = "DRIVETRAIN_TRANSPORT"

# Each process group has one transport per dtype that rounds on the wire, however many modules are wrapped. All its
# tensors must go in one order.
_wire_comms: WeakKeyDictionary[dist.ProcessGroup, dict[torch.dtype, _C.Comm]] = WeakKeyDictionary()
_twins: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()

_names = itertools.count(1)

_WIRE_DTYPES = (None, torch.bfloat16, torch.float8_e5m2)
_UNFIT_WIRE_DTYPES = {
    torch.float16: "gradients may exceed float16's largest number, 65504",
    **dict.fromkeys(
        (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        "it has no infinity, so that the overflow of one rank would not reach the others",
    ),
}


def requested(argument: str) -> str:
    """Returns the requested transport: the argument or, where that is "auto", the environment variable if it is set."""
    source, choice = "transport", argument
    if argument == "auto" and os.environ.get(VARIABLE):
        source, choice = VARIABLE, os.environ[VARIABLE]
    if choice not in CHOICES:
        raise ValueError(f"{source} is {choice!r}, expected one of: {', '.join(map(repr, CHOICES))}.")
    return choice


def requested_wire_dtype(argument: torch.dtype | str | None) -> torch.dtype | None:
    """Returns the requested wire_dtype, which the command line gives by its name."""
    if argument is None:
        return None
    dtype = getattr(torch, argument.removeprefix("torch."), None) if isinstance(argument, str) else argument
    if isinstance(dtype, torch.dtype) and dtype in _WIRE_DTYPES:
        return dtype
    why = f": {_UNFIT_WIRE_DTYPES[dtype]}" if isinstance(dtype, torch.dtype) and dtype in _UNFIT_WIRE_DTYPES else ""
    raise ValueError(f"wire_dtype is {argument!r}, expected {', '.join(map(str, _WIRE_DTYPES[1:]))} or None{why}.")


def refuse_wire_dtype(wire_dtype: torch.dtype | None, what: str) -> None:
    """Raises NotImplementedError if there is a wire_dtype, where `what` lets torch reduce without the reducer."""
    if wire_dtype is not None:
        raise NotImplementedError(
            f"wire_dtype does not go together with {what}: torch then reduces past the reducer. Leave one of the two "
            "out."
        )


def rank_name(rank: int, group: dist.ProcessGroup | None) -> str:
    """Returns a rank's name in errors: its number in the job, and its number in the group where that differs."""
    everywhere = ranks_of(group)[rank] if group is not None else rank
    return f"rank {rank}" if everywhere == rank else f"rank {everywhere} (rank {rank} of its group)"


def make_comm(
    choice: str,
    group: dist.ProcessGroup,
    device: torch.device,
    wire_dtype: torch.dtype | None = None,
    logical_ranks: int | None = None,
) -> _C.Comm:
    """Makes the transport for parameters on that device. Every rank of the group must call it.

    Args:
        choice: Result of `requested`; the same on every rank.
        group: The ranks.
        device: The parameters' device.
        wire_dtype: Result of `requested_wire_dtype`; the same on every rank.
        logical_ranks: Sums in the order of a binary tree, so that this many ranks would get the same bits. None: sums
            as the transport does.

    Raises:
        ValueError: As `refuse_logical_ranks`.
        RuntimeError: The ranks ask for different transports, or a rank cannot use the requested "nccl". Every rank
            raises it.
        NotImplementedError: Likewise, or as `refuse_wire`.
    """
    refuse_wire(group, device, wire_dtype)
    refuse_logical_ranks(group, device, logical_ranks)
    size = dist.get_world_size(group)
    in_tree = logical_ranks is not None and size > 1
    if choice == "nccl":
        return _nccl_comm(group, device, in_tree=in_tree)
    if size == 1:
        wire_dtype = None
    hosts, why_not = _find_hosts(choice, group, device, wire_dtype)
    over_wire = torch.float32 if in_tree and device.type == "cpu" else wire_dtype  # float32: exact, in tree order
    over_group = _wire_comm(group, device, over_wire) if over_wire else _comm_over(group, device, in_tree=in_tree)
    if in_tree and len(set(hosts)) > 1:
        hosts, why_not = [], "with logical_ranks it is for the ranks of one host"
    if not hosts:
        if choice == "shm" and why_not and group.rank() == 0:
            _warn(why_not)
        return over_group
    over_leaders = None
    if len(set(hosts)) > 1:
        first_ranks = [rank for rank, host in enumerate(hosts) if rank == hosts.index(host)]
        # Every module gets its own group: two that are reduced at the same time may be summed within hosts in different
        # orders.
        leaders = additional_group(group, first_ranks)
        leaders_returning = additional_group(group, first_ranks) if wire_dtype else None
        over_leaders = _comm_over(leaders, device, leaders_returning, wire_dtype) if leaders else None
    return _C.shm_comm(
        process_group=group.group_name,
        hosts=hosts,
        group=over_group,
        leaders=over_leaders,
        timeout_s=group_timeout(group, device).total_seconds(),
        ranks=dist.get_process_group_ranks(group),
        in_tree=in_tree,
    )


def unconnected_comm(group: dist.ProcessGroup, device: torch.device, wire_dtype: torch.dtype | None = None) -> _C.Comm:
    """Makes a transport without any communication, for a wrapper whose ranks meet later, in `make_comm`.

    Raises:
        NotImplementedError: As `refuse_wire`.
    """
    refuse_wire(group, device, wire_dtype)
    return _comm_over(group, device)


def refuse_logical_ranks(group: dist.ProcessGroup, device: torch.device, logical_ranks: int | None) -> None:
    """Raises ValueError if the ranks do not divide logical_ranks; NotImplementedError for a backend."""
    if logical_ranks is None:
        return
    if logical_ranks % dist.get_world_size(group):
        ranks = dist.get_world_size(group)
        raise ValueError(f"logical_ranks is {logical_ranks}, expected a multiple of the number of ranks, {ranks}.")
    backend = backend_for(group, device)
    if (device.type, backend) not in (("cpu", "gloo"), ("cuda", "nccl")):
        raise NotImplementedError(
            f"logical_ranks is set, the parameters are on {device} and the process group's backend for them is "
            f"{backend!r}. drivetrain supports logical_ranks on the CPU over 'gloo', and on a GPU over 'nccl'."
        )


def refuse_wire(group: dist.ProcessGroup, device: torch.device, wire_dtype: torch.dtype | None) -> None:
    """Raises NotImplementedError if there is a wire_dtype for parameters on a device, or over a group without gloo."""
    if wire_dtype is not None and (device.type != "cpu" or cpu_backend(group) != "gloo"):
        raise NotImplementedError(
            f"wire_dtype is {wire_dtype}, the parameters are on {device} and the process group's backend for the CPU "
            f"is {cpu_backend(group)!r}. drivetrain supports wire_dtype for parameters on the CPU over 'gloo' only. "
            "Leave it out, or, over NCCL, register torch's bf16_compress_hook, which also sums in bfloat16."
        )


def nccl_package() -> str:
    """Returns the path of NCCL in the package nvidia-nccl-cu*, on which a CUDA build of torch depends; "": none."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package of NVIDIA is installed
        spec = None
    folders = spec.submodule_search_locations if spec else None
    libraries = [path for folder in folders or () if (path := Path(folder, "lib", "libnccl.so.2")).exists()]
    return str(libraries[0]) if libraries else ""


def _nccl_comm(group: dist.ProcessGroup, device: torch.device, *, in_tree: bool) -> _C.Comm:
    why_not, library = "", nccl_package()
    if is_foreign(group):
        raise RuntimeError("transport 'nccl' cannot be used: process_group is not one of torch.distributed's.")
    if device.type != "cuda":
        why_not = f"the parameters are on {device}, expected a CUDA device ('shm' and 'torch' are for the CPU)"
    else:
        try:
            _C.nccl_library(library)
        except RuntimeError as error:
            why_not = str(error)
    # Ranks agree first, so that none waits for a rank that cannot take part.
    with on_device(device):
        reasons = gather_objects(why_not, group)
    for rank, reason in enumerate(reasons):
        if reason:
            raise RuntimeError(f"transport 'nccl' cannot be used, on {rank_name(rank, group)}: {reason}")
    return _C.nccl_comm(
        process_group=group.group_name,
        device=str(device),
        timeout_s=group_timeout(group, device).total_seconds(),
        fallback=library,
        ranks=dist.get_process_group_ranks(group),
        in_tree=in_tree,
    )


def warn_of_fallback(comm: _C.Comm, group: dist.ProcessGroup) -> None:
    """Warns on rank 0 if gradients do not lie in the transport's own memory, once all memory is allocated."""
    if not comm.why_not or group.rank() != 0:
        return
    if not comm.name.startswith("nccl"):
        _warn(comm.why_not)
        return
    warnings.warn(
        "drivetrain: gradients lie in memory of torch's allocator, where NCCL is slower than in its own: "
        f"{comm.why_not}. Leave more device memory free when DistributedDataParallel is constructed (NCCL before "
        "2.27 rounds sizes up, to 512 MiB on some GPUs), or pass transport='torch'.",
        RuntimeWarning,
        stacklevel=2,
    )


def _warn(why_not: str) -> None:
    warnings.warn(
        f"drivetrain: gradients go through the process group, not through shared memory: {why_not}. This is slower and "
        f"otherwise the same; pass transport='torch' or set {VARIABLE}=torch to choose it without this warning.",
        RuntimeWarning,
        stacklevel=2,
    )


def _find_hosts(
    choice: str, group: dist.ProcessGroup, device: torch.device, wire_dtype: torch.dtype | None
) -> tuple[list[int], str]:
    """Finds which ranks share a host, after a check that all ranks ask for the same.

    Returns:
        Each rank's host as a number, empty if memory is not to be shared, and why not; "": nothing needs it.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return [], ""
    if device.type != "cpu":
        return [], f"the parameters are on {device}, shared memory is for the CPU"
    if (backend := cpu_backend(group)) != "gloo":
        return [], f"the process group's backend for the CPU is {backend!r}, expected 'gloo'"
    choices, dtypes, identities = zip(*gather_objects((choice, wire_dtype, host_identity()), group), strict=True)
    _check_same(group, "transport", choices, f", or set {VARIABLE} everywhere")
    _check_same(group, "wire_dtype", dtypes)
    if choice == "torch":
        return [], ""
    if len(set(identities)) == size:
        return [], "no two ranks are on the same host, in the same container and of the same user"
    return [identities.index(identity) for identity in identities], ""


def _check_same(group: dist.ProcessGroup, what: str, values: Sequence[Any], or_else: str = "") -> None:
    if len(set(values)) > 1:
        by_rank = "; ".join(f"{rank_name(rank, group)}: {value!r}" for rank, value in enumerate(values))
        raise RuntimeError(
            f"DistributedDataParallel needs the same {what} on every rank, but it differs: {by_rank}. Pass the same "
            f"one everywhere{or_else}."
        )


def host_identity() -> tuple[str, ...]:
    """Returns a value that is equal for ranks that can share memory, and differs for others as far as can be detected.

    Ranks of two hosts with equal values cannot open each other's memory. All ranks then agree on the process group.
    """
    try:
        spaces = [str((processes.NAMESPACES / space).readlink()) for space in ("net", "pid")]
    except OSError:
        return (str(uuid.uuid4()),)  # nothing shows which ranks' memory can be opened
    return (processes.machine(), *spaces, str(os.getuid()))


def group_timeout(group: dist.ProcessGroup, device: torch.device | None = None) -> timedelta:
    """Returns the group's timeout for operations on that type of device; None: on the CPU, if the group has those."""
    if device is None:
        devices = group._device_types
        device = torch.device("cpu") if torch.device("cpu") in devices else devices[0]
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def additional_group(
    group: dist.ProcessGroup, ranks: list[int], connect_within: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Makes another gloo group of some of the group's ranks. Every rank must call it.

    Args:
        group: Its timeout becomes the new group's.
        ranks: Members of the new group in its order, as ranks of `group`.
        connect_within: Limit for the connections between the members; None: the group's timeout.

    Returns:
        The new group, or None on ranks that are not in it.

    Raises:
        RuntimeError: The members cannot connect.
    """
    is_member = dist.get_rank(group) in ranks
    # All ranks of the job take part in making a group, unless the call says that only its own ranks do.
    is_whole_job = dist.get_world_size(group) == dist.get_world_size()
    names = dist.distributed_c10d._world.pg_names
    alike = nullcontext() if is_whole_job else _as_many_groups(max(gather_objects(len(names), group)))
    if not (is_whole_job or is_member):
        return None
    members = [dist.get_global_rank(group, rank) for rank in ranks]
    # torch numbers ranks in the order of their job. Not every supported torch can make groups in another one.
    order: dict[str, Any] = {} if members == sorted(members) else {"sort_ranks": False}
    with alike:
        made: dist.ProcessGroup = dist.new_group(
            members,
            timeout=connect_within or group_timeout(group),
            backend="gloo",
            use_local_synchronization=not is_whole_job,
            **order,
        )
    if not is_member:
        return None
    if connect_within:
        dist.distributed_c10d._set_pg_timeout(group_timeout(group), made)
    return made


@contextmanager
def _as_many_groups(count: int) -> Iterator[None]:
    """Lets this rank appear to know so many process groups.

    torch names a group that not all ranks of the job make after its ranks and that number. Ranks that have made
    different numbers of groups would wait for each other's names.
    """
    names: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    fillers = [object() for _ in range(count - len(names))]
    names.update((filler, f"drivetrain/filler/{number}") for number, filler in enumerate(fillers))
    try:
        yield
    finally:
        for filler in fillers:
            del names[filler]


def checking_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a gloo group of the same ranks, in which `check_compute` compares them. Every rank must call it."""
    return twin_of(group, "check")


def twin_of(group: dist.ProcessGroup, use: str) -> dist.ProcessGroup:
    """Returns the group's one gloo group of the same ranks for a use, however many modules are wrapped.

    Its connections and threads outlive wrappers. Every rank of the group must call it.
    """
    twins = _twins.setdefault(group, {})
    if use not in twins:
        made = additional_group(group, list(range(dist.get_world_size(group))))
        assert made is not None  # every rank is a member
        twins[use] = made
    return twins[use]


def _wire_comm(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> _C.Comm:
    """Returns the process group's transport that sends that dtype. Every rank of the group must call it."""
    comms = _wire_comms.setdefault(group, {})
    if dtype not in comms:
        comms[dtype] = _comm_over(group, device, twin_of(group, str(dtype)), dtype)
    return comms[dtype]


def _comm_over(
    group: dist.ProcessGroup,
    device: torch.device,
    returning: dist.ProcessGroup | None = None,
    wire_dtype: torch.dtype | None = None,
    in_tree: bool = False,
) -> _C.Comm:
    """Makes a transport over the process group. With a wire_dtype it rounds, and its sums return in the other group.

    in_tree: Sums over NCCL in the order of a binary tree.
    """
    ranks = ranks_of(group)
    if wire_dtype is None:
        name: Any = f"drivetrain/{next(_names)}"  # a script's own group may have none, or one that is not registered
        _register_process_group(name, group)
        try:
            backend = backend_for(group, device) or ""
            return _C.torch_comm(process_group=name, backend=backend, ranks=ranks, in_tree=in_tree)
        finally:
            _unregister_process_group(name)
    assert returning is not None
    return _C.wire_comm(group.group_name, returning.group_name, wire_dtype, ranks)
