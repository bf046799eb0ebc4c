"""Gives each process group a board on which its ranks show each other which collective they start next."""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import _C
from .gather import cpu_backend, gather_bytes, on_device
from .transport import group_beside, group_timeout, host_digest, rank_name

# By group and device: collectives on one device of a process have one order, and those on two devices have none. None:
# a single rank, or ranks that cannot make shared memory.
_boards: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _C.TagBoard | None]] = WeakKeyDictionary()


def show_collectives(comm: _C.Comm, group: dist.ProcessGroup, device: torch.device) -> None:
    """Lets the transport show its collectives on the group's board. Every rank of the group must call it."""
    boards = _boards.setdefault(group, {})
    if device not in boards:
        with on_device(device):
            boards[device] = make_board(group) if dist.get_world_size(group) > 1 else None
    comm.set_board(boards[device])


def make_board(group: dist.ProcessGroup, host: bytes | None = None) -> _C.TagBoard | None:
    """Makes a board of the group's ranks; None if memory cannot be shared. Every rank of the group must call it.

    Args:
        group: The ranks.
        host: Bytes that are equal for ranks of one host, and as many on every rank; None: result of `host_digest`.
    """
    line = None
    try:
        line = _C.tag_line()
    except RuntimeError:  # the ranks learn it from the missing address
        address = _C.Segment.no_address
    else:
        address = line.address
    host = host or host_digest()
    found = gather_bytes(host + address, group)
    hosts = [facts[: len(host)] for facts in found]
    addresses = [facts[len(host) :] for facts in found]
    if _C.Segment.no_address in addresses:
        return None
    assert line is not None
    board = _board_of(line, hosts, addresses, group)
    is_open_everywhere = all(opened == b"\1" for opened in gather_bytes(bytes([board is not None]), group))
    if is_open_everywhere:
        return board
    # Such as ranks of two containers that look like one host. Each is a host of its own then.
    line = _C.tag_line()
    return _board_of(line, [str(rank).encode() for rank in range(len(hosts))], addresses, group)


def _board_of(
    line: _C.Segment, hosts: list[bytes], addresses: list[bytes], group: dist.ProcessGroup
) -> _C.TagBoard | None:
    """Makes this rank's board; None: it fails.

    The first ranks of several hosts get a group of their own, if the group has gloo, to agree on their collectives.
    """
    rank = dist.get_rank(group)
    neighbors = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    first_ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    do_agree = len(first_ranks) > 1 and cpu_backend(group) == "gloo"
    between = group_beside(group, first_ranks) if do_agree else None
    try:
        return _C.tag_board(
            own=line,
            addresses=[addresses[other] for other in neighbors],
            rank=neighbors.index(rank),
            ranks=neighbors,
            rank_names=[rank_name(other, group) for other in range(len(hosts))],
            between=between.group_name if between else "",
            hosts=first_ranks if do_agree else [],
            timeout_s=group_timeout(group, torch.device("cpu")).total_seconds() if do_agree else 0,
        )
    except RuntimeError:
        return None
