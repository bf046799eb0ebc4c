"""Reads how much memory this process may still take: of the machine, and of its control group."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    """Memory in bytes. Without a limit of the control group, `limit` is None and `taken` 0."""

    total: int
    available: int
    limit: int | None
    taken: int

    @property
    def usable(self) -> int:
        """Bytes that this process may still take."""
        if self.limit is None or self.limit >= self.total:
            return self.available
        return min(self.available, self.limit - self.taken)


def host_memory() -> HostMemory:
    """Reads the memory of this machine and of this process's control group.

    Raises:
        OSError: /proc/meminfo cannot be read.
    """
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(facts[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for folder, most, taken in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # "max" is no number
            return HostMemory(
                total, available, int(Path(folder, most).read_text()), int(Path(folder, taken).read_text())
            )
    return HostMemory(total, available, None, 0)
