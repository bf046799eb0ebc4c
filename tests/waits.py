"""Turns every wait of the host for a GPU into an error, for tests that allow none."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def _set_sync_debug_mode(mode: str) -> None:
    """Sets the mode and ignores torch's warning that it is a prototype, which pytest would turn into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Makes operations in the block raise if they wait for the device."""
    torch.cuda.synchronize()
    try:
        _set_sync_debug_mode("error")
        yield
    finally:
        _set_sync_debug_mode("default")
