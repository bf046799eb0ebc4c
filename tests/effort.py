"""Chooses how many rounds the tests with many random rounds run, and their seed.

`make test WHOLE=1` runs all rounds. Each run draws one seed and prints it; `SEED=... make test` repeats that run.
"""

import os
import secrets

IS_WHOLE = os.environ.get("WHOLE", "") not in ("", "0")
# Test processes that this one starts inherit the seed.
SEED = int(os.environ.setdefault("SEED", str(secrets.randbelow(2**32))))


def rounds(part: int, whole: int) -> int:
    """Returns the number of rounds of this run: `part` of them by default."""
    return whole if IS_WHOLE else part
