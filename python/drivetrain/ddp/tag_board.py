"""Gives each process group a board on which its ranks show each other which collective they start next."""

import warnings
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import _C
from . import transport
from .gather import cpu_backend, gather_objects, is_foreign, on_device
from .transport import additional_group, group_timeout, rank_name

CONNECT_WITHIN = timedelta(seconds=60)  # between hosts, whose process group has connected them over NCCL only

# By group and device: collectives on one device of a process have one order, and those on two devices have none. None:
# a single rank, or ranks that cannot make shared memory.
_boards: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _C.TagBoard | None]] = WeakKeyDictionary()


def show_collectives(comm: _C.Comm, group: dist.ProcessGroup, device: torch.device) -> None:
    """Lets the transport show its collectives on the group's board. Every rank of the group must call it."""
    boards = _boards.setdefault(group, {})
    if device not in boards:
        with on_device(device):
            boards[device] = make_board(group) if group.size() > 1 and not is_foreign(group) else None
    comm.set_board(boards[device])


def show_connection(group: dist.ProcessGroup, device: torch.device) -> None:
    """Shows the other ranks that a wrapper connects, on the board that earlier wrappers have made, if there is one.

    Raises:
        RuntimeError: Another rank has shown another collective in its place.
    """
    if (board := _boards.get(group, {}).get(device)) is not None:
        board.show_connection()


def make_board(group: dist.ProcessGroup, host: object = None) -> _C.TagBoard | None:
    """Makes a board of the group's ranks; None if memory cannot be shared. Every rank of the group must call it.

    Args:
        group: The ranks.
        host: Is equal for ranks of one host, and can be pickled; None: result of `host_identity`.
    """
    line = None
    try:
        line = _C.tag_line()
    except RuntimeError:  # the ranks learn it from the missing address
        address = _C.Segment.no_address
    else:
        address = line.address
    hosts, addresses = zip(*gather_objects((host or transport.host_identity(), address), group), strict=True)
    if _C.Segment.no_address in addresses:
        return None
    assert line is not None
    board = _board_of(line, hosts, addresses, group)
    if all(gather_objects(board is not None, group)):
        return board
    # Such as ranks of two containers that look like one host. Each is a host of its own then.
    line = _C.tag_line()
    return _board_of(line, range(len(hosts)), addresses, group)


def _board_of(
    line: _C.Segment, hosts: Sequence[object], addresses: Sequence[bytes], group: dist.ProcessGroup
) -> _C.TagBoard | None:
    """Makes this rank's board; None: it fails.

    The first ranks of several hosts get a gloo group of their own, to agree on their collectives.
    """
    rank = dist.get_rank(group)
    neighbors = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    first_ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    do_agree, between = _connected(first_ranks, group) if len(first_ranks) > 1 else (False, None)
    try:
        return _C.tag_board(
            own=line,
            addresses=[addresses[other] for other in neighbors],
            rank=neighbors.index(rank),
            ranks=neighbors,
            rank_names=[rank_name(other, group) for other in range(len(hosts))],
            between=between.group_name if between else "",
            hosts=first_ranks if do_agree else [],
            timeout_s=group_timeout(group).total_seconds() if do_agree else 0,
        )
    except RuntimeError:
        return None


def _connected(first_ranks: list[int], group: dist.ProcessGroup) -> tuple[bool, dist.ProcessGroup | None]:
    """Connects the first ranks of all hosts.

    Returns:
        True if hosts are connected, equal on every rank, and the group of the first ranks, None on other ranks.
    """
    backend = cpu_backend(group)
    if backend == "gloo":
        return True, additional_group(group, first_ranks)
    if backend is not None:
        return False, None
    # The script has asked for NCCL alone, which may use networks that gloo does not find. It must train without them.
    between, failure = None, ""
    try:
        between = additional_group(group, first_ranks, CONNECT_WITHIN)
    except RuntimeError as error:
        failure = str(error)
    are_connected = all(gather_objects(not failure, group))
    if failure or (not are_connected and dist.get_rank(group) == 0):
        warnings.warn(
            "drivetrain: the hosts cannot connect over gloo, so that they do not compare their collectives. Ranks of "
            "different hosts that leave out a step may train on with different parameters. Set GLOO_SOCKET_IFNAME to "
            f"the network interface that connects the hosts. {failure or 'Another rank has the error.'}",
            stacklevel=2,
        )
    return are_connected, between if are_connected else None
