"""Tests for `drivetrain doctor` whether ranks reach each other.

Every rank listens on a TCP port of its own, as gloo's ranks do, and connects to the others before any collective. It
takes IPv4 and IPv6.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from drivetrain.cli.finding import Finding, fail, passed
from drivetrain.cli.launch import joined, listen
from drivetrain.cli.machine import interface_addresses
from drivetrain.ddp.sockets import address_towards

_CONNECT_S = 3.0
_FULL_MATRIX = 64  # ranks up to which every rank connects to every other one
_PEERS = 16  # to which a rank of more connects, at distances 1, 2, 4 and so on


@dataclass(frozen=True)
class Address:
    """The address on which a rank listens, and the name of its host.

    Attributes:
        host: The host's name.
        address: The address that gloo gives the other ranks, of either family.
        port: The TCP port.
        interface: The interface by which this host reaches rank 0's; "": unknown.
    """

    host: str
    address: str
    port: int
    interface: str


@dataclass(frozen=True)
class Probe:
    """The findings of one rank about its connection to another one.

    Attributes:
        peer: The other rank.
        error: The reason why it could not be reached; "" if it could.
    """

    peer: int
    error: str = ""


class Listener:
    """Listens for the other ranks on a free port, while the `with` block runs."""

    def __init__(self, master_addr: str) -> None:
        self._socket = listen(0)
        mine = address_towards(master_addr)
        interface = next((name for name, address in interface_addresses() if address == mine), "")
        port = self._socket.getsockname()[1]
        self.address = Address(socket.gethostname(), advertised_address(), port, interface)

    def __enter__(self) -> Listener:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # where the thread has not waited yet
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait, which closing would not
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):  # the block has ended
            while True:
                self._socket.accept()[0].close()


def advertised_address() -> str:
    """Returns the address that gloo tells the other ranks: the interface's, else the host name's, else loopback."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return next((address for interface, address in interface_addresses() if interface == name), "127.0.0.1")
    with suppress(OSError):
        for family, _, _, _, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family) as probe:  # gloo takes the first that can be bound
                probe.bind(where)
                return str(where[0])
    return "127.0.0.1"


def peers_of(rank: int, world_size: int) -> list[int]:
    """Returns the ranks that a rank connects to."""
    if world_size <= _FULL_MATRIX:
        return [(rank + distance) % world_size for distance in range(1, world_size)]
    distances = [1 << power for power in range(_PEERS) if 1 << power < world_size]
    return [(rank + distance) % world_size for distance in distances]


def probe_peers(rank: int, addresses: Sequence[Address]) -> list[Probe]:
    """Connects to other ranks."""
    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(lambda peer: _probe(peer, addresses[peer]), peers_of(rank, len(addresses))))


def _probe(peer: int, theirs: Address) -> Probe:
    try:
        socket.create_connection((theirs.address, theirs.port), _CONNECT_S).close()
        return Probe(peer)
    except OSError as error:
        return Probe(peer, error=error.strerror or str(error))


def judge(addresses: Sequence[Address], found: Mapping[int, Sequence[Probe]]) -> Finding:
    """Turns the probes of all ranks into a finding.

    Args:
        addresses: The address on which each rank listens, by rank.
        found: The probes of each rank that has reported.
    """
    count = sum(len(probes) for probes in found.values())
    hosts = len({where.host for where in addresses})
    silent = [rank for rank in range(len(addresses)) if rank not in found]
    if silent:
        text = f"rank {silent[0]} on {addresses[silent[0]].host} has not reported its connections in time"
        return fail("network", text, "raise --timeout, or look at that host")
    failures = [(rank, probe) for rank, probes in found.items() for probe in probes if probe.error]
    if not failures:
        return passed("network", f"{count} connections between {len(addresses)} ranks on {hosts} host(s)")
    rank, probe = failures[0]
    where = addresses[probe.peer]
    text = (
        f"{len(failures)} of {count} connections fail; rank {rank} on {addresses[rank].host} does not reach rank "
        f"{probe.peer} on {where.host} at {joined(where.address, where.port)} ({probe.error})"
    )
    if where.address.startswith("127.") and hosts > 1:
        interface = where.interface or "<the interface between the hosts>"
        cure = f"export GLOO_SOCKET_IFNAME={interface} on {where.host}, whose host name means loopback"
    else:
        cure = (
            "open the unprivileged TCP ports between the hosts in their firewalls, or export GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME=<the interface between the hosts>"
        )
    return fail("network", text, cure)
