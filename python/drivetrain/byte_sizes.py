"""Reads sizes of memory that users write, such as "9GiB" or "50%"."""

import operator
import re
import sys
from typing import SupportsIndex

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
        unit = match[2] if match else None
        if match is None or (unit != "%" and unit not in _UNITS):
            raise ValueError(f"{name} is {budget!r}, {expected}")
        num_bytes = float(match[1]) * (whole / 100 if unit == "%" else _UNITS[str(unit)])
        if num_bytes <= 0:
            raise ValueError(f"{name} is {budget!r}, {expected}")
        return min(max(int(num_bytes), 1), sys.maxsize)
    num_bytes = operator.index(budget)
    if num_bytes <= 0:
        raise ValueError(f"{name} is {budget}, {expected}")
    return min(num_bytes, sys.maxsize)
