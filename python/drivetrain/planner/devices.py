"""Reads the table of devices that plans are made for."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..memory import host_memory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """A level of the network, as one device sees it.

    Attributes:
        bandwidth: Achievable bytes per second in one direction.
        latency: Seconds of one step of a ring.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """A device that trains.

    Attributes:
        key: Its key in the table, such as "h100".
        name: Its name.
        kind: "cuda" or "cpu".
        memory_bytes: Bytes that a process may use.
        peak: Peak FLOP/s of dense products by dtype, of the data sheet.
        matmul_share: The share of the peak that large products achieve.
        memory_bandwidth: Achievable bytes per second.
        launch_s: Seconds that the host needs per operation.
        context_bytes: Bytes that a process takes before its first tensor.
        workspace_bytes: Bytes of the workspace of cuBLAS.
        link: The link between devices of a host.
        network: The link between hosts, for one device.
        call_s: On a CPU, seconds that Python and autograd add to an operation.
    """

    key: str
    name: str
    kind: str
    memory_bytes: int
    peak: dict[str, float]
    matmul_share: float
    memory_bandwidth: float
    launch_s: float
    context_bytes: int
    workspace_bytes: int
    link: Link
    network: Link
    call_s: float = 5e-6

    def matmul_rate(self, dtype: str) -> float:
        """Returns the achievable FLOP/s of products of a dtype."""
        return self.peak.get(dtype, self.peak["float32"]) * self.matmul_share


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not TOML. The message names the file.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def device_names(path: str | os.PathLike[str] | None = None) -> list[str]:
    """Returns the keys of the table."""
    return list(_table(path))


def device_of(key: str, path: str | os.PathLike[str] | None = None) -> Device:
    """Returns a device by its key, in any case, of the built-in table and of a file with more devices or other figures.

    Raises:
        ValueError: The table has no such device, or an entry is incomplete.
        OSError: The file cannot be read.
    """
    table = _table(path)
    entry = table.get(key.lower()) if isinstance(key, str) else None
    if entry is None:
        raise ValueError(f"device is {key!r}, expected one of {', '.join(table)}, or a file of devices with it")
    try:
        return Device(
            key=key.lower(),
            name=entry["name"],
            kind=entry["kind"],
            memory_bytes=int(entry["memory"] * GIB) or host_memory().total,
            peak=dict(entry["peak"]),
            matmul_share=entry["matmul_share"],
            memory_bandwidth=entry["memory_bandwidth"] * entry["memory_share"],
            launch_s=entry["launch"],
            context_bytes=int(entry["context"] * GIB),
            workspace_bytes=entry["cublas_workspace"],
            link=_link(entry["link"]),
            network=_link(entry["network"]),
        )
    except KeyError as error:
        raise ValueError(f"the entry of device {key!r} lacks {error}") from error


def _link(entry: dict[str, float]) -> Link:
    return Link(entry["bandwidth"] * entry["share"], entry["latency"])


def _table(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    table = read_toml(Path(__file__).with_name("devices.toml"))
    if path is not None:
        table |= read_toml(Path(path))
    return table
