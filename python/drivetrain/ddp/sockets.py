"""Finds this host's address on the way to another host, and reads from sockets."""

import socket
from contextlib import suppress


def address_towards(host: str) -> str:
    """Returns this host's address by which it reaches another host; "" if it does not know a way."""
    with suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)  # a datagram socket sends nothing here
                return str(probe.getsockname()[0])
    return ""


def receive(connection: socket.socket, size: int) -> bytes:
    """Returns the next `size` bytes. Raises ConnectionError if the other side closes the connection before."""
    received = bytearray(size)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("it closed the connection")
        view = view[count:]
    return bytes(received)
