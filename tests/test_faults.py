"""A rank dies, stops, skips a step or brings another model: the others must say so in time, and nothing may be left.

`make faults` runs 100 rounds of each; see tests/faults.
"""

from collections.abc import Iterator

import pytest

from faults.harness import Harness, transports
from faults.plan import FAULTS

ROUNDS = 5


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with Harness() as harness:
        yield harness


@pytest.mark.parametrize("transport", transports())
@pytest.mark.parametrize("fault", FAULTS)
def test_survivors_raise_and_the_next_run_starts_clean(harness: Harness, fault: str, transport: str) -> None:
    if why := harness.why_not(fault):
        pytest.skip(why)
    failed = [outcome for seed in range(ROUNDS) if (outcome := harness.run(fault, seed, transport)).problems]
    assert not failed, "\n\n".join(outcome.report() for outcome in failed)
