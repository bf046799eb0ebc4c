"""Tests that drivetrain's class passes every DDP test of torch that torch's class passes on a CPU."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from . import baseline
from .pool import Pool


class Difference(NamedTuple):
    """An intended difference: the reason why drivetrain fails a test, and the only text that it may fail with."""

    reason: str
    fails_at: str


EXCEPTIONS = {
    "test_skip_all_reduce_unused_parameters": Difference(
        "counts buckets: torch first fills them in registration order, so the unused small layer has its own bucket; "
        "drivetrain fills them in the expected order of gradients, so it shares the large layer's bucket",
        "Expected 2 but got 1.",
    ),
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": Difference(
        "passes the logger to a private function of torch that accepts only torch's logger",
        "dist._compute_bucket_assignment_by_size(",
    ),
}

_RECORDED = baseline.recorded()


def _names() -> list[str]:
    if _RECORDED:
        return list(_RECORDED)
    pool = Pool("torch")
    try:
        return pool.names()
    finally:
        pool.close()


@pytest.fixture(scope="module")
def torchs() -> Iterator[Pool]:
    pool = Pool("torch")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def ours() -> Iterator[Pool]:
    pool = Pool("drivetrain")
    yield pool
    pool.close()


@pytest.mark.parametrize("name", _names())
def test_passes_what_torchs_class_passes(name: str, torchs: Pool, ours: Pool) -> None:
    theirs = _RECORDED.get(name) or baseline.verdict(torchs.run(name))
    if theirs != baseline.PASSES:
        pytest.skip(theirs)
    outcome = ours.run(name)
    assert "torch" not in outcome.built, "a module of torch's class was built: the name it was built by is not ours"
    difference = EXCEPTIONS.get(name)
    if difference is None:
        if outcome.status != "passed":
            pytest.fail(f"{outcome.status}: {outcome.why}\n\n{outcome.detail}", pytrace=False)
        return
    if outcome.status == "passed":
        pytest.fail(f"passes: take it off the list of exceptions ({difference.reason})", pytrace=False)
    if difference.fails_at not in outcome.detail:
        pytest.fail(f"fails elsewhere than at {difference.fails_at!r}\n\n{outcome.detail}", pytrace=False)
    pytest.xfail(difference.reason)


def test_the_recorded_tests_are_the_installed_ones(ours: Pool) -> None:
    if not _RECORDED:
        pytest.skip(f"baseline.txt is for another torch than {baseline.torch_version()}: measured on the fly")
    assert ours.names() == list(_RECORDED)


def test_the_pools_run_the_class_they_say(torchs: Pool, ours: Pool) -> None:
    theirs, mine = (pool.run("test_ddp_zero_output_features") for pool in (torchs, ours))
    assert (theirs.built, mine.built) == ({"torch": 1}, {"drivetrain": 1})
