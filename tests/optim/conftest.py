"""Fixtures of the optimizers' tests."""

from collections.abc import Iterator

import pytest

import drivetrain
from drivetrain.optim import left_to_torch


@pytest.fixture
def installed() -> Iterator[None]:
    """Puts drivetrain's optimizers in the place of torch's, and forgets afterwards what the test has constructed."""
    before = list(left_to_torch.constructed)
    drivetrain.install(optim=True)
    yield
    drivetrain.uninstall()
    left_to_torch.constructed[:] = before
