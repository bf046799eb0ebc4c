"""Defines the fixtures that the tests of activation budgets share."""

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.utils.checkpoint
from models import Gpt, Step
from torch import nn

from drivetrain import _C


@pytest.fixture
def gpt() -> Iterator[tuple[nn.Module, Step]]:
    torch.manual_seed(0)
    model = Gpt()
    ids = torch.randint(50, (2, 24))

    def step() -> None:
        torch.manual_seed(1)
        model.zero_grad()
        model(ids).backward()

    yield model, step
    assert _C.ActivationRecorder().live_bytes == 0


@pytest.fixture
def threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
