"""Chooses how many rounds the tests with many random rounds run: `make test WHOLE=1` runs all of them."""

import os

IS_WHOLE = os.environ.get("WHOLE", "") not in ("", "0")


def rounds(part: int, whole: int) -> int:
    """Returns the number of rounds of this run: `part` of them by default."""
    return whole if IS_WHOLE else part
