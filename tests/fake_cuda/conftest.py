"""Collects the stand-in's own tests only where it is preloaded. `make test-fake-cuda` runs them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import fake_cuda

collect_ignore_glob = [] if fake_cuda.is_loaded() else ["test_*.py"]


@pytest.fixture
def synchronized() -> Iterator[None]:
    """Keeps work of other tests out of this one."""
    torch.cuda.synchronize()
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its stream current
    torch.cuda.synchronize()
