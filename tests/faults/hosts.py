"""Makes network namespaces that stand for hosts, each with a link to one bridge, for a round's ranks."""

import itertools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from . import room

INTERFACE = "wire"
IPV4, IPV6 = "10.213.8.{}/24", "fd13:8::{}/64"
_NAMES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_made = itertools.count()  # the system removes a namespace's links some time after it, so each gets names of its own


class Hosts:
    """Makes `count` hosts, and removes them. Raises PermissionError where none can be made.

    `networks` are their addresses, with {} in place of a host's number from 1.
    """

    def __init__(self, count: int, networks: Sequence[str] = (IPV4,)) -> None:
        number = next(_made)
        self.names = [f"drivetrain-{os.getpid()}-{number}-{i}" for i in range(count)]
        self._networks = networks
        self._bridge = f"dt{os.getpid() % 1_000_000}n{number % 100}"

    def __enter__(self) -> "Hosts":
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for i, name in enumerate(self.names):
                _ip("netns", "add", name)
                port = f"{self._bridge}p{i}"
                _ip("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
                _ip("link", "set", port, "master", self._bridge, "up")
                for network in self._networks:
                    # Without duplicate address detection, an IPv6 address can be used at once.
                    once = ["nodad"] if ":" in network else []
                    _ip("-n", name, "addr", "add", network.format(i + 1), "dev", INTERFACE, *once)
                _ip("-n", name, "link", "set", INTERFACE, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self._delete()
            why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise PermissionError(f"no network namespaces can be made here: {why}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._delete()

    def _delete(self) -> None:
        """Removes what exists of them. A link goes with its namespace."""
        for command in [["link", "delete", self._bridge], *(["netns", "delete", name] for name in self.names)]:
            subprocess.run(["ip", *command], capture_output=True, timeout=30, check=False)


def enter(name: str) -> None:
    """Moves this process to that host. It must not have made a thread yet."""
    room.enter_namespace(_NAMES / name, _CLONE_NEWNET)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
