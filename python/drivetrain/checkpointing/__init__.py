"""Saves and restores training states: crash-safe checkpoints that are written in the background."""

from .checkpointer import Checkpointer
from .store.coordinator import Coordinator
from .store.errors import CheckpointError, Fault
from .store.reading import Checkpoint
from .store.save import Save
from .store.store import Store

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpointer",
    "Coordinator",
    "Fault",
    "Save",
    "Store",
]
