"""Makes every wait of the host for a GPU an error, for tests that allow none."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def _set_sync_debug_mode(mode: str) -> None:
    """Sets it without torch's warning that the mode is a prototype, which our settings would raise as an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, an operation that waits for the device raises. The mode ends with the block, whatever happens in it."""
    torch.cuda.synchronize()
    try:
        _set_sync_debug_mode("error")
        yield
    finally:
        _set_sync_debug_mode("default")
