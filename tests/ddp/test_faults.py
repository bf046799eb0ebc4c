"""Lets a rank die, stop, skip a step or bring another model: the others must report it in time and leave nothing.

Remains of a round would harm the next one, which starts the same way. A run without a fault follows the last round.

`make faults` runs 100 rounds of each fault, and a clean run after every one; see tests/faults.
"""

import pytest

from effort import rounds
from faults.harness import Harness, transports
from faults.plan import FAULTS

ROUNDS = rounds(1, whole=5)


@pytest.fixture(scope="module")
def harness() -> Harness:
    return Harness()


@pytest.mark.parametrize("transport", transports())
@pytest.mark.parametrize("fault", FAULTS)
def test_survivors_raise_and_the_next_run_starts_clean(harness: Harness, fault: str, transport: str) -> None:
    if why := harness.why_not(fault):
        pytest.skip(why)
    first = transports().index(transport)  # each transport has a round of its own
    seeds = range(first, first + ROUNDS)
    outcomes = [harness.run(fault, seed, transport, then_clean=seed == seeds[-1]) for seed in seeds]
    failed = [outcome for outcome in outcomes if outcome.problems]
    assert not failed, "\n\n".join(outcome.report() for outcome in failed)
