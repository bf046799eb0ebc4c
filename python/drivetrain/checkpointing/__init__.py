"""Saves and restores training states: crash-safe checkpoints that are written in the background."""

from .checkpointer import Checkpointer
from .store.coordinator import Coordinator
from .store.encryption import Encryption
from .store.errors import CheckpointError, EncryptionError, Fault
from .store.reading import Checkpoint
from .store.remote import Remote, TierStatus
from .store.save import Save
from .store.store import Store
from .survivors import continue_in_place

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpointer",
    "Coordinator",
    "Encryption",
    "EncryptionError",
    "Fault",
    "Remote",
    "Save",
    "Store",
    "TierStatus",
    "continue_in_place",
]
