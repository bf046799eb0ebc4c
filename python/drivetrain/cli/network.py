"""Tests the connections between ranks for `drivetrain doctor`: reachability, bandwidth and lost packets.

Every rank listens on a TCP port of its own, as gloo's ranks do, and connects to the others before any collective. It
takes IPv4 and IPv6.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from drivetrain.cli.finding import Finding, fail, not_applicable, passed, warn
from drivetrain.cli.launch import joined, listen
from drivetrain.cli.machine import interface_addresses
from drivetrain.ddp.sockets import address_towards, receive

_CONNECT_S = 3.0
_FULL_MATRIX = 64  # ranks up to which every rank connects to every other one
_PEERS = 16  # to which a rank of more connects, at distances 1, 2, 4 and so on
_SENT = 2**24  # bytes that the bandwidth's test sends to the next rank
_BLOCK = bytes(2**18)
_ARRIVED = b"a"
_SLOW_LINK = 0.25  # of the median link's bandwidth
_LOSS_LIMIT = 0.01  # of all segments
_SEGMENTS = slice(100, 140)  # tcpi_total_retrans ... tcpi_segs_out in Linux's struct tcp_info


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
        bytes_per_s: Bandwidth to it; 0 where it was not measured.
        lost: Share of segments that had to be sent again.
    """

    peer: int
    error: str = ""
    bytes_per_s: float = 0.0
    lost: float = 0.0


@contextmanager
def listening(master_addr: str) -> Iterator[Address]:
    """Listens for the other ranks on a free port while the `with` block runs, and gives it the address."""
    mine = address_towards(master_addr)
    interface = next((name for name, address in interface_addresses() if address == mine), "")
    with listen(0) as listener:
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        try:
            yield Address(socket.gethostname(), advertised_address(), listener.getsockname()[1], interface)
        finally:
            with suppress(OSError):  # where the thread has not waited yet
                listener.shutdown(socket.SHUT_RDWR)  # ends the thread's wait, which closing would not


def _serve(listener: socket.socket) -> None:
    with suppress(OSError):  # the block has ended
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    """Answers with a byte after all that is announced has arrived."""
    with connection, suppress(OSError):  # the other rank reports it
        connection.settimeout(4 * _CONNECT_S)
        left = _SENT
        while left > 0 and (block := connection.recv(min(left, len(_BLOCK)))):
            left -= len(block)
        connection.sendall(_ARRIVED)


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
    """Returns the ranks that a rank connects to, the next one first."""
    if world_size <= _FULL_MATRIX:
        return [(rank + distance) % world_size for distance in range(1, world_size)]
    distances = [1 << power for power in range(_PEERS) if 1 << power < world_size]
    return [(rank + distance) % world_size for distance in distances]


def probe_peers(rank: int, addresses: Sequence[Address]) -> list[Probe]:
    """Connects to other ranks, the next one first. If that is on another host, measures the link.

    Inside of a host, the other work of its cores decides the bandwidth.
    """
    peers = peers_of(rank, len(addresses))
    with ThreadPoolExecutor(max_workers=16) as pool:
        probes = list(pool.map(lambda peer: _probe(peer, addresses[peer]), peers))
    following = addresses[peers[0]]
    if not probes[0].error and following.host != addresses[rank].host:
        probes[0] = measure_link(probes[0], following)
    return probes


def _probe(peer: int, theirs: Address) -> Probe:
    try:
        socket.create_connection((theirs.address, theirs.port), _CONNECT_S).close()
        return Probe(peer)
    except OSError as error:
        return Probe(peer, error=error.strerror or str(error))


def measure_link(probe: Probe, where: Address) -> Probe:
    """Adds bandwidth and loss to a probe. A link that ends meanwhile becomes the probe's error."""
    try:
        with socket.create_connection((where.address, where.port), _CONNECT_S) as connection:
            connection.settimeout(4 * _CONNECT_S)
            start = time.monotonic()
            for _ in range(_SENT // len(_BLOCK)):
                connection.sendall(_BLOCK)
            receive(connection, 1)
            seconds = time.monotonic() - start
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[_SEGMENTS]
            resent, sent = struct.unpack_from("I", info, 0)[0], struct.unpack_from("I", info, 36)[0]
    except OSError as error:
        return Probe(probe.peer, error=f"the link broke or was too slow for {_SENT >> 20} MiB ({error})")
    return replace(probe, bytes_per_s=_SENT / seconds, lost=resent / max(sent, 1))


def judge(addresses: Sequence[Address], found: Mapping[int, Sequence[Probe]]) -> list[Finding]:
    """Turns the probes of all ranks into findings.

    Args:
        addresses: The address on which each rank listens, by rank.
        found: The probes of each rank that has reported.
    """
    return [_judge_reach(addresses, found), _judge_links(addresses, found)]


def _judge_reach(addresses: Sequence[Address], found: Mapping[int, Sequence[Probe]]) -> Finding:
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


def _judge_links(addresses: Sequence[Address], found: Mapping[int, Sequence[Probe]]) -> Finding:
    if len({where.host for where in addresses}) == 1:
        return not_applicable("links", "all ranks are on one host")
    links = {(rank, probe.peer): probe for rank, probes in found.items() for probe in probes if probe.bytes_per_s}
    if not links:
        return warn("links", "no bandwidth could be measured", "repair the network first")

    def name(link: tuple[int, int]) -> str:
        rank, peer = link
        return f"rank {rank} on {addresses[rank].host} to rank {peer} on {addresses[peer].host}"

    lossy = max(links, key=lambda link: links[link].lost)
    if links[lossy].lost > _LOSS_LIMIT:
        text = f"{name(lossy)} sends {links[lossy].lost:.1%} of its packets again"
        return warn("links", text, "check cable, switch port and MTU of the two hosts")
    typical = statistics.median_high(probe.bytes_per_s for probe in links.values())
    slow = min(links, key=lambda link: links[link].bytes_per_s)
    if links[slow].bytes_per_s < _SLOW_LINK * typical:
        text = f"{name(slow)} carries {_rate(links[slow].bytes_per_s)}, the median link {_rate(typical)}"
        return warn("links", text, "check cable, switch port, duplex and other traffic of the two hosts")
    return passed("links", f"{_rate(links[slow].bytes_per_s)} or more by TCP between hosts")


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 2**20:,.0f} MiB/s"
