"""Reads sizes of memory: those that users write, such as "9GiB" or "50%", and how much this process may still take."""

import operator
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, SupportsIndex

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}


def bytes_of(budget: int | str, whole: int, name: str = "budget") -> int:
    """Returns the bytes that an argument such as "9GiB" or 900_000_000 means, at most `sys.maxsize`.

    Args:
        budget: the argument.
        whole: the bytes of "100%".
        name: the argument's name, for errors.

    Raises:
        TypeError: The argument is neither a number nor a text.
        ValueError: It is not above 0, or the text is none of these.
    """
    expected = 'expected a number of bytes above 0, such as 900_000_000, "900MB" or "9GiB", or a share, such as "50%"'
    if isinstance(budget, bool) or not isinstance(budget, SupportsIndex | str):
        raise TypeError(f"{name} is {budget!r}, {expected}")
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", budget)
        units = {**_UNITS, "%": whole / 100}
        num_bytes = float(match[1]) * units.get(match[2], 0) if match else 0.0
    else:
        num_bytes = operator.index(budget)
    if num_bytes <= 0:
        raise ValueError(f"{name} is {budget!r}, {expected}")
    return min(max(int(num_bytes), 1), sys.maxsize)


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
